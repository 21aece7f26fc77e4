"""The one program: `python -m train.main COMMAND`, `torchrun train/main.py train`, `rankup train`.

The whole line is understood before anything runs; torch is imported by the command that needs it. Which rank this is,
RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT say; rankup reads them. Every end has its exit code.
"""

import sys
from pathlib import Path

if not __package__:
    # Started as a file: Python put this folder on the path, where `log` or `data` would be taken for the user's own.
    # This folder is the package `train`, and `rankup.program` in an installed rankup
    _here = Path(__file__).resolve().parent
    _above = _here.parents[1] if (_here.parent / "__init__.py").exists() else _here.parent
    sys.path[:] = [str(_above), *(p for p in sys.path if Path(p or ".").resolve() != _here)]
    __package__ = ".".join(_here.relative_to(_above).parts)

import rankup

if __name__ == "__main__":
    _program = rankup.Program()
    if sys.argv[1:2] not in (["status"], ["logs"], ["stacks"], ["explain"], ["export"]):  # which only read
        # Before anything slow is imported: a process that is stopped while it starts must neither die of the signal,
        # with a traceback for SIGINT, nor sit out a grace period
        _program.begin()

from .commands import COMMANDS
from .commands.line import help_text, parse_args
from .config import load_config

# Imported once, by the process that forks the ranks of a node
__preload__ = [
    ".loop", ".parallel.methods", ".workloads.images", ".workloads.text", "fire", "torch.utils.tensorboard"
]


def main(argv: list[str] | None = None, *, program: rankup.Program | None = None) -> int:
    """Understand the line, run its command, and return its exit code. `program`: this process, by default a new one."""
    argv = sys.argv[1:] if argv is None else argv
    program = program or rankup.Program()
    if argv and argv[0] in rankup.cli.COMMANDS and argv[0] not in COMMANDS:
        return rankup.cli.main(argv)
    request = parse_args(argv)
    if request.help or request.command is None:
        rankup.cli.print_whole(help_text(request))
        return 0 if request.help else rankup.UserError.code
    try:
        program.read_rank(**request.options.model_dump(include={"init_method", "rank", "world_size", "alone"}))
        config = load_config(request.settings, file=request.options.config, mistakes=request.mistakes)
        if request.command != "show":
            program.begin()
        return request.options.run(config, program) or 0
    except BaseException as error:
        return program.end(error)


if __name__ == "__main__":
    _program.exit(main(program=_program))
