"""Writes the second copy of each checkpoint, on a rank of another node: see `train.run.candidates`.

Nothing is sent: the rank has the state that rank 0 saves, and writes it by itself, at the same step, beside the
training. It gives the copy its name only once it knows that rank 0's checkpoint stands and holds the same tensors. So a
copy is never newer than what rank 0 had published, and ranks whose weights have come apart are noticed here.

The training never waits for this disk but at its end, and a copy that fails is one line.
"""

import hashlib
import io
import shutil
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import torch

from rankup.errors import UserError
from rankup.places.lineage import FILE, Lineage
from train.config import Config
from train.group.group import Group, pack
from train.run import publish
from train.run.checkpoint import list_checkpoints, step_of
from train.run.host_copies import HostCopies, beside_training
from train.run.on_disk import COPIES
from train.run.training_state import TrainingState, to_json


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

    def begin(self, state: TrainingState, model: dict[str, torch.Tensor], *, wait: bool) -> None:
        """Begin to write the copy, as rank 0 begins to save. Where the one before is not done, this one is left out;
        with `wait` that one gets done first."""
        if wait and self._thread is not None:
            self._thread.join(self._left_s())
        if self._thread is not None and self._thread.is_alive():
            self.group.log.debug(f"no second copy of step {state.step}: that of step {self._step} is still under way")
            return
        if self._beside_training is None:
            say = self.group.log.debug
            self._beside_training = beside_training((model, state), self.config.save, say=say)
        lineage = to_json(self.lineage.values())
        if self._beside_training:
            copied_model, copied = self._copies.take((model, state))

            def make() -> dict[str, bytes]:
                self._copies.wait()
                return _files(copied, copied_model, lineage)
        else:
            files = _files(state, model, lineage)  # now: the tensors change with the next step

            def make() -> dict[str, bytes]:
                return files

        self._step, self._began_s, self._known = state.step, time.monotonic(), threading.Event()
        self._thread = threading.Thread(target=self._write, args=(make, state.step), name="copy", daemon=True)
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

    def _write(self, make: Callable[[], dict[str, bytes]], step: int) -> None:
        try:
            files = make()
            own = fingerprint_tensors({name: io.BytesIO(data) for name, data in files.items()})
            publish.remove_unfinished(self.folder)
            staging = publish.create_staging(self.folder, step)
            publish.publish(staging, files, {}, step=step, keep=1, check_owner=lambda: self._await_rank0(step, own))
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


def _files(state: TrainingState, model: dict[str, torch.Tensor], lineage: bytes) -> dict[str, bytes]:
    return {"model.pt": pack(model), **state.to_files(), FILE: lineage}


def fingerprint_tensors(files: "dict[str, io.BytesIO] | Path") -> str:
    """A digest over the sizes and CRC-32 of all tensors in a checkpoint's files, a folder or their contents by name.

    Not of the files themselves: they name the device of the tensors and the rank. torch writes the sums, so that
    nothing but the files' tables is read. They show that two ranks hold the same, not that nobody changed a file.
    """
    digest = hashlib.sha256()
    for name in ("model.pt", "training.pt"):
        with zipfile.ZipFile(files / name if isinstance(files, Path) else files[name]) as archive:
            for record in archive.infolist():
                if "/data/" in record.filename:
                    digest.update(f"{record.filename} {record.file_size} {record.CRC}\n".encode())
    return digest.hexdigest()
