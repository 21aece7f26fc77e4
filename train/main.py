"""The program that every launch file starts: `python -m train.main COMMAND`, `torchrun train/main.py train`.

It parses the whole command line, such as `train --seed 1`, before it runs anything. Only the commands that need torch
import it. RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT say which rank this process is. rankup reads them.
For exit codes see README.md.
"""

import sys
from pathlib import Path

if not __package__:
    # This file was started by its path, so Python put this folder on sys.path. There its modules, such as `data`, would
    # hide the user's. Import the folder as a package instead: `train`, or `rankup.program` in an installed rankup
    _here = Path(__file__).resolve().parent
    _above = _here.parents[1] if (_here.parent / "__init__.py").exists() else _here.parent
    sys.path[:] = [str(_above), *(p for p in sys.path if Path(p or ".").resolve() != _here)]
    __package__ = ".".join(_here.relative_to(_above).parts)

import rankup

if __name__ == "__main__":
    _program = rankup.Program()
    if sys.argv[1:2] not in (["status"], ["logs"], ["stacks"], ["explain"], ["export"]):  # these only read
        # Handle signals before the slow imports. By default SIGINT prints a traceback, SIGTERM kills the process, and
        # the first process of a container ignores SIGTERM until it is killed at the end of the grace period
        _program.begin()

from .commands import COMMANDS
from .commands.line import help_text, parse_args
from .config import load_config

# The fork server of a node imports these modules once, so that its ranks do not have to
__preload__ = [
    ".loop", ".parallel.methods", ".workloads.images", ".workloads.text", "fire", "torch.utils.tensorboard"
]


def main(argv: list[str] | None = None, *, program: rankup.Program | None = None) -> int:
    """Parse the command line, run its command, and return the exit code. `program`: this process; None makes one."""
    argv = sys.argv[1:] if argv is None else argv
    program = program or rankup.Program()
    if argv[:1] == ["launch"]:  # the ranks run this file, and no agent does
        return program.end(rankup.UserError("launch is a command of rankup: rankup launch train/main.py train ..."))
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
