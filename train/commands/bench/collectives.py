"""How fast the ranks exchange: all-reduce, all-gather, broadcast and point to point, each checked, then timed by size.

Point to point is measured over a plain TCP connection too, for comparison.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from train.commands.bench.cost_model import bus_factor
from train.commands.bench.tcp_pair import tcp_pair
from train.commands.ping_pong import Peer, ping_pong, torch_peer, wait_for_device
from train.group.group import Group
from train.process.limits import memory_available

POINT_TO_POINT, SOCKETS = "point to point", "sockets"  # sockets: no backend of torch, but the plain connection
OPERATIONS = ("all-reduce", "all-gather", "broadcast", POINT_TO_POINT)
SAMPLE_S = 1e-3  # a sample of short calls is the mean of several calls, which together take about this long
MAX_CALLS = 50  # of one sample
MIN_SAMPLES = 3  # of one size
LARGEST = 2**30
# torch 2.14 renamed it
ALL_GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True, slots=True)
class Row:
    """One operation, backend and size. Times: seconds of one call on the slowest rank. Bandwidths: bytes/s."""

    operation: str
    backend: str
    size: int
    samples: int
    median_s: float
    p95_s: float
    algorithm: float
    bus: float
    steadiness: float  # median divided by 95th percentile: 1 is steady


@dataclass(frozen=True, slots=True)
class Subject:
    """What is measured. `peer`: the other end of point to point, None on ranks that are no end of it."""

    operation: str
    backend: str
    device: torch.device
    peer: Peer | None


def backends(spec: str, device: torch.device) -> list[tuple[str, torch.device]]:
    """The backends of a group that torch made from `spec`, with the device whose memory each exchanges.

    gloo is always there, for host memory; an accelerator has its own beside it.

    >>> backends("cpu:gloo,cuda:nccl", torch.device("cuda:1"))
    [('gloo', device(type='cpu')), ('nccl', device(type='cuda', index=1))]
    """
    named = dict(word.split(":") for word in spec.split(",") if ":" in word)
    own = [(named[device.type], device)] if device.type in named and device.type != "cpu" else []
    return [("gloo", torch.device("cpu")), *own]


def default_sizes(group: Group, device: torch.device) -> list[int]:
    """1 KiB, 4 KiB, 16 KiB, ... bytes, as long as every rank can hold the buffers. Collective."""
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    else:
        free = memory_available() // max(1, group.launch.local_world_size or group.world_size)
    largest = max(1024, group.min(min(free // 4, LARGEST)))  # two buffers, and as much again stays free
    return [size for size in (1024 * 4**power for power in range(16)) if size <= largest]


def measure(
    group: Group, sizes: Sequence[int], *, spec: str, samples: int, seconds: float, timeout_s: float
) -> list[Row]:
    """Point to point over a plain connection, then each operation on each backend. Collective: every rank calls it.

    `sizes`: in bytes; empty takes all from 1 KiB on. `spec`: the group's backend as torch was given it. `samples`: of
    each size, at most. Each operation has an equal share of `seconds`; sizes that would take longer are left out.
    `timeout_s`: of one size. Raises RuntimeError if an exchange gives a wrong result.
    """
    rows: list[Row] = []
    last = group.world_size - 1
    peer = torch_peer(last - group.rank) if group.rank in (0, last) else None
    group.watch.enter("measure", timeout_s)
    with tcp_pair(group, timeout_s) as (pair, problem):
        all_backends = backends(spec, group.device)
        subjects = [Subject(operation, *backend, peer) for backend in all_backends for operation in OPERATIONS]
        if problem:
            group.log.info(f"no plain connection to compare with: {problem}")
        else:
            subjects.insert(0, Subject(POINT_TO_POINT, SOCKETS, torch.device("cpu"), pair))
        for subject in subjects:
            until_s = time.monotonic() + seconds / len(subjects)
            for size in sizes or default_sizes(group, subject.device):
                group.watch.enter("measure", timeout_s)
                row = _measure_size(group, subject, size, samples, until_s)
                if row is None:
                    break
                rows.append(row)
            group.log.info(f"{subject.operation} on {subject.backend}: up to {rows[-1].size} bytes")
    return rows


def _measure_size(group: Group, subject: Subject, size: int, samples: int, until_s: float) -> Row | None:
    """One size, or None if no time is left for it. All ranks decide alike: each number is agreed on first."""
    call, check = _prepare(group, subject, size)
    group.watch.wait_for_others(True)
    call()
    check()
    once_s = group.max(max(1, round(1e6 * _timed(group, subject.device, call, 1)))) / 1e6
    left_s = until_s - time.monotonic()
    calls = min(MAX_CALLS, max(1, int(SAMPLE_S / once_s)))
    if group.max(int(once_s * calls * MIN_SAMPLES > left_s and size > 1024)):
        return None
    # Half of the time that is left: larger sizes need theirs
    count = group.max(min(samples, max(MIN_SAMPLES, int(left_s / 2 / (once_s * calls)))))
    own = [_timed(group, subject.device, call, calls) for _ in range(count)]
    times = sorted(map(max, zip(*group.gather(own), strict=True)))
    group.watch.wait_for_others(False)
    median_s, p95_s = statistics.median(times), times[round(0.95 * (len(times) - 1))]
    if subject.operation == POINT_TO_POINT:
        median_s, p95_s = median_s / 2, p95_s / 2  # a round trip is two messages
    bandwidth = size / median_s
    bus = bandwidth * bus_factor(subject.operation, group.world_size)
    return Row(subject.operation, subject.backend, size, count, median_s, p95_s, bandwidth, bus, median_s / p95_s)


def _timed(group: Group, device: torch.device, call: Callable[[], Any], calls: int) -> float:
    """Seconds of one call on this rank: the mean of `calls` without a pause, as nccl-tests does; all begin together."""
    group.barrier()
    began_s = time.perf_counter()
    for _ in range(calls):
        call()
    wait_for_device(device)
    return (time.perf_counter() - began_s) / calls


def _prepare(group: Group, subject: Subject, size: int) -> tuple[Callable[[], Any], Callable[[], None]]:
    """A call with buffers of `size` bytes, and a check of what the first call left in them.

    Sizes are counted as nccl-tests counts them: of an all-gather it is the size of its result.
    """
    rank, ranks, device = group.rank, group.world_size, subject.device
    count = max(1, size // 4)  # float32

    def must_equal(found: torch.Tensor, right: torch.Tensor) -> None:
        if not torch.equal(found, right):
            place = int((found != right).nonzero()[0])
            raise RuntimeError(
                f"{subject.operation} of {size} bytes came out wrong on rank {rank}: {found[place].item()} at {place}, "
                f"not {right[place].item()}, over {subject.backend}. The network, a driver or memory corrupts data."
            )

    if subject.operation == "all-gather":
        each = max(1, count // ranks)
        part = torch.full((each,), rank + 1.0, device=device)
        whole = torch.zeros(each * ranks, device=device)
        right = torch.arange(1.0, ranks + 1, device=device).repeat_interleave(each)
        return lambda: ALL_GATHER(whole, part), lambda: must_equal(whole, right)
    if subject.operation == "all-reduce":
        summed = torch.full((count,), rank + 1.0, device=device)

        def check_sum() -> None:
            must_equal(summed, torch.full_like(summed, ranks * (ranks + 1) / 2))
            summed.zero_()  # each further call adds the sums up: they would overflow

        return lambda: dist.all_reduce(summed), check_sum
    pattern = torch.arange(count, device=device).remainder_(1009).float()
    buffer = pattern.clone() if rank == 0 else torch.zeros_like(pattern)
    if subject.operation == "broadcast":
        return lambda: dist.broadcast(buffer, src=0), lambda: must_equal(buffer, pattern)
    peer = subject.peer
    if peer is None:
        return lambda: None, lambda: None
    return lambda: ping_pong(peer, buffer, first=rank == 0), lambda: must_equal(buffer, pattern)
