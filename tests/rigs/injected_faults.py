"""Faults that tests, mostly those of the doctor, put into a rank before its program begins.

The functions for the doctor also move the process into the network namespace that the environment names, if any."""

import math
import os
import signal
import time
from typing import Any

import torch

from tests.rigs import namespaces

# "links": the test expects a verdict on their speed. Other tests give none: a busy machine may have any speed
LOOK = "TEST_DOCTOR_LOOKS_AT"
STAGE = "TEST_DOCTOR_STAGE_S"  # the time limit of a stage, in seconds


def healthy() -> None:
    _enter()


def _enter() -> None:
    from rankup.doctor import stages

    stages.SLOWEST_LINK, stages.APART = (3e6 if os.environ.get(LOOK) == "links" else 0.0), math.inf
    stages.STAGE_S = float(os.environ.get(STAGE, stages.STAGE_S))
    if namespaces.NODE in os.environ:
        namespaces.enter()


def hangs_in_the_collective() -> None:
    from rankup.doctor import stages

    _enter()
    # A generator as the real check is, so that it runs only when its stage has begun
    stages.collective = lambda *a: (time.sleep(600) for _ in range(1))  # type: ignore


def dies_as_the_group_forms() -> None:
    import torch.distributed as dist

    _enter()
    dist.init_process_group = lambda *a, **b: os.kill(os.getpid(), signal.SIGKILL)


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


def flips_a_bit() -> None:
    """Flip the lowest bit of one number in the second repetition."""
    _enter()
    right, calls = torch.sin, []

    def wrong(tensor: torch.Tensor) -> torch.Tensor:
        done = right(tensor)
        calls.append(done)
        if len(calls) == 16:  # the last product of the second repetition
            done.view(torch.int32)[7, 7] ^= 1
        return done

    torch.sin = wrong  # type: ignore[assignment]


def dies_in_step_8() -> None:
    """Kill rank 1 in step 8 of any training."""
    if os.environ["RANK"] != "1":
        return
    import train.loop

    step = train.loop.step

    def dying(training: Any, batches: Any) -> Any:
        if training.job.step_number == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(training, batches)

    train.loop.step = dying


def wrong_products() -> None:
    """Make rank 1 compute each layer with one wrong bit, as a broken processor would."""
    linear = torch.nn.functional.linear

    def wrong(*given: Any) -> torch.Tensor:
        product = linear(*given)
        if os.environ["RANK"] != "1":
            return product
        other = product.detach().clone()
        other.view(torch.int32).view(-1)[0] ^= 1 << 20
        return product + (other - product).detach()

    torch.nn.functional.linear = wrong
