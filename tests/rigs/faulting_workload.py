"""A small workload that does something to its own process at an exact moment, given by the variable PROBE.

PROBE is JSON: {"where": "loss", "call": 7, "rank": 1, "signal": "SIGTERM", "to": "group", "sleep_s": 300}. `where` is
one of build, data, loss, eval_data, evaluate, save (see `probe_saves`). `call` counts these calls from 1 in each
process, except losses from 3 and training batches from 2, which are those of the first step. Without `rank`, all ranks
obey. In this order: `tell` names a file to create; `before_s` waits; `log` names a file to wait for until it has
`lines` lines; `saved` lets a running save end; `asyncio` lets an event loop of its own handle signals; `signal` is
sent; `until` waits for a file; `hold_s` holds the interpreter lock; `sleep_s` sleeps; `raise` names an error to raise.
PROBE is no option of the workload, because options may not change when a run resumes."""

import asyncio
import ctypes
import json
import os
import signal
import threading
import time
import urllib.error
from email.message import Message
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from rankup.agent.protocol import SIGNALS
from rankup.errors import UserError
from rankup.seeds import derive_seed
from train.config import Config
from train.workloads import Workload

ERRORS: dict[str, BaseException] = {
    "ValueError": ValueError("probe"),
    "RuntimeError": RuntimeError("NCCL error: probe, Connection reset by peer, Broken pipe"),
    "UserError": UserError("probe"),
    "SystemExit": SystemExit(0),
    "HTTPError": urllib.error.HTTPError("http://probe", 404, "probe", Message(), None),  # has a `code` attribute
}
NUM_TRAIN, NUM_EVAL, NUM_CLASSES = 64, 21, 4
_loop: asyncio.AbstractEventLoop | None = None  # kept open, because asyncio warns of a loop that is dropped unclosed
_calls: dict[str, int] = {"loss": 2, "data": 1}


def probe(where: str) -> None:
    text = os.environ.get("PROBE")
    if not text:
        return
    order: dict[str, Any] = json.loads(text)
    _calls[where] = _calls.get(where, 0) + 1
    own = os.environ.get("RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0"))
    mine = order.get("rank") in (None, int(own))
    if order["where"] != where or order["call"] != _calls[where] or not mine:
        return
    if "tell" in order:
        Path(order["tell"]).touch()
    time.sleep(order.get("before_s", 0))
    while "log" in order and Path(order["log"]).read_bytes().count(b"\n") < order["lines"]:
        time.sleep(0.05)
    if order.get("saved"):
        let_save_end()
    if "asyncio" in order:
        global _loop
        _loop = asyncio.new_event_loop()
        _loop.add_signal_handler(signal.SIGHUP, lambda: None)
    if "signal" in order:
        number = getattr(signal, order["signal"])
        os.killpg(os.getpgrp(), number) if order.get("to") == "group" else os.kill(os.getpid(), number)
        if order["signal"] in SIGNALS:
            _wait_for_notice()
    while "until" in order and not os.path.exists(order["until"]):
        time.sleep(0.05)
    if "hold_s" in order:
        ctypes.PyDLL(None).sleep(order["hold_s"])
    time.sleep(order.get("sleep_s", 0.3))
    if "raise" in order:
        raise ERRORS[order["raise"]]


def let_save_end() -> None:
    """Wait for the threads that write a checkpoint, its copy or a part, so that the newest checkpoint's age is
    known."""
    for thread in threading.enumerate():
        if thread.name in ("save", "copy", "part"):
            thread.join()


def _wait_for_notice() -> None:
    """Wait until this process has read the signal (if it has the thread that does), and the ranks have agreed to stop
    after the next step.

    On a busy machine the ranks could take many steps before those threads run."""
    for thread in threading.enumerate():
        while thread.name == "watch" and not stop_is_known(thread._target.__self__):  # type: ignore[attr-defined]
            time.sleep(0.01)


def stop_is_known(stop: Any) -> bool:
    """Return whether the signal was read, and the last step agreed if this process takes steps. `stop`: StopRequest."""
    if stop.watch is None or not stop.finish_step_first:
        return bool(stop.requested)
    return bool(stop.watch.record.stop_is_settled)


class Samples:
    """Random points. A probe may strike in each batch, also in a DataLoader worker."""

    def __init__(self, count: int, *, seed: int, where: str) -> None:
        generator = torch.Generator().manual_seed(derive_seed(seed, count))
        self.labels = torch.randint(NUM_CLASSES, (count,), generator=generator)
        self.points = torch.randn(count, 8, generator=generator) + self.labels[:, None]
        self.seed, self.where = seed, where

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: torch.Tensor, epoch: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        probe(self.where)
        points = self.points[indices]
        if epoch is not None:
            own = torch.Generator().manual_seed(derive_seed(self.seed, epoch))
            points = points + 0.1 * torch.rand(len(self), 8, generator=own)[indices]
        return points, self.labels[indices]


def probe_saves() -> None:
    """Call this first in a process, so that a probe can strike when it begins to save."""
    from rankup.group.watchdog import Watchdog

    enter = Watchdog.enter

    def entered(self: Watchdog, phase: str, *values: Any, **more: Any) -> None:
        enter(self, phase, *values, **more)
        if phase == "save":
            probe("save")

    Watchdog.enter = entered  # type: ignore[method-assign]


def slow_save() -> None:
    """Call this first in a process whose second save must never end."""
    from rankup.state.place import Folder

    quick, calls = Folder.write, []

    def save(*values: Any, **more: Any) -> Any:
        calls.append(1)
        time.sleep(1000 if len(calls) == 2 else 0)
        return quick(*values, **more)

    Folder.write = save


def impatient() -> None:
    """Call this first in a process whose last resorts must come after seconds instead of a minute."""
    from rankup import timing

    timing.LOCKED_GRACE_S, timing.LEAVING_S = 4.0, 8.0


def lose_reader() -> None:
    """Call this first in a process that must print to a pipe without a reader."""
    impatient()
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 1)
    os.dup2(writer, 2)


def stuck_disk() -> None:
    """Call this first in a process: rank 1 then hangs when it writes its end into `status/`."""
    from rankup.group import watchdog

    impatient()
    if os.environ["RANK"] == "1":
        watchdog.write_end = lambda *values: time.sleep(1000)


def build(config: Config) -> Workload:
    probe("build")

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        probe("loss")
        return functional.cross_entropy(model(batch[0]), batch[1])

    def evaluate(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
        probe("evaluate")
        logits = model(batch[0])
        return {
            "count": torch.tensor(len(batch[1])),
            "loss": functional.cross_entropy(logits, batch[1], reduction="sum"),
            "accuracy": (logits.argmax(1) == batch[1]).sum(),
        }

    width, dropout = int(config.options.get("width", 16)), float(config.options.get("dropout", 0.2))
    return Workload(
        model=nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, NUM_CLASSES)),
        train=Samples(NUM_TRAIN, seed=config.seed, where="data"),
        evaluation=Samples(NUM_EVAL, seed=config.seed + 1, where="eval_data"),
        loss=loss,
        evaluate=evaluate,
        data_name="made-up points",
    )
