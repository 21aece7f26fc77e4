"""The group of ranks: this rank's place in it, and the few collectives over host memory that keep the ranks in step.

Values travel as JSON, or as what `torch.load(weights_only=True)` reads. torch's own collectives of objects unpickle
what arrives, which runs whatever code the sender wants, and anybody in the network may connect to a rank's ports.
"""

import io
import json
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from rankup.agent.logs import host_name
from rankup.env.rank_env import RankEnv
from rankup.errors import PeerLost, UserError
from rankup.group.stop import StopRequest
from train.group.ends import EndReporter
from train.group.host_link import HostLink
from train.group.meeting import Meeting
from train.group.watchdog import Watchdog

# gloo's and nccl's own timeouts are this much longer than ours, which know the phase and name the rank.
BEHIND_OURS_S = 120.0
LOOK_S = 0.001
T = TypeVar("T")


class Group:
    """This rank's place among all ranks, and the collectives.

    Every collective waits on the host, never on the device, and raises what torch raises when another rank is gone;
    `train.group.join` turns that into a PeerLost which names the rank.
    """

    def __init__(
        self, launch: RankEnv, device: torch.device, *, watch: Watchdog, stop: StopRequest, ends: EndReporter,
        log: logging.Logger,
    ) -> None:
        self.launch, self.device, self.log, self.watch, self.stop, self.ends = launch, device, log, watch, stop, ends
        self.rank, self.world_size = launch.rank, launch.world_size
        self.status = ends.status
        self.run_dir = ends.status.run_dir
        self.hosts: Sequence[str] = [host_name()] * launch.world_size  # by rank
        self.restarted = launch.restart_count > 0  # any rank's process
        self.meeting: Meeting | None = None
        self.link: HostLink | None = None  # where all ranks are on one host
        self.all_done = False  # all ranks are known to have come to their end
        self.record = watch.record

    @property
    def is_rank0(self) -> bool:
        return self.rank == 0

    @property
    def attempt(self) -> str:
        """The id of this attempt, rank 0's on all ranks once they have met."""
        return self.status.attempt

    def stops_before(self, step: int) -> bool:
        """Say that this rank is about to begin `step`. Returns whether all ranks stop before it instead.

        Without any collective, see `rankup.agent.stop`. Waits some milliseconds where they are just agreeing on it.
        """
        if self.world_size == 1:
            return self.stop.requested
        while (may_begin := self.record.may_begin(step)) is None:
            time.sleep(LOOK_S)
        if not may_begin:
            self.watch.settle()
        return not may_begin

    @property
    def step(self) -> int:
        """The last optimizer step that this rank finished."""
        return self.ends.step

    @step.setter
    def step(self, step: int) -> None:
        self.ends.step = step
        self.record.begin(step)

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
        if (link := self.link) is not None:
            return self.collective(lambda: link.max(value))
        tensor = torch.tensor(value, dtype=torch.int32)
        self.collective(lambda: dist.all_reduce(tensor, op=dist.ReduceOp.MAX))
        return int(tensor.item())

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a host tensor of any shape over all ranks, in place."""
        if self.world_size > 1:
            self.collective(lambda: dist.all_reduce(tensor))
        return tensor

    def gather(self, value: Any) -> list[Any]:
        """Every rank's `value`, which JSON can hold, in the order of the ranks. A tuple arrives as a list.

        Raises TypeError for what JSON can't hold.
        """
        return [json.loads(data) for data in self._gather_bytes(json.dumps(value).encode())]

    def gather_tensors(self, value: Any) -> list[Any]:
        """Every rank's `value`, tensors and plain values in lists and dicts, on the CPU, in the order of the ranks.

        Every rank holds all of them: the memory grows with the number of ranks.
        """
        return [unpack(data) for data in self._gather_bytes(pack(value))]

    def broadcast(self, value: Any, *, source: int = 0) -> Any:
        """The `value` of rank `source`, which JSON can hold, on all ranks. A tuple arrives as a list.

        What the other ranks pass is not looked at. Raises TypeError on `source` for what JSON can't hold.
        """
        data = json.dumps(value).encode() if self.rank == source else b""
        return json.loads(self.broadcast_bytes(data, source=source))

    def broadcast_tensors(self, value: Any, *, source: int = 0) -> Any:
        """The `value` of rank `source`, tensors and plain values in lists and dicts, on all ranks, on the CPU.

        What the other ranks pass is not looked at.
        """
        data = pack(value) if self.rank == source else b""
        return unpack(self.broadcast_bytes(data, source=source))

    def broadcast_bytes(self, data: bytes, *, source: int = 0) -> bytes:
        """The `data` of rank `source` on all ranks. What the other ranks pass is not looked at."""
        if self.world_size == 1:
            return data
        size = torch.tensor(len(data))
        self.collective(lambda: dist.broadcast(size, src=source))
        content = _as_tensor(data) if self.rank == source else torch.empty(int(size), dtype=torch.uint8)
        if len(content):
            self.collective(lambda: dist.broadcast(content, src=source))
        return data if self.rank == source else content.numpy().tobytes()

    def _gather_bytes(self, data: bytes) -> list[bytes]:
        """Every rank's `data`, in the order of the ranks."""
        if self.world_size == 1:
            return [data]
        sizes = [torch.zeros((), dtype=torch.int64) for _ in range(self.world_size)]
        self.collective(lambda: dist.all_gather(sizes, torch.tensor(len(data))))
        # All parts of an all-gather have one size, that of the longest
        longest = int(max(sizes))
        parts = [torch.empty(longest, dtype=torch.uint8) for _ in sizes]
        own = torch.zeros(longest, dtype=torch.uint8)
        own[: len(data)] = _as_tensor(data)
        if longest:
            self.collective(lambda: dist.all_gather(parts, own))
        return [part[: int(size)].numpy().tobytes() for part, size in zip(parts, sizes, strict=True)]

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

    def collective(self, call: Callable[[], T]) -> T:
        """What `call` returns, which waits for the other ranks: not this rank is to blame if that takes long."""
        self.watch.wait_for_others(True)
        result = call()
        self.watch.wait_for_others(False)
        return result


def pack(value: Any) -> bytes:
    """Tensors and plain values as `torch.save` writes them."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def unpack(data: bytes) -> Any:
    """The tensors and plain values that `pack` was given, on the CPU: onto a GPU, every rank would fill cuda:0.

    Raises pickle.UnpicklingError for anything else: no class and no function that `data` names is called.
    """
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def _as_tensor(data: bytes) -> torch.Tensor:
    """uint8 [len(data)]. A copy: torch warns of memory that can't be written, as that of bytes."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def on_rank0(group: Group, work: Callable[[], Any], *, share: Callable[[Any], Any] | None = None) -> Any:
    """Call `work` on rank 0 and return its result on all ranks. All ranks call this.

    `share` sends the result: every rank calls it, rank 0 with the result, the others with None. By default it is
    `group.broadcast`, for what JSON can hold.
    UserError and PeerLost of `work` are raised on all ranks: one that waited for rank 0's result would otherwise wait
    until a deadline. Any other error is a fault: it ends rank 0, and the others lose their peer.
    """
    result, failure = None, ("", "")
    if group.is_rank0:
        try:
            result = work()
        except (UserError, PeerLost) as error:
            failure = (type(error).__name__, str(error))
    kind, text = group.broadcast(failure)
    if kind:
        raise (PeerLost if kind == "PeerLost" else UserError)(text, printed_elsewhere=not group.is_rank0)
    return (share or group.broadcast)(result)
