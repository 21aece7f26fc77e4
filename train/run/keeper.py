"""What a rank saves when it has lost a peer: the watchdog calls `Rescuer.keep` before the process ends."""

import contextlib
import time
from collections.abc import Iterator
from copy import copy

import torch

from rankup.errors import reason
from rankup.state import tree
from rankup.state.copies import STATE, Content
from train.run import rescue
from train.run.checkpoint import list_checkpoints, step_of
from train.run.metrics import Progress
from train.run.training import Training, state_of, stopped_at, tracked


class Rescuer:
    """Writes the rescue of a training. See `rankup.group.watchdog.Keeper`."""

    def __init__(self, t: Training) -> None:
        self.t = t

    def keep(self) -> None:
        """Write the state of the last finished step to this node's memory. The loop never goes on afterwards.

        Where that can't be, the checkpoint that rank 0 may be writing is all that will be left: it gets done first.
        """
        rescued = False
        try:
            rescued = self._keep()
        except Exception as error:  # the loss of a peer is what is to be reported, and the checkpoint is still there
            self.t.group.log.warning(f"no rescue: {reason(error)}")
        if not rescued:
            self.t.run.saver.wait()

    def keep_for_stop(self) -> str:
        """Write the state of the last finished step, on rank 0 as a checkpoint: the job may go on on other machines."""
        t = self.t
        if not t.method.every_rank_has_all:
            return ""
        if not t.group.is_rank0:
            self.keep()
            return stopped_at(t, t.progress.step)
        t.run.saver.wait()
        progress = t.changing.stop()
        if progress is None:
            return f"{t.group.stop.signal_name}: in the middle of changing the weights, so nothing newer was saved"
        progress = copy(progress)
        newest = list_checkpoints(t.run.saver.directory)
        if progress.step > (step_of(newest[-1]) if newest else 0):
            t.metrics.flush()
            t.run.saver.publish_files(progress.step, self._copy(progress))
        return stopped_at(t, progress.step)

    def _keep(self) -> bool:
        """Whether a rescue was written."""
        t, log = self.t, self.t.group.log
        if not t.method.every_rank_has_all or t.progress.step == 0:
            return False
        progress = t.changing.stop()
        if progress is None:
            log.warning("no rescue: this rank was in the middle of changing the weights")
            return False
        progress = copy(progress)
        if progress.step <= t.saved.step:
            return False
        began_s = time.monotonic()
        if problem := rescue.write(t.run.lineage.run, progress.step, lambda: self._copy(progress)):
            log.warning(f"no rescue, so the next attempt goes on from the newest checkpoint: {problem}")
            return False
        log.debug(f"rescued step {progress.step} in {time.monotonic() - began_s:.2f} s")
        return True

    def _copy(self, progress: Progress) -> dict[str, Content]:
        """The files of a checkpoint of the last finished step, at which `progress` stands."""
        t = self.t
        with _beside_a_blocked_stream(t.group.device):
            state = tracked(t)
            state["model"] |= {name: b for name, b in t.buffers.kept().items() if name in state["model"]}
            nodes, tensors = tree.encode(state)
            if t.group.device.type == "cuda":  # else they are written as they lie: the training has stopped
                tensors = {name: tensor.cpu() for name, tensor in tensors.items()}
        if not t.changing.unchanged():
            raise RuntimeError("the weights changed while they were copied")
        return {STATE: state_of(t, progress).to_file(), **tree.files_of(nodes, tensors)}


@contextlib.contextmanager
def _beside_a_blocked_stream(device: torch.device) -> Iterator[None]:
    """Copy from a GPU whose usual stream may wait for a dead rank for ever."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
        yield
