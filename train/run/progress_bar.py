"""Steps on the terminal of rank 0: a bar, or a line now and then."""

import logging
import sys
import time
from collections.abc import Callable
from typing import Any

from ..config import Config


class ProgressBar:
    """Shows which steps are done: as a bar on a terminal, elsewhere as a line every `report_every_s` seconds."""

    def __init__(self, config: Config, *, is_rank0: bool, step: int, total_steps: int, log: logging.Logger) -> None:
        """`step`: the steps that were done before, when a run resumes."""
        self._every_s, self._log = config.report_every_s, log
        self._reported_s = time.monotonic()
        kind = config.progress if config.progress != "auto" else ("bar" if sys.stderr.isatty() else "lines")
        self._kind = kind if is_rank0 else "none"
        self._bar: Any = None
        if self._kind == "bar":
            from tqdm import tqdm

            self._bar = tqdm(total=total_steps, initial=step, unit="step", dynamic_ncols=True, leave=False)

    def show(self, step: int, text: Callable[[], str]) -> None:
        """`step` steps are done. `text`: how it goes, such as the loss; it may wait for the device."""
        if self._bar is not None:
            self._bar.update(step - self._bar.n)
        if time.monotonic() - self._reported_s < self._every_s or self._kind == "none":
            return
        self._reported_s = time.monotonic()
        if self._bar is not None:
            self._bar.set_postfix_str(text(), refresh=False)
        else:
            self._log.info(text())

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.close()
