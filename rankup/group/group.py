"""The group of ranks: this rank's place in it, and a few collectives over host memory.

Values travel as JSON, or as tensors that `torch.load(weights_only=True)` reads. torch's own object collectives unpickle
what they receive. Anybody in the network who connects to a rank's ports could then run code in the rank.
"""

import dis
import io
import json
import time
from collections.abc import Callable, Mapping
from copy import deepcopy
from itertools import accumulate, pairwise
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from rankup.agent.ends import is_peer_loss
from rankup.env.rank_env import RankEnv
from rankup.errors import FINISHED, PEER_LOST, JoinError, PeerLost, UserError, exit_code, reason
from rankup.group.watchdog import Watchdog
from rankup.timing import PAUSE_S, STOP_S, UNEVEN_S

T = TypeVar("T")
MESSAGES = "rankup/messages"  # describes a process group that sends messages from one rank to another

EVEN = "batches: a pass must have the same number of batches on every rank, got"
EVEN_OUT = "Cut the longer ones, or give each rank the same DataLoader, of which it gets its part."


class Group:
    """This rank's place among all ranks, and the collectives. As a context manager, it leaves the group at the end.

    Every collective waits on the host, never on the device. If another rank is lost, a collective raises torch's error,
    and the end of the block turns that error into a PeerLost that names the rank.

    `hosts`: host names by rank. `restarted`: whether any rank's process was restarted. `jobs`: the ids of the job so
    far: each new agent of node 0 gives it another, and the agents of the other nodes know the earlier ones. `settings`:
    values that must be equal on all ranks. `backend`: of torch's process group. `store`: torch's store, None until the
    ranks have met.
    """

    settings: Mapping[str, str]
    backend: str

    def __init__(self, rank_env: RankEnv, device: torch.device, watch: Watchdog) -> None:
        self.rank_env, self.device, self.watch = rank_env, device, watch
        self.rank, self.world_size = rank_env.rank, rank_env.world_size
        self.log, self.stop, self.record, self.status = watch.log, watch.stop, watch.record, watch.status
        self.run_dir, self.hosts = watch.status.run_dir, watch.hosts
        self.restarted = rank_env.restart_count > 0
        self.jobs: set[str] = {*(rank_env.agent or {}).get("jobs", ())}
        self.store: Any = None
        self.own: Any = None  # the process group of the collectives below, None for torch's default group
        self._begun: dict[str, int] = {}  # what `begun` had counted when the first step began
        self._calls = 0  # of `gather_apart`

    @property
    def is_rank0(self) -> bool:
        return self.rank == 0

    @property
    def attempt(self) -> str:
        """The id of this attempt. Once the ranks have met, all of them have rank 0's id."""
        return self.status.attempt

    def stops_before(self, step: int) -> bool:
        """Announce that this rank is about to begin `step`. Returns True if all ranks stop before `step` instead.

        This needs no collective, see `rankup.agent.record`. It waits some milliseconds while the ranks agree on a step.
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
        """Leave after success, together with all ranks. If another rank was lost, raise what `fail` returns."""
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
        """Tell the other ranks that this rank ends with `error`. Returns `error`, or a PeerLost if that caused it.

        A rank that fails must exit at once, because torch's own teardown may wait for dead ranks.
        """
        self.watch.exit_within(PEER_LOST)  # replaces the deadline of the failed phase, which might pass now
        failure = error
        if self.watch.connected and broke_collective(error):
            self.log.debug(f"{type(error).__name__}: {error}")
            failure = self.watch.loss(self.watch.suspects())
        self.watch.exit_within(exit_code(failure))
        # Report before leaving: when the collectives of the other ranks break, those ranks look for the cause here
        self.watch.report(exit_code(failure), reason(failure), getattr(failure, "suspect", None))
        self.watch.end()
        return failure

    def begun(self) -> dict[str, int]:
        """Return how many collectives this rank has begun, by process group and backend. Ranks run the same program, so
        a rank that has begun fewer than the others keeps them waiting.

        gloo also counts messages between two ranks, which differ between ranks. rankup sends such messages before the
        first step, or in a group that is left out here."""
        found = {"calls": self._calls}
        if dist.is_initialized():
            for group in [*dist.distributed_c10d._world.pg_map]:
                for device in group._device_types if group.group_desc != MESSAGES else ():
                    backend = group._get_backend(device)
                    name = f"{group.group_name[-8:]}/{backend.name()}"
                    count: int = backend._get_sequence_number_for_group()  # type: ignore[attr-defined]
                    found[name] = count - self._begun.get(name, 0)
        return found

    def count_anew(self) -> None:
        """Let `begun` count from now on. All ranks call this at the same place of the program."""
        self._begun = {}
        self._begun = self.begun()

    # Collectives ------------------------------------------------------------------------------------------------

    def collective(self, call: Callable[[], T]) -> T:
        """Return `call()`, which waits for other ranks. Mark this rank as waiting, so that no rank suspects it."""
        self.record.waiting = True
        result = call()
        self.record.waiting = False
        return result

    def barrier(self) -> None:
        """Wait until all ranks have called this."""
        self.max(0)

    def max(self, value: int) -> int:
        """Return the largest `value` of all ranks. Values must fit into int32."""
        if self.world_size == 1:
            return value
        tensor = torch.tensor(value, dtype=torch.int32)
        self.collective(lambda: dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.own))
        return int(tensor.item())

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a host tensor over all ranks, in place, and return it. Its shape must be the same on all ranks."""
        if self.world_size > 1:
            self.collective(lambda: dist.all_reduce(tensor, group=self.own))
        return tensor

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's `value`, by rank. Values travel as JSON: a tuple arrives as a list.

        Raises TypeError for a value that JSON can't hold.
        """
        return [json.loads(data) for data in self.gather_bytes(json.dumps(value).encode())]

    def gather_apart(self, value: Any, *, call: str, remedy: str) -> list[Any]:
        """As `gather`, for a call in the user's program that some ranks may leave out. The values travel through
        torch's store, because a collective would meet another collective of those ranks. If some ranks are in another
        call, this raises UserError: `call` must be on all ranks, and `remedy`. `call` begins with its name and ":"."""
        if self.world_size == 1:
            return [json.loads(json.dumps(value))]

        def left_out(where: str) -> UserError:
            own = f"rank {self.rank} ({self.hosts[self.rank]})"
            return UserError(f"{call} on all ranks, got a call on {own} while {where}. {remedy}")

        self._calls += 1
        key, before = f"rankup/{self._calls}", f"rankup/{self._calls - 1}"
        self.store.set(f"{key}/{self.rank}", json.dumps([call, value]))
        number = self.store.add(key, 1)
        if number == self.world_size:
            parts = [f"{key}/{rank}" for rank in range(self.world_size)]
            self.store.set(f"{key}/all", b"[" + b",".join(self.store.multi_get(parts)) + b"]")
            for old in (*parts, before, f"{before}/all"):  # all ranks have read the values of the call before
                self.store.delete_key(old)
        pause_s, look_s, stuck = STOP_S, time.monotonic() + UNEVEN_S, ""
        self.record.waiting = True
        while not self.store.check([f"{key}/all"]):
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSE_S)
            if number == 1 and time.monotonic() > look_s:  # the first rank asks for all that wait here
                earlier, stuck = stuck, self._left_out()
                if stuck and stuck == earlier:
                    raise left_out(stuck)
                look_s = time.monotonic() + UNEVEN_S
        self.record.waiting = False
        found: list[Any] = json.loads(self.store.get(f"{key}/all"))
        for rank, (other, _) in enumerate(found):
            if other != call:
                raise left_out(f"rank {rank} ({self.hosts[rank]}) calls {other.partition(':')[0]}")
        return [each for _, each in found]

    def _left_out(self) -> str:
        """Return which rank waits elsewhere while this rank is in `gather_apart`, "" if any rank may still come."""
        rows = self.watch.heartbeats()
        if any(not row["waiting"] or row["ago_s"] > UNEVEN_S for row in rows):
            return ""
        away = [row for row in rows if row["begun"].get("calls", 0) < self._calls]
        return next((f"rank {row['rank']} ({row['host']}) waits at {row['location']}" for row in away), "")

    def gather_tensors(self, value: Any) -> list[Any]:
        """Return every rank's `value`, by rank. Values and errors: as in `broadcast_tensors`."""
        return [_unpacked(data) for data in self.gather_bytes(_packed(value))]

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Return every rank's `data`, by rank, in two exchanges however many ranks there are."""
        if self.world_size == 1:
            return [data]
        lengths = torch.zeros(self.world_size, dtype=torch.int64)
        lengths[self.rank] = len(data)
        sizes: list[int] = self.sum(lengths).tolist()
        # An all-gather needs parts of equal size. If the sizes differ much, padding would cost more than a sum of zeros
        # and one rank's part, which moves each byte twice
        even = self.world_size * max(sizes) <= 2 * sum(sizes)
        begins = [0, *accumulate([max(sizes)] * self.world_size if even else sizes)]
        whole = torch.zeros(begins[-1], dtype=torch.uint8)
        parts = [whole[begin:end] for begin, end in pairwise(begins)]
        if data:
            parts[self.rank][: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if even:
            self.collective(lambda: dist.all_gather(parts, parts[self.rank].clone(), group=self.own))
        else:
            self.sum(whole)
        found = whole.numpy().data
        return [bytes(found[begin : begin + size]) for begin, size in zip(begins, sizes, strict=False)]

    def broadcast(self, value: Any, *, source: int = 0) -> Any:
        """Return rank `source`'s `value` on all ranks, and ignore the others' values. The value travels as JSON: a
        tuple arrives as a list. Raises TypeError on `source` for a value that JSON can't hold."""
        data = json.dumps(value).encode() if self.rank == source else b""
        return json.loads(self.broadcast_bytes(data, source=source))

    def broadcast_tensors(self, value: Any) -> Any:
        """Return rank 0's `value` on all ranks: tensors and plain values in lists and dicts. Tensors arrive on the CPU.
        Raises pickle.UnpicklingError for anything else, so that no other rank can make this rank run code.
        """
        return _unpacked(self.broadcast_bytes(_packed(value) if self.is_rank0 else b""))

    def broadcast_bytes(self, data: bytes, *, source: int = 0) -> bytes:
        """Return rank `source`'s `data` on all ranks, and ignore the other ranks' data."""
        if self.world_size == 1:
            return data
        size = torch.tensor(len(data))
        self.collective(lambda: dist.broadcast(size, src=source, group=self.own))
        if not size:
            return b""
        content = bytearray(data if self.rank == source else int(size))
        tensor = torch.frombuffer(content, dtype=torch.uint8)
        self.collective(lambda: dist.broadcast(tensor, src=source, group=self.own))
        return bytes(content)

    def must_match(self, what: str, value: str, *, remedy: str) -> None:
        """Raise UserError on every rank if `value` differs between ranks. The message calls the value `what`, names the
        first rank that differs from rank 0, and ends with `remedy`."""
        values = self.gather(value)
        for rank, other in enumerate(values):
            if other != values[0]:
                raise UserError(
                    f"{what} must be the same on all ranks, got {values[0]} on rank 0 ({self.hosts[0]}) and {other} on "
                    f"rank {rank} ({self.hosts[rank]}). {remedy}",
                    printed_elsewhere=not self.is_rank0,
                )

    def end_pass(self, count: int) -> None:
        """Raise UserError unless this pass over a loader ends after `count` batches on all ranks. All ranks call this.

        A rank with more batches may never come here: it may wait for this rank in an exchange of gradients.
        """
        self.record.passes += 1
        if self.world_size == 1:
            return
        both, look_s = torch.tensor([count, -count]), time.monotonic() + UNEVEN_S
        work = dist.all_reduce(both, op=dist.ReduceOp.MAX, group=self.own, async_op=True)
        self.record.waiting = True
        while not work.is_completed():
            time.sleep(STOP_S)
            if time.monotonic() > look_s:
                for row in self.watch.heartbeats():
                    if row["batches"] > self.record.batches and row["passes"] < self.record.passes:
                        ended = f"{count} on rank {self.rank} ({self.hosts[self.rank]})"
                        raise UserError(f"{EVEN} {ended}, while rank {row['rank']} ({row['host']}) goes on. {EVEN_OUT}")
                look_s = time.monotonic() + UNEVEN_S
        work.wait()  # raises if another rank was lost
        self.record.waiting = False
        if both[0] != -both[1]:
            counts = ", ".join(f"{each} on rank {rank}" for rank, each in enumerate(self.gather(count)))
            raise UserError(f"{EVEN} {counts}. {EVEN_OUT}", printed_elsewhere=not self.is_rank0)

    def on_rank0(self, work: Callable[[], Any], *, source: int = 0) -> Any:
        """Call `work` on rank `source`, and return its result on all ranks, see `broadcast`. All ranks call this.

        If `work` raises UserError or PeerLost, all ranks raise it; otherwise they would wait for the result until a
        deadline passes. Any other error is a fault of the program: it ends rank `source`, and the others lose a peer.
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

    def on_all_ranks(self, work: Callable[[], None]) -> None:
        """Call `work` on all ranks. If it raises UserError on a rank, all ranks raise it; otherwise they would wait for
        that rank. All ranks call this."""
        problem = ""
        try:
            work()
        except UserError as error:
            problem = str(error)
        problems = self.gather(problem)
        for rank, text in enumerate(problems):
            if text:
                where = "" if all(problems) else f" This is so on rank {rank} ({self.hosts[rank]})."
                raise UserError(f"{text}{where}", printed_elsewhere=not self.is_rank0)


def _packed(value: Any) -> bytes:
    """Return `value` as bytes. torch.save writes all memory behind a tensor, even if the tensor is a small view of it.
    Therefore such a tensor travels as a copy of what it shows."""
    tensors = [each for each in tree_leaves(value) if isinstance(each, torch.Tensor)]
    whole = {id(each): _without_rest(each) for each in tensors}
    if any(whole[id(each)] is not each for each in tensors):
        value = deepcopy(value, whole)  # takes these in place of the tensors
    torch.save(value, file := io.BytesIO())
    return file.getvalue()


def _without_rest(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout != torch.strided or tensor.untyped_storage().nbytes() <= tensor.nbytes:
        return tensor
    made = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    return nn.Parameter(made, made.requires_grad) if isinstance(tensor, nn.Parameter) else made


def _unpacked(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)  # otherwise all ranks would fill cuda:0


def broke_collective(error: BaseException) -> bool:
    """Return whether a collective raised `error` because a peer is gone. Such an error names neither peer nor cause."""
    if isinstance(error, JoinError | PeerLost):
        # The code that raised these errors knew the cause, such as a DataLoader worker that was killed
        return False
    if isinstance(error, dist.DistError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    # All collectives are C++. An error that Python code raises, such as DataLoader's, may contain the same words
    by_python = place is None or dis.opname[place.tb_frame.f_code.co_code[place.tb_lasti]] == "RAISE_VARARGS"
    if by_python and not type(error).__module__.startswith("horovod."):
        return False
    # If a check in gloo fails, such as one for equal sizes, the program is at fault, although the error looks the same
    return is_peer_loss(reason(error)) and "enforce fail" not in str(error)
