"""`rankup.spawn`: a function of a notebook on several ranks of this machine."""

import os
import signal
import sys
from collections.abc import Callable

import torch

from rankup.agent.network import open_port
from rankup.agent.processes import finish
from rankup.errors import FINISHED, STOPPED, Stopped, UserError, exit_code, root_cause
from rankup.job import ExitHandler
from rankup.loop.arguments import whole_number


def spawn(function: Callable[..., object], *arguments: object, nproc: int = 2) -> None:
    """Call `function(*arguments)` in `nproc` processes, forked from this notebook, and print what they print. In each,
    `rankup.init` finds its rank. Ctrl-C asks them to save and stop. Raises UserError if this process has an open job or
    has used its GPU, Stopped if the ranks were stopped, and RuntimeError if one failed. No rank is restarted."""
    if not callable(function):
        raise UserError(f"spawn: it must have a function, got {function!r:.80}.")
    nproc = whole_number("spawn: nproc", nproc, least=1)
    used: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if used or (ExitHandler.open is not None and ExitHandler.open.job is not None):
        raise UserError("spawn: this process must have no open job and no GPU in use, got one. Restart the notebook.")
    with open_port("127.0.0.1", 0) as free:
        port = str(free.getsockname()[1])
    (reading, writing), ranks, world = os.pipe(), dict[int, int](), str(nproc)
    for rank in range(nproc):
        if not (pid := os.fork()):
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world,
                           "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            _be_rank(function, arguments, writing)
        ranks[pid] = rank
    os.close(writing)
    with open(reading, encoding="utf-8", errors="replace") as lines:
        while lines:
            try:
                for line in lines:  # until the last rank has closed its end
                    print(line, end="", flush=True)
                break
            except KeyboardInterrupt:
                for pid in ranks:
                    os.kill(pid, signal.SIGTERM)
    codes = {rank: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid, rank in ranks.items()}
    if code := root_cause([abs(code) for code in codes.values()]):
        raise (Stopped if code == STOPPED else RuntimeError)(f"spawn: the ranks ended with the exit codes {codes}")


def _be_rank(function: Callable[..., object], arguments: tuple[object, ...], output: int) -> None:
    for number in (1, 2):
        os.dup2(output, number)
    sys.stdout = sys.stderr = open(1, "w", encoding="utf-8", buffering=1, closefd=False)  # noqa: SIM115
    torch.set_num_threads(1)  # OpenMP's threads are not forked: more would wait for them forever
    try:
        function(*arguments)
        if (handler := ExitHandler.open) is not None:
            handler.at_exit()
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)  # ends this process if a job is open
        finish(exit_code(error))
    finish(FINISHED)
