"""`--profile 10:20`: a trace of these steps by torch.profiler, one file for each rank."""

import json
import logging
import os
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from rankup.errors import ConfigError, disk_error
from rankup.places.files import staged

FOLDER = "profile"


class Profiler:
    """Traces the steps that `--profile` names; without that setting it does nothing."""

    def __init__(
        self, span: str, *, run_dir: Path, rank: int, device: torch.device, step: int, total_steps: int,
        log: logging.Logger,
    ) -> None:
        """`span`: such as "10:20", or "". `step`: where the run begins or goes on.

        Raises ConfigError for steps that the run does not have.
        """
        self._folder, self._rank, self._log = run_dir / FOLDER, rank, log
        self._device = device
        self.first, self.last = span_of(span) if span else (-1, -1)
        self._running: profile | None = None
        if self.last > total_steps:
            raise ConfigError(
                f"profile must end by step {total_steps}, the last of the run, got {span}.", printed_elsewhere=rank > 0
            )
        if 0 <= self.first < step:
            left = f"from {step} on" if step < self.last else "nothing"
            log.info(f"profile  the run goes on at step {step}: traces {left} of {span}")
            self.first = step

    def at(self, step: int) -> None:
        """Call this before each step, and after the last one. `step`: how many steps are done."""
        if step == self.first < self.last:
            # Without it kineto, the tracer below torch.profiler, writes to stderr that there is no GPU
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._device.type == "cuda" else [])]
            self._running = profile(activities=activities, acc_events=True)
            self._synchronize()
            self._running.start()
        elif step == self.last:
            self.end()

    def end(self) -> None:
        """Write what was traced so far. Raises UserError where the disk is full or read-only."""
        if self._running is None:
            return
        running, self._running = self._running, None
        self._synchronize()
        running.stop()
        path = self._folder / f"rank-{self._rank}.pt.trace.json"  # the ending that TensorBoard's plugin looks for
        try:
            with staged(path) as staging:
                running.export_chrome_trace(str(staging))
                json.loads(staging.read_bytes())
        except (OSError, ValueError) as error:  # kineto reports no full disk: the JSON just ends early
            failure = error if isinstance(error, OSError) else OSError(0, "it was cut off: no space left?")
            raise disk_error("profile", self._folder, failure) from None
        self._log.info(f"profile  steps {self.first} to {self.last}: {self._folder}/")

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def span_of(text: str) -> tuple[int, int]:
    first, _, last = text.partition(":")
    return int(first), int(last)
