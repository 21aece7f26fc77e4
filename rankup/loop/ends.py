"""How a script that imports rankup ends: the other ranks hear why, and the process has the code of `rankup.errors`."""

import atexit
import contextlib
import logging
import os
import sys
from collections.abc import Callable
from types import TracebackType

from rankup.process import Program

log = logging.getLogger("rankup")


class Ends:
    """Takes over the end of this process. `stack`: closed with the error that ends it.

    `over`: the loop came to its end, so that `finish`, which the script may leave out, is called when Python ends.
    `behind`: whether the run went on behind an epoch's last batch, and no step has come since.
    """

    def __init__(self, program: Program) -> None:
        self.program, self.stack, self.over = program, contextlib.ExitStack(), False
        self.finish: Callable[[], None] = lambda: None
        self.behind: Callable[[], bool] = lambda: False
        self._ended, self._pid, self._usual = False, os.getpid(), sys.excepthook
        self.take_errors()
        atexit.register(self._at_exit)

    def take_errors(self) -> None:
        """Once more after torch's process group is there: torch puts its own hook around ours, and keeps its output."""
        sys.excepthook = self._on_error

    def close(self) -> None:
        """The script has come to its end."""
        self.stack.close()
        self._ended = True

    def _on_error(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() != self._pid or self._ended:
            self._usual(kind, error, trace)
            return
        if isinstance(error, NameError) and self.behind():
            log.warning(
                f"The run had stopped behind the last batch of an epoch, so no batch has set {error.name} in this "
                "process. Set it before the loop over batches."
            )
        self._leave(error)

    def _at_exit(self) -> None:
        if os.getpid() != self._pid or self._ended:
            return
        try:
            if not self.over:
                raise RuntimeError("the script ended without job.finish()")
            self.finish()
        except BaseException as error:
            self._leave(error)

    def _leave(self, error: BaseException) -> None:
        """End this process after `error`: by os._exit, because torch's own teardown may wait for a dead rank."""
        self._ended = True
        try:
            self.stack.__exit__(type(error), error, error.__traceback__)
        except BaseException as failure:  # the cause, where another rank is to blame
            error = failure
        self.program.exit(self.program.end(error))
