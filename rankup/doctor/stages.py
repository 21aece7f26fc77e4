"""The stages of the doctor. Each has a time limit, and its findings are printed when it ends.

The stages run in one process, or under any launcher on all ranks. Rank 0 collects the findings of all ranks. If the
ranks can't join, each rank prints its own findings.
"""

import contextlib
import logging
import os
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist

from rankup.agent.logs import host_name
from rankup.agent.processes import within
from rankup.agent.protocol import HINT
from rankup.doctor import DISK_S, OK, Finding, Report, disk, limits, problem, shared_memory
from rankup.env.rank_env import RankEnv, describe, holders, ranges
from rankup.errors import JoinError, PeerLost, Stopped, UserError, reason
from rankup.group.group import Group
from rankup.group.joining import join, start
from rankup.group.stop import StopRequest

STAGE_S = 60.0  # limit for a stage on all ranks,
STAGE_S_PER_RANK = 0.1  # and what each rank adds to it
SLOWEST_LINK = 12.5e6  # bytes/s: 100 Mbit/s. With it the gradients of a ResNet-50, 102 MB, take 16 s per step
APART = 5.0  # a link is slow if it is this many times slower than the median of its kind
BULK_BYTES, BULKS = 2 * 2**20, 3  # size and number of messages over each link
REPEAT_S = 1.0  # how long `repetition` repeats its computation


def doctor(
    found: RankEnv | UserError, run_dir: Path, *, stop: StopRequest, log: logging.Logger, as_json: bool = False,
    num_threads: int = 1, num_workers: int = 0, join_timeout_s: float = 120.0,
    settings: Mapping[str, str] | None = None, device: str | None = None,
) -> int:
    """Check what training needs, in one process or together with all ranks, and write `doctor/report.json`.

    `found`: which rank this process is, or the error in the environment, which becomes a finding. `as_json`: print one
    line of JSON instead of a table. `num_threads`, `num_workers`: per rank. `settings`, `device`: see
    `rankup.Program.join`. Returns the exit code, see `rankup.doctor`. Raises Stopped.
    """
    rank, json_out = found.rank if isinstance(found, RankEnv) else 0, sys.stdout if as_json else None
    report = Report(log, rank=rank, json_out=json_out)
    with contextlib.redirect_stdout(sys.stderr if as_json else sys.stdout):
        if isinstance(found, UserError):
            report.add(*(problem("environment", why=text) for text in str(found).splitlines()))
            return report.end()
        report.add(Finding("environment", OK, describe(found)))
        report.add(*limits(ranks=found.local_world_size or 1, threads=num_threads))
        report.add(*shared_memory(num_workers=num_workers))
        seen = within(DISK_S, lambda: [*disk(run_dir)])
        report.add(*(seen or [problem("silent-disk", folder=run_dir, timeout_s=DISK_S)]))
        visible = "no CUDA device"
        if torch.cuda.is_available():
            visible = f"{torch.cuda.device_count()} CUDA devices, {torch.cuda.get_device_name(0)}"
        report.add(Finding("devices", OK, visible))
        try:
            with start(found, run_dir / "doctor", settings=settings or {}, device=device, stop=stop) as group:
                group.watch.leaving = partial(_leave, report)
                _check(report, group, "repetition", repetition(group.device))
                if group.world_size > 1:
                    _check(report, group, "joined", joined(group, join_timeout_s))
                    _check(report, group, "collective", collective(group))
                    _check(report, group, "links", links(group))
                else:
                    alone = "a single process: nothing was checked that needs several ranks"
                    report.add(Finding("joined", OK, alone))
                _check(report, group, "report", ())
                return report.end(group.gather, run_dir / "doctor" / "report.json")
        except Stopped:
            raise
        except PeerLost as error:  # a peer is lost, or another rank's deadline passed first
            return _leave(report, error)
        except (UserError, JoinError) as error:  # a UserError, and a JoinError with HINT, already say what to do
            missing = isinstance(error, JoinError) and HINT not in str(error)
            report.add(problem("missing" if missing else "refused", of=report.stage, why=error))
        except Exception as error:
            report.add(problem("check-failed", of=report.stage, why=reason(error)))
        return report.end()


def _check(report: Report, group: Group, stage: str, findings: Iterable[Finding]) -> None:
    report.stage = stage
    group.watch.enter(stage, STAGE_S + STAGE_S_PER_RANK * group.world_size)
    report.add(*findings)  # `findings` is a generator, so the check runs here


def _leave(report: Report, loss: PeerLost) -> int:
    """Report that a deadline has passed or that a peer is lost. Training would end at this point."""
    report.add(problem("hung" if loss.nobody_died else "died", of=report.stage, why=loss))
    return report.end()


# The checks of ranks --------------------------------------------------------------------------------------------------
# All ranks call each function that takes a group. Most findings are reported by rank 0


