"""What this very training would gain here from other settings: one line each, from measurements.

What is faster and changes nothing is a default. What changes numbers (bf16, more threads, a larger batch) or takes more
of the machine (workers) is for the user to choose, and these lines say what there is to choose.

Rank 0 measures, after the first steps of a new run: before them it would delay the start, and only the steps themselves
show how long they wait for data. The other ranks wait for it in their next step, as for any slow rank. It measures a
copy of the model, and puts the random state back: weights, gradients, buffers and digest are as without it.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from rankup import Group
from rankup.seeds import random_state_kept

from ..config import Config
from ..data.samples import num_bytes
from ..parallel.method import Method
from ..parallel.model import autocast, has_bf16
from ..workloads import Workload

STEPS = 10  # timed before anything is said; a training of twice as many has nothing to gain
ROUNDS = 3  # the variants take turns: a machine that is busy for a moment slows all of them
LONGEST_S = 2.0  # of a step: longer ones are not measured
MOST_THREADS = 16  # of a process: few models gain from more
LARGEST_COPY = 2**29  # bytes of a model
LEAST_GAIN = 1.1


class Advice:
    """Times the first steps, and then speaks once, if at all.

    Does nothing on other ranks than 0, and in a run that goes on or was restarted: recovery takes tenths of a second,
    and the user has read the lines.
    """

    def __init__(
        self, config: Config, group: Group, method: Method, workload: Workload, plain: nn.Module, batch: Any, *,
        step: int, total_steps: int,
    ) -> None:
        """`plain`: the user's module. `batch`: a micro-batch of this rank, on the device. `step`: where the run is."""
        self.config, self.group, self.workload = config, group, workload
        new = step == 0 and not group.restarted and total_steps > 2 * STEPS
        self._active = config.advice and group.is_rank0 and new
        # Where forward waits for other ranks, or may do so in code that is not ours, rank 0 can't run it alone. A
        # compiled model would be compiled again for the copy
        alone = method.replicates_state and method.one_device_per_rank and not config.sync_bn and not config.compile
        measurable = alone and (group.world_size == 1 or ":" not in config.workload)
        self._subject = (plain, batch) if self._active and measurable else None
        self._began_s = 0.0
        self._waits_s: list[float] = []
        self._steps_s: list[float] = []

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around the first thing that a step does: it waits for its batches."""
        self._began_s = time.perf_counter()
        yield
        if self._active:
            self._waits_s.append(time.perf_counter() - self._began_s)

    def after_step(self) -> None:
        """Call this after each step."""
        if not self._active:
            return
        _wait_for(self.group.device)
        self._steps_s.append(time.perf_counter() - self._began_s)
        if len(self._steps_s) < STEPS:
            return
        self._active = False
        try:
            with self.group.watch.clock.during("start"):  # no part of a step
                for line in self._lines():
                    self.group.log.info(f"advice: {line}")
        except Exception as error:  # a model that can't be copied, too little memory: no reason to end a training
            self.group.log.debug(f"no advice: {type(error).__name__}: {error}")
        self._subject = None

    def _lines(self) -> Iterator[str]:
        config, group = self.config, self.group
        step_s, wait_s = statistics.median(self._steps_s), statistics.median(self._waits_s)
        if not getattr(self.workload.train, "in_memory", False):
            # A GPU's rank computes elsewhere, so its workers may have all CPUs
            free = group.cpus - config.num_workers - (config.num_threads if group.device.type == "cpu" else 0)
            yield from on_workers(config.num_workers, step_s=step_s, wait_s=wait_s, free=free)
        threads = min(group.cpus, MOST_THREADS)
        times = self._measure(step_s, threads)
        if "bf16" in times:
            yield from on_setting("--precision bf16", "It rounds more: compare the losses.", step_s, times, "bf16")
        if "threads" in times:
            price = "The last bits of the weights change."
            yield from on_setting(f"--num-threads {threads}", price, step_s, times, "threads")

    def _measure(self, step_s: float, threads: int) -> dict[str, float]:
        """Seconds that forward and backward of a step take: "own", as in the training, and with one change each.

        "bf16" and "threads"; without those that don't apply here.
        """
        config, group = self.config, self.group
        # The others wait meanwhile: no longer than a small part of their own deadline
        longest_s = min(LONGEST_S, config.step_timeout_s / 100)
        if self._subject is None or step_s > longest_s or num_bytes([*self._subject[0].parameters()]) > LARGEST_COPY:
            return {}
        model, batch = deepcopy(self._subject)
        changes: dict[str, Callable[[], None]] = {"own": lambda: self._run(model, batch)}
        if config.precision == "fp32" and has_bf16(group.device):
            changes["bf16"] = lambda: self._run(model, batch, precision="bf16")
        if group.device.type == "cpu" and threads > config.num_threads:
            changes["threads"] = lambda: self._run(model, batch, threads=threads)
        times: dict[str, list[float]] = {name: [] for name in changes}
        with random_state_kept(group.device):
            for _ in range(ROUNDS + 1):
                for name, run in changes.items():
                    if len(changes) == 1 or group.stop.requested:
                        return {}
                    began_s = time.perf_counter()
                    run()
                    times[name].append(time.perf_counter() - began_s)
        # The first of each chooses kernels and starts threads
        return {name: config.accumulate * statistics.median(seconds[1:]) for name, seconds in times.items()}

    def _run(self, model: nn.Module, batch: Any, *, precision: str = "", threads: int = 0) -> None:
        """Forward and backward of a micro-batch."""
        config = self.config.model_copy(update={"precision": precision or self.config.precision})
        torch.set_num_threads(threads or config.num_threads)
        try:
            with autocast(config, self.group.device):
                loss = self.workload.loss(model, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            _wait_for(self.group.device)
        finally:
            torch.set_num_threads(config.num_threads)
            model.zero_grad()


def on_setting(setting: str, price: str, step_s: float, times: dict[str, float], name: str) -> Iterator[str]:
    """Advice for a setting that makes forward and backward faster, from `times["own"]` to `times[name]` seconds.

    `step_s`: of a whole step of the training, in which exchange, optimizer and data take the same time as before.
    """
    rest_s = max(0.0, step_s - times["own"])
    gain = (rest_s + times["own"]) / (rest_s + times[name])
    if gain >= LEAST_GAIN:
        yield (
            f"{setting} would gain {gain:.1f}x here (measured: forward and backward in {_ms(times[name])} in place of "
            f"{_ms(times['own'])}, in steps of {_ms(step_s)}). {price}"
        )


def on_workers(num_workers: int, *, step_s: float, wait_s: float, free: int) -> Iterator[str]:
    """Advice for steps that wait `wait_s` of their `step_s` seconds for data. `free`: CPUs that nothing here uses."""
    computing_s = max(step_s - wait_s, 1e-6)
    preparing_s = num_workers * step_s if num_workers else wait_s  # of one CPU, for one step
    enough = math.ceil(preparing_s / computing_s)
    wanted = min(num_workers + free, enough)
    if wanted <= num_workers:
        return
    gain = step_s / max(computing_s, preparing_s / wanted)
    if gain >= LEAST_GAIN:
        yield (
            f"--num-workers {wanted} may gain up to {gain:.1f}x here: steps wait {wait_s / step_s:.0%} of their time "
            f"for data (measured over {STEPS} steps of {_ms(step_s)}), and CPUs are idle."
        )


def _ms(seconds: float) -> str:
    # Three digits, but never 1.23e+03
    return f"{1000 * seconds:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"


def _wait_for(device: torch.device) -> None:
    """Until a GPU has done all that it was given: only then is a time the time of the work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
