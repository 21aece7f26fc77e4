"""The group of ranks: this rank's place in it, and a few collectives over host memory.

Values travel as JSON, or as tensors that `torch.load(weights_only=True)` reads. torch's own collectives of objects
unpickle what arrives, so any sender could run code here, and anybody in the network may connect to a rank's ports.
"""

import dis
import io
import json
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from rankup.agent.ends import LOST_PEER
from rankup.env.rank_env import RankEnv
from rankup.errors import FINISHED, PEER_LOST, JoinError, PeerLost, UserError, exit_code, reason
from rankup.group.watchdog import Watchdog
from rankup.timing import STOP_S

T = TypeVar("T")


class Group:
    """This rank's place among all ranks, and the collectives.

    Every collective waits on the host, never on the device. If another rank is lost, it raises torch's error, and the
    end of the block turns that into a PeerLost that names the rank.

    `hosts`: by rank. `restarted`: whether any rank's process was. `settings`: what must be the same on all ranks.
    `backend`: of torch's process group. `store`: once the ranks have met.
    """

    settings: Mapping[str, str]
    backend: str

    def __init__(self, launch: RankEnv, device: torch.device, watch: Watchdog) -> None:
        self.launch, self.device, self.watch = launch, device, watch
        self.rank, self.world_size = launch.rank, launch.world_size
        self.log, self.stop, self.record, self.status = watch.log, watch.stop, watch.record, watch.status
        self.run_dir, self.hosts = watch.status.run_dir, watch.hosts
        self.restarted = launch.restart_count > 0
        self.store: Any = None

    @property
    def is_rank0(self) -> bool:
        return self.rank == 0

    @property
    def attempt(self) -> str:
        """The id of this attempt, rank 0's on all ranks once they have met."""
        return self.status.attempt

    def stops_before(self, step: int) -> bool:
        """Say that this rank is about to begin `step`. Returns whether all ranks stop before it instead.

        Without any collective, see `rankup.agent.record`. Waits some milliseconds where they are just agreeing on it.
        """
        while (may_begin := self.record.may_begin(step)) is None:
            time.sleep(STOP_S)
        return not may_begin

    # The end ----------------------------------------------------------------------------------------------------

    def __enter__(self) -> "Group":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.close()
        elif (failure := self.fail(error)) is not error:
            raise failure from error

    def close(self) -> None:
        """Leave after success, all ranks together. Raises what `fail` returns if another rank does not come."""
        try:
            self.barrier()
            self.watch.quiet = True
            if dist.is_initialized():
                dist.destroy_process_group()
            self.watch.report(FINISHED, "finished")
            self.record.finished = True
            self.watch.end()
        except BaseException as error:
            if (failure := self.fail(error)) is error:
                raise
            raise failure from error

    def fail(self, error: BaseException) -> BaseException:
        """Tell the other ranks that this rank ends with `error`. Returns the cause behind it.

        A rank that fails exits at once: torch's own teardown may wait for the dead.
        """
        self.watch.exit_within(PEER_LOST)  # the phase that failed is over, its deadline must not cut this short
        failure = error
        if self.watch.connected and broke_collective(error):
            self.log.debug(f"{type(error).__name__}: {error}")
            failure = self.watch.loss(self.watch.suspects())
        self.watch.exit_within(exit_code(failure))
        # Report before leaving: the others look here for the cause when their collectives break
        self.watch.report(exit_code(failure), reason(failure), getattr(failure, "suspect", None))
        self.watch.end()
        return failure

    # Collectives ------------------------------------------------------------------------------------------------

    def collective(self, call: Callable[[], T]) -> T:
        """Return `call()`, which waits for other ranks. While it waits, nobody takes this rank for the slow one."""
        self.record.waiting = True
        result = call()
        self.record.waiting = False
        return result

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        self.max(0)

    def max(self, value: int) -> int:
        """The largest `value` of all ranks, an int32."""
        if self.world_size == 1:
            return value
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
        data = json.dumps(value).encode()
        if self.world_size == 1:
            return [json.loads(data)]
        longest = self.max(len(data))  # all parts of an all-gather have one size
        parts = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.world_size)]
        own = torch.frombuffer(bytearray(data.ljust(longest)), dtype=torch.uint8)  # of bytes torch would warn
        self.collective(lambda: dist.all_gather(parts, own))
        return [json.loads(part.numpy().tobytes()) for part in parts]  # white space at the end is no harm

    def broadcast(self, value: Any, *, source: int = 0) -> Any:
        """The `value` of rank `source`, which JSON can hold, on all ranks. A tuple arrives as a list.

        The other ranks' values are ignored. Raises TypeError on `source` for what JSON can't hold.
        """
        data = json.dumps(value).encode() if self.rank == source else b""
        return json.loads(self.broadcast_bytes(data, source=source))

    def broadcast_tensors(self, value: Any, *, source: int = 0) -> Any:
        """The same with tensors and plain values in lists and dicts, which arrive on the CPU.

        Raises pickle.UnpicklingError for anything else: no class and no function that arrives is called.
        """
        sent = io.BytesIO()
        if self.rank == source:
            torch.save(value, sent)
        received = io.BytesIO(self.broadcast_bytes(sent.getvalue(), source=source))
        return torch.load(received, map_location="cpu", weights_only=True)  # every rank would fill cuda:0

    def broadcast_bytes(self, data: bytes, *, source: int = 0) -> bytes:
        """The `data` of rank `source` on all ranks. The other ranks' data are ignored."""
        if self.world_size == 1:
            return data
        size = torch.tensor(len(data))
        self.collective(lambda: dist.broadcast(size, src=source))
        if not size:
            return b""
        content = bytearray(data if self.rank == source else int(size))
        tensor = torch.frombuffer(content, dtype=torch.uint8)
        self.collective(lambda: dist.broadcast(tensor, src=source))
        return bytes(content)

    def must_match(self, what: str, value: str, *, remedy: str) -> None:
        """Raise UserError on every rank if `value` differs between ranks. The message names the first rank that
        differs."""
        values = self.gather(value)
        for rank, other in enumerate(values):
            if other != values[0]:
                raise UserError(
                    f"{what} must be the same on all ranks, got {values[0]} on rank 0 ({self.hosts[0]}) and {other} on "
                    f"rank {rank} ({self.hosts[rank]}). {remedy}",
                    printed_elsewhere=not self.is_rank0,
                )

    def on_rank0(self, work: Callable[[], Any], *, source: int = 0) -> Any:
        """Call `work` on rank 0, or on rank `source`, and return its result, see `broadcast`. All ranks call this.

        UserError and PeerLost of `work` are raised on all ranks: otherwise a rank that waits for rank 0's result would
        wait until a deadline. Any other error is a fault: it ends rank 0, and the others lose their peer.
        """
        result, failure = None, ("", "")
        if self.rank == source:
            try:
                result = work()
            except (UserError, PeerLost) as error:
                failure = (type(error).__name__, str(error))
        result, (kind, text) = self.broadcast((result, failure), source=source)
        if kind:
            raise (PeerLost if kind == "PeerLost" else UserError)(text, printed_elsewhere=not self.is_rank0)
        return result


def broke_collective(error: BaseException) -> bool:
    """Whether a collective raised `error` because a peer is gone. It does not say which, nor why."""
    if isinstance(error, JoinError | PeerLost):
        # Who raised it knows more: of a DataLoader's worker that died, for one, whose connection is reset as well
        return False
    if isinstance(error, dist.DistError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    # All collectives are in C++. A `raise` may say "Connection reset by peer" too, in a DataLoader's worker for one
    by_python = place is None or dis.opname[place.tb_frame.f_code.co_code[place.tb_lasti]] == "RAISE_VARARGS"
    if by_python and not type(error).__module__.startswith("horovod."):
        return False
    # A failed check inside gloo (of sizes that differ, say) is a fault, although it carries the path of the connection
    return bool(LOST_PEER.search(str(error))) and "enforce fail" not in str(error)