def joined(group: Group, timeout_s: float) -> Iterator[Finding]:
    """Join the ranks, and report who has joined and how."""
    join(group, timeout_s=timeout_s)
    places = "; ".join(f"{ranges(ranks)} on {host}" for host, ranks in holders(enumerate(group.hosts)).items())
    by = f"{dist.get_backend()} by {os.environ.get('GLOO_SOCKET_IFNAME') or 'host name'}"
    seen = f"all {group.world_size} ranks: {places} ({by}); torch, program and settings are the same on all"
    yield Finding("joined", OK, seen)


def repetition(device: torch.device) -> Iterator[Finding]:
    """Check that this rank's device gives the same bits each time it computes the same matrix products. These use all
    cores, the vector units and some memory. Needs no group."""
    size = 512 if device.type == "cpu" else 4096
    weight = torch.randn(size, size, generator=torch.Generator().manual_seed(0)).to(device) / size**0.5
    digests, until_s = list[int](), time.monotonic() + REPEAT_S
    while len(digests) < 2 or time.monotonic() < until_s:
        state = weight
        for _ in range(8):
            state = torch.sin(4 * state @ weight)
        digests.append(int(torch.hash_tensor(state).item()))
        if digests[-1] != digests[0]:
            yield problem("two-results", device=device, times=len(digests), host=host_name(), kind=device.type.upper())
            return
    yield Finding("repetition", OK, f"the same computation gave the same bits {len(digests)} times on {device}")


def collective(group: Group) -> Iterator[Finding]:
    """Check that all_reduce, which sums gradients, gives the correct numbers on this rank."""
    size, wrong = group.world_size, []  # float32 represents these integers exactly, so the bits must be equal
    for length in (1, 1000, 2**18 + 1):
        base = torch.arange(length, device=group.device, dtype=torch.float32) % 997
        numbers = base + group.rank
        group.collective(lambda numbers=numbers: dist.all_reduce(numbers))  # type: ignore[misc]
        if not torch.equal(numbers, base * size + size * (size - 1) / 2):
            wrong.append(f"all_reduce of {length} numbers")
    if wrong:
        yield problem("wrong-sum", wrong=", ".join(wrong), host=host_name())
    elif group.rank == 0:
        yield Finding("collective", OK, "all_reduce gives the right numbers")


# Links --------------------------------------------------------------------------------------------------------------


def links(group: Group) -> Iterator[Finding]:
    """Measure the bandwidth from each rank to its neighbours, and judge the slowest link of each kind.

    No rank sends and receives at once. If the ranks of each node have consecutive numbers, no two messages share a
    direction of a cable.
    """
    message, own = torch.zeros(BULK_BYTES, dtype=torch.uint8, device=group.device), []
    for step, parity in product((1, -1), (0, 1)):
        sends = group.rank % 2 == parity
        peer = group.rank + (step if sends else -step)
        seconds = []
        for _ in range(BULKS):
            group.barrier()
            began_s = time.perf_counter()
            if 0 <= peer < group.world_size:
                (dist.send if sends else dist.recv)(message, peer)
            if message.device.type != "cpu":  # on a GPU the call only queues the work
                torch.accelerator.synchronize(message.device)
            seconds.append(time.perf_counter() - began_s)
        if 0 <= peer < group.world_size and not sends:
            # Take the fastest message, because other work on the machine can only make a message slower
            own.append((BULK_BYTES / min(seconds), peer, group.rank))
    found = [(bandwidth, sender, receiver) for part in group.gather(own) for bandwidth, sender, receiver in part]
    for between, words in ((True, "between nodes"), (False, "inside a node")):
        kind = [link for link in found if (group.hosts[link[1]] != group.hosts[link[2]]) is between]
        if kind and group.rank == 0:
            yield judge(kind, words, group.hosts)


def judge(kind: Sequence[tuple[float, int, int]], words: str, hosts: Sequence[str]) -> Finding:
    """Judge links of one kind. Warn if a link is slower than SLOWEST_LINK, or much slower than the others and slow.
    `kind`: (bytes/s, sending rank, receiving rank) of each link."""
    bandwidth, sender, receiver = min(kind)
    median = statistics.median(each for each, *_ in kind)
    seen = (
        f"{len(kind)} {words}: slowest {_rate(bandwidth)}, from rank {sender} on {hosts[sender]} to rank {receiver} on "
        f"{hosts[receiver]}; median {_rate(median)}"
    )
    # A link inside one chip is so fast that any cable looks slow beside it: warn only of slow links
    if bandwidth >= max(SLOWEST_LINK, min(median / APART, 10 * SLOWEST_LINK)):
        return Finding("links", OK, seen)
    return problem("slow-link", seen=seen, ring_s=200e6 / bandwidth)


def _rate(bandwidth: float) -> str:
    """Return `bandwidth`, in bytes/s, as a text with a unit."""
    return f"{bandwidth / 1e6:.0f} MB/s" if bandwidth < 1e9 else f"{bandwidth / 1e9:.1f} GB/s"
