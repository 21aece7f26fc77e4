"""What tests of the doctor do to one rank before its program begins. Each function ends in the node that the environment
names, if it names one."""

import os
import resource
import signal
import time
from pathlib import Path

import namespaces
import torch


def _enter() -> None:
    if namespaces.NODE in os.environ:
        namespaces.enter()


def few_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300))
    _enter()


def clock_ahead() -> None:
    """A minute and a half ahead of the others. (A real clock is the machine's, whole.)"""
    _enter()
    right = time.time
    time.time = lambda: right() + 90.0


def other_torch() -> None:
    _enter()
    torch.__version__ = "2.13.0"  # type: ignore[assignment]


def hangs_in_the_collective() -> None:
    from train import links

    _enter()
    links.check_collectives = lambda *a: time.sleep(600)  # type: ignore[assignment, return-value]


def hangs_and_gives_up_first() -> None:
    """Its own time is over before that of the ranks that wait for it."""
    from train import links
    from train.watch import Watch

    _enter()
    links.check_collectives = lambda *a: time.sleep(600)  # type: ignore[assignment, return-value]
    whole = Watch.enter
    Watch.enter = lambda self, phase, timeout_s, **more: whole(self, phase, min(timeout_s, 2.0), **more)  # type: ignore[method-assign]


def dies_in_the_collective() -> None:
    from train import links

    _enter()
    links.check_collectives = lambda *a: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment, return-value]


def adds_wrongly() -> None:
    import torch.distributed as dist

    _enter()
    right = dist.all_reduce

    def wrong(tensor: object, *rest: object, **more: object) -> object:
        done = right(tensor, *rest, **more)
        if getattr(tensor, "numel", int)() == 1000:
            tensor[7] += 1  # type: ignore[index]
        return done

    dist.all_reduce = wrong


def computes_slowly() -> None:
    """As an old CPU does: Intel's library really leaves out what came later, if it is told so before it is first used."""
    from train import links

    _enter()
    if "GenuineIntel" in Path("/proc/cpuinfo").read_text() and torch.backends.mkl.is_available():
        os.environ["MKL_ENABLE_INSTRUCTIONS"] = "SSE4_2"
        return
    right = links.compute_s
    links.compute_s = lambda device: 9 * right(device)
