"""How fast ranks exchange: all-reduce, all-gather, broadcast and point to point, timed and checked, size by size; and a plain
TCP connection beside them."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import psutil
import torch
import torch.distributed as dist

from train.commands.bench.cost_model import bus_factor
from train.commands.bench.tcp_pair import Line, plain_line
from train.group.group import Group
from train.process.limits import memory_left

SOCKETS = "sockets"  # not torch's: a plain connection, for point to point
OPERATIONS = ("all-reduce", "all-gather", "broadcast", "point to point")
SAMPLE_S = 1e-3  # a sample of short calls is several of them
MOST_CALLS = 50
FEWEST = 3  # samples of one size
LARGEST = 2**30
# Its name before torch 2.14
ALL_GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True, slots=True)
class Row:
    """One operation, backend and size. Times in s of one call, on the rank that took longest; bandwidths in bytes/s."""

    operation: str
    backend: str
    size: int
    samples: int
    median_s: float
    p95_s: float
    algorithm: float
    bus: float
    steadiness: float  # median over 95th percentile: 1 is steady


def backends(spec: str, device: torch.device) -> list[tuple[str, torch.device]]:
    """What a group of this backend exchanges over: gloo between hosts' memories, and the accelerator's own.

    >>> backends("cpu:gloo,cuda:nccl", torch.device("cuda:1"))
    [('gloo', device(type='cpu')), ('nccl', device(type='cuda', index=1))]
    """
    named = dict(word.split(":") for word in spec.split(",") if ":" in word)
    own = [(named[device.type], device)] if device.type in named and device.type != "cpu" else []
    return [("gloo", torch.device("cpu")), *own]


def room(group: Group, device: torch.device) -> int:
    """The largest message whose buffers every rank can hold, a power of two times 1 KiB."""
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    else:
        left = memory_left()
        free = min(psutil.virtual_memory().available, psutil.virtual_memory().available if left is None else left)
        free //= max(1, group.launch.local_world_size or group.world_size)
    kib = group.min(min(free // 4096, LARGEST // 1024))  # two buffers, and as much to spare
    return 1024 << max(0, kib.bit_length() - 1)


def sizes(largest: int) -> list[int]:
    """1 KiB, 4 KiB, ... to the largest."""
    found = [1024]
    while found[-1] * 4 <= largest:
        found.append(found[-1] * 4)
    return found


def measure(
    group: Group, wanted: Sequence[int], *, spec: str, iterations: int, seconds: float, timeout_s: float,
    note: Callable[[str], None] = lambda text: None,
) -> list[Row]:
    """Point to point over a plain connection, then every operation on every backend, each within its share of `seconds`:
    what would take longer is left out.

    `wanted`: sizes in bytes; empty takes all from 1 KiB on. `spec`: the group's backend as torch was told
    it. Raises RuntimeError where a result is not right.
    """
    rows: list[Row] = []
    places = backends(spec, group.device)
    tried = [(operation, backend, device) for backend, device in places for operation in OPERATIONS]
    group.watch.enter("measure", timeout_s)
    with plain_line(group, timeout_s) as line:
        if isinstance(line, Line):
            tried.insert(0, ("point to point", SOCKETS, torch.device("cpu")))
        else:
            note(f"no plain connection to compare with: {line}")
        for operation, backend, device in tried:
            until_s = time.monotonic() + seconds / len(tried)
            for size in wanted or sizes(room(group, device)):
                group.watch.enter("measure", timeout_s)
                prepared = _plain(line, size) if isinstance(line, Line) and backend == SOCKETS else None
                call, check = prepared or _prepared(group, operation, device, size)
                row = _one(group, operation, backend, device, size, iterations, until_s, call, check)
                if row is None:
                    break
                rows.append(row)
            note(f"{operation} on {backend}: up to {rows[-1].size} bytes")
    return rows


def _one(
    group: Group, operation: str, backend: str, device: torch.device, size: int, iterations: int, until_s: float,
    call: Callable[[], Any], check: Callable[[], None],
) -> Row | None:
    """One size, or None: no time is left for it. All ranks decide alike."""
    group.watch.wait_for_others(True)
    call()
    check()
    once_s = group.max(max(1, round(1e6 * _timed(group, device, call, 1)))) / 1e6
    left_s = until_s - time.monotonic()
    calls = min(MOST_CALLS, max(1, int(SAMPLE_S / once_s)))
    if group.max(int(once_s * calls * FEWEST > left_s and size > 1024)):
        return None
    # Half of what is left, so that larger sizes have their turn
    count = group.max(min(iterations, max(FEWEST, int(left_s / 2 / (once_s * calls)))))
    own = [_timed(group, device, call, calls) for _ in range(count)]
    times = sorted(map(max, zip(*group.gather(own), strict=True)))
    group.watch.wait_for_others(False)
    median_s, p95_s = statistics.median(times), times[min(len(times) - 1, round(0.95 * (len(times) - 1)))]
    if operation == "point to point":
        median_s, p95_s = median_s / 2, p95_s / 2  # there and back
    moved = size / median_s
    factor = bus_factor(operation, group.world_size)
    return Row(operation, backend, size, count, median_s, p95_s, moved, moved * factor, median_s / p95_s)


def _timed(group: Group, device: torch.device, call: Callable[[], Any], calls: int) -> float:
    """Seconds of one call on this rank, over so many after each other, as nccl-tests does it; all ranks begin together."""
    group.barrier()
    began_s = time.perf_counter()
    for _ in range(calls):
        call()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return (time.perf_counter() - began_s) / calls


def _prepared(
    group: Group, operation: str, device: torch.device, size: int
) -> tuple[Callable[[], Any], Callable[[], None]]:
    """The call, and a check of what its first call leaves. `size` counts as nccl-tests counts it: an all-gather's is that
    of its result."""
    rank, ranks = group.rank, group.world_size
    count = max(1, size // 4)
    if operation == "all-gather":
        each = max(1, count // ranks)
        part = torch.full((each,), rank + 1.0, device=device)
        whole = torch.zeros(each * ranks, device=device)
        right = torch.arange(1.0, ranks + 1, device=device).repeat_interleave(each)
        return lambda: ALL_GATHER(whole, part), lambda: _must_equal(whole, right, operation, size, rank)
    if operation == "all-reduce":
        summed = torch.full((count,), rank + 1.0, device=device)

        def check() -> None:
            _must_equal(summed, torch.full_like(summed, ranks * (ranks + 1) / 2), operation, size, rank)
            summed.zero_()  # a sum of sums would soon be too large

        return lambda: dist.all_reduce(summed), check
    pattern = torch.arange(count, device=device).remainder_(1009).float()
    buffer = pattern.clone() if rank == 0 else torch.zeros_like(pattern)
    if operation == "broadcast":
        return lambda: dist.broadcast(buffer, src=0), lambda: _must_equal(buffer, pattern, operation, size, rank)
    last = ranks - 1

    def back_and_forth() -> None:
        if rank == 0:
            dist.send(buffer, dst=last)
            dist.recv(buffer, src=last)
        elif rank == last:
            dist.recv(buffer, src=0)
            dist.send(buffer, dst=0)

    return back_and_forth, lambda: _must_equal(buffer, pattern, operation, size, rank) if rank in (0, last) else None


def _plain(line: Line, size: int) -> tuple[Callable[[], Any], Callable[[], None]]:
    """The same for the plain connection. Two buffers, as `room` counts them."""
    pattern = memoryview(bytes(range(251)) * (size // 251 + 1))[:size]
    message = bytearray(pattern if line.group.rank == 0 else size)

    def check() -> None:
        if line.connection is not None and message != pattern:
            raise RuntimeError(f"{size} bytes came out wrong over a plain connection on rank {line.group.rank}.")

    return lambda: line.back_and_forth(message), check


def _must_equal(found: torch.Tensor, right: torch.Tensor, operation: str, size: int, rank: int) -> None:
    if not torch.equal(found, right):
        place = int((found != right).nonzero()[0])
        raise RuntimeError(
            f"{operation} of {size} bytes came out wrong on rank {rank}: {found[place].item()} at {place}, not "
            f"{right[place].item()}. The network, a driver or memory corrupts data."
        )


def as_dicts(rows: Sequence[Row]) -> list[dict[str, Any]]:
    return [asdict(row) for row in rows]
