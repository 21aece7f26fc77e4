"""Where the time of this rank's steps goes: waiting for its batch, computing, waiting for the other ranks.

All ranks end a step together, so the length of a step does not tell who is slow. What tells is when each rank arrives
where it waits for the others, at the exchange of gradients. Backward does both, it computes and then waits, and the
moment between the two is seen by a callback of autograd's engine: it is called when backward has nothing left to
compute. DDP waits for the exchange in a callback that it adds later.

FSDP, Horovod and a batch norm over all ranks wait elsewhere too (in forward, in the optimizer): that counts as
computing here. With them a rank that is slow to get its data shows, one that computes slowly does not.
"""

import time
from collections import deque
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd import Variable

DATA, COMPUTE, WAITING = range(3)
PARTS = ("data", "compute", "waiting")
MOST_EVENTS = 1000  # of a GPU that are kept between two reports


class Link(Protocol):
    """What two ranks of one host exchange gradients through. `waited_s`: how long this rank waited there so far."""

    waited_s: float


class StepClock:
    """Adds up the seconds of each part. The loop says when a part ends; it costs about 5 µs a step.

    On the CPU everything is done when the call returns, so the host's clock is right. For a GPU the host only queues
    work and goes on: marks are events in that queue, and nothing waits for them.

    `link`: through it two ranks of one host exchange gradients in the middle of backward, and wait there.
    """

    def __init__(self, device: torch.device, link: Link | None = None, *, world_size: int) -> None:
        """With a `world_size` of 1 it measures nothing: one process is compared with nobody."""
        self._device, self.link, self._on = device, link, world_size > 1
        self._seconds = [0.0, 0.0, 0.0]
        self._lap_s = self.linked_s = 0.0
        self._backward_seen = False
        self._events: deque[tuple[int | None, torch.Event]] = deque()  # with the part that each one ends

    def start(self) -> None:
        """A step begins. What was between the steps (evaluation, saves, reports) counts nowhere."""
        self._lap_s = time.perf_counter()

    def lap(self, part: int) -> None:
        """What the host did since the last call was `part`."""
        now_s = time.perf_counter()
        took_s, self._lap_s = now_s - self._lap_s, now_s
        if self.link is not None:
            linked_s, self.linked_s = self.link.waited_s - self.linked_s, self.link.waited_s
            if part == COMPUTE:
                took_s -= linked_s
                self._seconds[WAITING] += linked_s
        self._seconds[part] += took_s

    def has_batch(self) -> None:
        """This rank has its batch, and computing begins."""
        if self._on and self._device.type == "cuda":
            self._record(None)

    def mark(self, part: int) -> None:
        """The work that was given to the device since the last mark was `part`."""
        if not self._on:
            return
        if self._device.type != "cuda":
            self.lap(part)
            return
        self._record(part)
        if len(self._events) > MOST_EVENTS:
            self._read()

    def split_backward(self, loss: torch.Tensor) -> None:
        """Call it before backward of this loss, and `mark(WAITING)` after it."""
        # The engine takes callbacks only while it runs, and calls them in the order in which they came. The gradient
        # of the loss is the first of all, so DDP's callback comes later
        if self._on:
            loss.register_hook(self._backward_began)  # type: ignore[no-untyped-call]

    def watch(self, module: nn.Module) -> None:
        """The same for each backward pass through `module`, whatever the loss is."""

        def after_forward(module: nn.Module, inputs: Any, output: Any) -> None:  # what it returned would be the output
            self._split_backward_of(output)

        if self._on:
            module.register_forward_hook(after_forward)

    def _split_backward_of(self, output: Any) -> bool:
        """Of the first tensor in what a module returned that has a gradient. Whether there is one."""
        if isinstance(output, torch.Tensor):
            if output.requires_grad:
                self.split_backward(output)
            return output.requires_grad
        values = output.values() if isinstance(output, dict) else output if isinstance(output, tuple | list) else ()
        return any(self._split_backward_of(value) for value in values)

    def end_of_backward(self) -> None:
        """All backward passes of the step are over: what came after the last one's own work was a wait."""
        self.mark(WAITING if self._backward_seen else COMPUTE)
        self._backward_seen = False

    def _backward_began(self, gradient: torch.Tensor) -> None:
        Variable._execution_engine.queue_callback(self._computed)

    def _computed(self) -> None:
        self._backward_seen = True
        self.mark(COMPUTE)

    def take(self) -> list[float]:
        """Seconds of DATA, COMPUTE and WAITING since the last call. On a GPU: of what it is done with.

        A report has waited for the GPU anyway.
        """
        self._read()
        taken, self._seconds = self._seconds, [0.0, 0.0, 0.0]
        return taken if self._on else [0.0, 0.0, 0.0]

    def _record(self, part: int | None) -> None:
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        self._events.append((part, event))

    def _read(self) -> None:
        while len(self._events) > 1 and self._events[1][1].query():
            _, began = self._events.popleft()
            part, ended = self._events[0]
            if part is not None:  # None: before the step, which is no work
                self._seconds[part] += began.elapsed_time(ended) / 1000
