"""The group of ranks: this rank's place in it, and the few collectives over host memory that keep the ranks in step."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from train.errors import PeerLost, UserError
from train.group.ends import EndReporter
from train.group.members import Meeting
from train.group.watchdog import Watchdog
from train.process.env import Launch
from train.process.log import Log
from train.process.stop import StopRequest

# gloo's and nccl's own timeouts are this much longer than ours, which know the phase and name the rank.
BEHIND_OURS_S = 120.0


class Group:
    """This rank's place among all ranks, and the collectives.

    Every collective waits on the host, never on the device, and raises what torch raises when another rank is gone;
    `train.group.join` turns that into a PeerLost which names the rank.
    """

    def __init__(
        self, launch: Launch, device: torch.device, *, watch: Watchdog, stop: StopRequest, ends: EndReporter, log: Log
    ) -> None:
        self.launch, self.device, self.log, self.watch, self.stop, self.ends = launch, device, log, watch, stop, ends
        self.rank, self.world_size = launch.rank, launch.world_size
        self.status = ends.status
        self.run_dir = ends.status.run_dir
        self.hosts: list[str] = [log.host] * launch.world_size  # by rank
        self.restarted = launch.restart_count > 0  # any rank's process
        self.meeting: Meeting | None = None

    @property
    def is_rank0(self) -> bool:
        return self.rank == 0

    @property
    def attempt(self) -> str:
        """The id of this attempt, rank 0's on all ranks once they have met."""
        return self.status.attempt

    @property
    def step(self) -> int:
        """The last optimizer step that this rank finished."""
        return self.ends.step

    @step.setter
    def step(self, step: int) -> None:
        self.ends.step = step

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        self.max(0)

    def min(self, value: int) -> int:
        """The smallest `value` of all ranks, an int32."""
        return -self.max(-value)

    def max(self, value: int) -> int:
        """The largest `value` of all ranks, an int32."""
        if self.world_size == 1:
            return value
        tensor = torch.tensor(value, dtype=torch.int32)
        self._collective(lambda: dist.all_reduce(tensor, op=dist.ReduceOp.MAX))
        return int(tensor.item())

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a host tensor of any shape over all ranks, in place."""
        if self.world_size > 1:
            self._collective(lambda: dist.all_reduce(tensor))
        return tensor

    def gather(self, value: Any) -> list[Any]:
        """Every rank's `value`, anything that can be pickled, in the order of the ranks."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        self._collective(lambda: dist.all_gather_object(values, value))
        return values

    def broadcast(self, value: Any) -> Any:
        """Rank 0's `value` on all ranks, anything that can be pickled; bytes of any size included."""
        if self.world_size == 1:
            return value
        holder = [value]
        self._collective(lambda: dist.broadcast_object_list(holder, src=0, device=torch.device("cpu")))
        return holder[0]

    def must_match(self, what: str, value: str, *, remedy: str) -> None:
        """Raises UserError on every rank where `value` differs between ranks, naming the first that differs."""
        values = self.gather(value)
        for rank, other in enumerate(values):
            if other != values[0]:
                raise UserError(
                    f"{what} must be the same on all ranks, got {values[0]} on rank 0 ({self.hosts[0]}) and {other} on "
                    f"rank {rank} ({self.hosts[rank]}). {remedy}",
                    printed_elsewhere=not self.is_rank0,
                )

    def _collective(self, call: Callable[[], Any]) -> None:
        self.watch.wait_for_others(True)
        call()
        self.watch.wait_for_others(False)


def on_rank0(group: Group, work: Callable[[], Any]) -> Any:
    """Call `work` on rank 0 and return its result, which is pickled, on all ranks. All ranks call this.

    UserError and PeerLost of `work` are raised on all ranks: one that waited for rank 0's result would otherwise wait
    until a deadline. Any other error is a fault: it ends rank 0, and the others lose their peer.
    """
    outcome: tuple[str, Any] = ("", None)
    if group.is_rank0:
        try:
            outcome = ("", work())
        except (UserError, PeerLost) as error:
            outcome = (type(error).__name__, str(error))
    kind, value = group.broadcast(outcome)
    if not kind:
        return value
    raise (PeerLost if kind == "PeerLost" else UserError)(value, printed_elsewhere=not group.is_rank0)
