"""Where the time of a step goes, on a clock that the test sets: a step's parts, and backward in two of them."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import Variable

from rankup.observe import stragglers
from rankup.observe.stragglers import COMPUTE, WAITING, StepClock

CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """`clock.s` is the time."""
    now = SimpleNamespace(s=100.0)
    monkeypatch.setattr(stragglers, "time", SimpleNamespace(perf_counter=lambda: now.s))
    return now


class Backward(torch.autograd.Function):
    """A backward pass that takes 5 seconds, after which the exchange takes 7."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, later: Callable[[float], None]) -> torch.Tensor:
        ctx.later = later
        return value * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.later(2.0)
        Variable._execution_engine.queue_callback(lambda: ctx.later(7.0))  # as DDP does
        ctx.later(3.0)
        return gradients[0] * 2, None


def loss_of(later: Callable[[float], None]) -> torch.Tensor:
    return Backward.apply(torch.ones(1, requires_grad=True), later)  # type: ignore[no-any-return, no-untyped-call]


def a_step(steps: StepClock, later: Callable[[float], None]) -> None:
    steps.start()
    later(1.0)
    steps.has_batch()
    later(4.0)
    loss = loss_of(later)
    steps.split_backward(loss)
    loss.sum().backward()  # type: ignore[no-untyped-call]
    steps.mark(WAITING)
    later(6.0)
    steps.mark(COMPUTE)


def test_a_step_is_split_where_backward_has_computed_and_waits(clock: SimpleNamespace) -> None:
    def later(seconds: float) -> None:
        clock.s += seconds

    steps = StepClock(CPU, world_size=2)
    a_step(steps, later)
    later(50.0)  # an evaluation
    a_step(steps, later)
    assert steps.take() == [2 * 1.0, 2 * (4 + 5 + 6.0), 2 * 7.0]
    assert steps.take() == [0.0, 0.0, 0.0]


def test_waiting_in_the_middle_of_backward_is_not_computing(clock: SimpleNamespace) -> None:
    """Two ranks of one host exchange each bucket of gradients as soon as it is full, and wait for each other there."""
    link: Any = SimpleNamespace(waited_s=300.0)

    def later(seconds: float) -> None:
        clock.s += seconds
        if seconds in (3.0, 7.0):
            link.waited_s += seconds

    steps = StepClock(CPU, link, world_size=2)
    a_step(steps, later)
    assert steps.take() == [1.0, 4 + 2 + 6.0, 3 + 7.0]


def test_events_of_a_gpu_are_read_when_it_is_done_with_them(
    clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host is done in no time, and the GPU goes through its queue later."""
    gpu = SimpleNamespace(queued_s=0.0, done_s=0.0)

    class Event:
        def __init__(self, device: torch.device, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at_s = gpu.queued_s

        def query(self) -> bool:
            return bool(self.at_s <= gpu.done_s)

        def elapsed_time(self, end: "Event") -> float:
            return float(1000 * (end.at_s - self.at_s))

    def later(seconds: float) -> None:
        if seconds == 1.0:
            clock.s += seconds
        else:
            gpu.queued_s += seconds

    monkeypatch.setattr(torch, "Event", Event)
    steps = StepClock(torch.device("cuda"), world_size=2)
    a_step(steps, later)
    a_step(steps, later)
    gpu.done_s = 4 + 5 + 7 + 6.0  # of the first step
    assert steps.take() == [2 * 1.0, 4 + 5 + 6.0, 7.0]
    gpu.done_s *= 2
    assert steps.take() == [0.0, 4 + 5 + 6.0, 7.0]


def test_one_process_measures_nothing(clock: SimpleNamespace) -> None:
    def later(seconds: float) -> None:
        clock.s += seconds

    steps = StepClock(CPU, world_size=1)
    a_step(steps, later)
    assert steps.take() == [0.0, 0.0, 0.0]
