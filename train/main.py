"""The one program: `python -m train.main COMMAND`, `torchrun train/main.py train`, `rankup train`.

The whole line is understood before anything runs; torch is imported by the command that needs it. Every end has its
exit code: see `rankup.errors`.
"""

import getpass
import logging
import os
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

if not __package__:
    # Started as a file: Python put this folder on the path, where `log` or `data` would be taken for the user's own.
    # This folder is the package `train`, and `rankup.program` in an installed rankup
    _here = Path(__file__).resolve().parent
    _above = _here.parents[1] if (_here.parent / "__init__.py").exists() else _here.parent
    sys.path[:] = [str(_above), *(p for p in sys.path if Path(p or ".").resolve() != _here)]
    __package__ = ".".join(_here.relative_to(_above).parts)

from rankup.agent.processes import die_with_parent
from rankup.group.stop import StopRequest

if __name__ == "__main__":
    # Before anything slow is imported: a process that is stopped while it starts must neither die of the signal, with a
    # traceback for SIGINT, nor sit out a grace period
    _stop = StopRequest().install()

from rankup import cli
from rankup.agent.logs import guard, setup_logging
from rankup.agent.processes import finish
from rankup.agent.status import tell_end
from rankup.env.rank_env import RankEnv, code_folder, read_rank_env, with_options, without_launcher
from rankup.errors import FINISHED, USER_MISTAKE, UserError

from .commands.context import Context
from .commands.table import COMMANDS
from .config import load_config
from .config.command_line import Request, parse_args
from .config.help_text import help_text
from .config.options import DoctorOptions, RankOptions
from .run import CHOICES

log = logging.getLogger("rankup")

# Imported once, by the process that forks the ranks of a node
__preload__ = [
    ".loop", ".parallel.ddp", ".workloads.images", ".workloads.text", "torch.utils.tensorboard"
]


def main(argv: list[str] | None = None, *, stop: StopRequest | None = None) -> int:
    """Understand the line, run its command, and return its exit code. `stop`: by default it is installed here."""
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in cli.COMMANDS and argv[0] not in COMMANDS:
        if argv[0] != "launch":
            (stop or StopRequest()).uninstall()
        return cli.main(argv)
    request = parse_args(argv)
    if request.help or (request.command is None and not request.mistakes and not request.settings):
        cli.print_whole(help_text(request.command or "", topic=request.topic, choices=CHOICES))
        return FINISHED if request.help else USER_MISTAKE
    setup_logging()
    try:
        found = _read_environment(request)
        if isinstance(found, RankEnv):
            setup_logging(rank=found.rank, world_size=found.world_size)
        config = load_config(request.settings, file=request.config_file, mistakes=request.mistakes, choices=CHOICES)
        if request.command is None:
            raise UserError(f"a command is missing: {', '.join(COMMANDS)}.")
        if request.options.only_reads:
            stop = (stop or StopRequest()).uninstall()
        elif not (isinstance(request.options, DoctorOptions) and request.options.as_json):  # its output is its result
            guard("stdout")
        stop = stop or StopRequest().install()
        if isinstance(found, RankEnv) and not request.options.only_reads:
            _prepare_process(found, stop)
        return COMMANDS[request.command](Context(config, request, found, log, stop), request.options) or FINISHED
    except BaseException as error:
        return tell_end(error, log=log, advice=_advice)


def _read_environment(request: Request) -> RankEnv | UserError:
    """Which rank this is, or why it can be none: the mistakes of the line come first, and `show` starts no rank."""
    options, environ = request.options, os.environ
    try:
        if isinstance(options, DoctorOptions) and options.alone:
            return read_rank_env(without_launcher(environ))
        if isinstance(options, RankOptions):
            own = with_options(
                environ, init_method=options.init_method, rank=options.rank, world_size=options.world_size
            )
            return read_rank_env(own)
        return read_rank_env(environ)
    except UserError as error:
        return error


def _prepare_process(launch: RankEnv, stop: StopRequest) -> None:
    stop.print_through(log)
    if launch.parent_pid:
        die_with_parent(launch.parent_pid)
    _prepare_imports()


def _prepare_imports() -> None:
    """Set what torch reads while it is imported, and let the user's own module be found."""
    # torch says in 20 lines of C++ frames that a connection ended; we say whose, in one
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if (kept := code_folder()) and kept not in sys.path:
        sys.path.append(kept)
    if not {os.getcwd(), ""} & set(sys.path):
        # For the user's own module, which a checkpoint may name: `python -m` puts the current directory on the path,
        # `rankup` and a file do not
        sys.path.append(os.getcwd())
    try:
        getpass.getuser()
    except (KeyError, OSError):
        # torch before 2.13 asks for the user's name while it is imported, and a container's arbitrary user has none
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}")


def _advice(text: str) -> str:
    from rankup.explain import advice  # it compiles the patterns of all known faults, a twentieth of a second

    return advice(text)


def entry(stop: StopRequest | None = None) -> NoReturn:
    """Run the command line and end the process with its code, see `rankup.agent.processes`."""
    guard("stderr")
    finish(main(stop=stop or StopRequest().install()))


if __name__ == "__main__":
    entry(_stop)
