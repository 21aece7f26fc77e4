"""The ranks of this node through torch.multiprocessing's spawn: fresh interpreters, no fork, as on Windows."""

import multiprocessing.process
import os
import runpy
import sys
from pathlib import Path

MAIN = str(Path(__file__).parents[1] / "main.py")


class Spawned:
    """A process of multiprocessing, with the methods of a Popen that `launch` uses."""

    def __init__(self, process: multiprocessing.process.BaseProcess) -> None:
        self.process = process

    def poll(self) -> int | None:
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        if self.process.is_alive() and self.process.pid is not None:
            os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.join(5)


def start(arguments: list[str], environments: dict[int, dict[str, str]]) -> dict[int, Spawned]:
    """Start `train.main` with `arguments` once for each local rank, in that rank's environment."""
    # torch exports it under a condition that mypy does not follow
    from torch.multiprocessing import start_processes  # type: ignore[attr-defined]

    context = start_processes(  # type: ignore[no-untyped-call]
        _be, (arguments, environments), len(environments), join=False, start_method="spawn"
    )
    return {rank: Spawned(process) for rank, process in enumerate(context.processes)}


def _be(local_rank: int, arguments: list[str], environments: dict[int, dict[str, str]]) -> None:
    """In the new process: become a rank. It ends by itself, with its exit code."""
    os.environ.update(environments[local_rank])
    sys.argv = [MAIN, *arguments]
    runpy.run_path(MAIN, run_name="__main__")
