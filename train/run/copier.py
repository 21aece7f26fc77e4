"""Writes the second copy of each checkpoint, on a rank of another node: see `train.run.candidates`.

Nothing is sent: the rank has the state that rank 0 saves, and writes it by itself, at the same step, beside the
training. It gives the copy its name only once it knows that rank 0's checkpoint stands and holds the same tensors. So a
copy is never newer than what rank 0 had published, and ranks whose weights have come apart are noticed here.

The training never waits for this disk but at its end, and a copy that fails is one line.
"""

import shutil
import threading
import time
from collections.abc import Callable
from typing import Any

from rankup.errors import UserError
from rankup.group.group import Group
from rankup.places.lineage import FILE, Lineage
from rankup.state import copies
from rankup.state.copies import STATE, Content, fingerprint_tensors, to_json
from rankup.state.saver import HostCopies, beside_training
from rankup.state.tree import encode, files_of
from train.config import Config
from train.run.checkpoint import list_checkpoints, step_of
from train.run.on_disk import COPIES


class Copier:
    """Keeps the newest checkpoint of the run in this rank's own run directory, on one rank alone.

    `lineage`: the run's, which knows the present attempt by the first save.
    """

    def __init__(self, config: Config, group: Group, lineage: Lineage) -> None:
        self.config, self.group, self.lineage = config, group, lineage
        self.folder = group.run_dir / COPIES / lineage.run
        self.kept = 0  # the step of the newest copy of this attempt
        self._copies = HostCopies(group.device)
        self._beside_training: bool | None = None
        self._thread: threading.Thread | None = None
        self._step, self._began_s = 0, 0.0
        self._published = 0  # the step of rank 0's newest checkpoint
        self._known = threading.Event()  # what became of rank 0's checkpoint of `_step`
        self._tensors = ""  # and the fingerprint of its tensors
        self._said = ""

    def begin(self, step: int, record: bytes, tracked: dict[str, Any], *, wait: bool) -> None:
        """Begin to write the copy, as rank 0 begins to save. Where the one before is not done, this one is left out;
        with `wait` that one gets done first."""
        if wait and self._thread is not None:
            self._thread.join(self._left_s())
        if self._thread is not None and self._thread.is_alive():
            self.group.log.debug(f"no second copy of step {step}: that of step {self._step} is still under way")
            return
        nodes, tensors = encode(tracked)
        if self._beside_training is None:
            self._beside_training = beside_training(tensors, self.config.save, say=self.group.log.debug)
        # Without memory for a copy that is kept, one for this save: the tensors change with the next step
        memory = self._copies if self._beside_training else HostCopies(self.group.device)
        copied = memory.take(tensors)
        small = {STATE: record, FILE: to_json(self.lineage.values())}

        def make() -> dict[str, Content]:
            memory.wait()
            return {**small, **files_of(nodes, copied)}

        self._step, self._began_s, self._known = step, time.monotonic(), threading.Event()
        self._thread = threading.Thread(target=self._write, args=(make, step), name="copy", daemon=True)
        self._thread.start()

    def confirm(self, step: int, tensors: str) -> None:
        """Rank 0's checkpoint of this step stands. `tensors`: `fingerprint_tensors` of it."""
        self._published = step
        if step == self._step:  # else the copy of this step was left out
            self._tensors = tensors
            self._known.set()

    def wait(self) -> None:
        """Let the copy get done, within the deadline of a save, because the training ends. Says if there is none."""
        if self._thread is not None:
            self._thread.join(self._left_s())
        if self.kept < self._published:
            self._say(f"no second copy of step {self._published}: only rank 0's disk holds that checkpoint")

    # The thread -----------------------------------------------------------------------------------------------

    def _write(self, make: Callable[[], dict[str, Content]], step: int) -> None:
        try:
            files = make()
            copies.remove_unfinished(self.folder)
            staging = copies.create_staging(self.folder, step)
            own = ""

            def check() -> None:
                nonlocal own
                own = own or fingerprint_tensors(staging)
                self._await_rank0(step, own)

            copies.publish(staging, files, {}, step=step, keep=1, check_owner=check)
            self.kept = step
        except _Withheld as error:
            if str(error):
                self._say(str(error))
        except Exception as error:  # nobody joins this thread, and a copy that fails must not end the training
            text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            self._say(f"no second copy: {text}")

    def _await_rank0(self, step: int, own: str) -> None:
        """Wait until rank 0's checkpoint stands, and compare. Raises _Withheld where this copy must not appear."""
        if not self._known.wait(self._left_s()):
            raise _Withheld("")  # rank 0 has not saved it either; its deadline says so
        if self._tensors != own:
            host = self.group.hosts[0]
            raise _Withheld(
                f"no second copy of step {step}: this rank holds other weights, or another state of the optimizer, "
                f"than rank 0 on {host} has saved. They have come apart: look at the memory of both machines."
            )
        for path in list_checkpoints(self.folder):  # of a line of attempts that the run has left; `keep` counts it
            if step_of(path) > step:
                shutil.rmtree(path, ignore_errors=True)

    def _left_s(self) -> float:
        return max(0.0, self._began_s + self.config.save_timeout_s - time.monotonic())

    def _say(self, text: str) -> None:
        """A full disk stays full: each text is said once in a row."""
        if text != self._said:
            self._said = text
            self.group.log.warning(text)


class _Withheld(Exception):
    """The copy is whole, but must not appear. The reason, "" where another line says it."""
