"""Is this machine, and this group of machines, fit to train? In stages, each with a time limit and printed as it ends.

Runs alone on a node, or under any launcher over all ranks. Rank 0 collects what every rank found. If the ranks can't
join, each rank prints its own findings.
"""

import contextlib
import logging
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rankup.agent.ends import StatusFile
from rankup.agent.logs import host_name
from rankup.agent.processes import read, within
from rankup.agent.protocol import HINT
from rankup.doctor import NOTE, OK, Finding, Report, disk, limits, problem, shared_memory
from rankup.env.rank_env import RankEnv, describe, holders, ranges
from rankup.errors import JoinError, PeerLost, Stopped, UserError, reason
from rankup.group.group import Group
from rankup.group.joining import join, start
from rankup.group.stop import StopRequest
from rankup.group.watchdog import Suspect

DISK_S = 30.0  # a network disk may never answer
STAGE_S = 60.0  # for all ranks together,
STAGE_S_PER_RANK = 0.1  # and more with many
SLOWEST_LINK = 12.5e6  # bytes/s: 100 Mbit/s. The gradients of a ResNet-50, 102 MB, take 16 s a step over it
APART = 5.0  # times slower than the median of its kind
BULK_BYTES, BULKS = 2 * 2**20, 3  # over each link
REPEAT_S = 1.0  # for how long the same thing is computed again and again


def doctor(
    found: RankEnv | UserError, run_dir: Path, *, stop: StopRequest, log: logging.Logger, as_json: bool = False,
    **plan: Any,
) -> int:
    """Check everything that a training needs, alone or together with all ranks, and write `doctor/report.json`.

    `found`: this process's place among the ranks, or why the environment describes none, which is a finding too.
    `as_json`: print one line of JSON in place of the table. `plan`: what the training will need, see `Doctor`.
    Returns the exit code, see `rankup.doctor`. Raises Stopped.
    """
    json_out = sys.stdout if as_json else None
    with contextlib.redirect_stdout(sys.stderr if as_json else sys.stdout):
        if isinstance(found, UserError):
            report = Report(log, json_out=json_out)
            report.add(*(problem("environment", why=text) for text in str(found).splitlines()))
            return report.end()
        report = Report(log, rank=found.rank, json_out=json_out)
        return Doctor(found, run_dir, report, **plan).run(stop, log)


@dataclass
class Doctor:
    """The stages, and which of them this rank is in: a failure is reported as that stage's.

    `settings`: what must be the same on all ranks, by name. `device`, `backend`: as for `rankup.Program.join`.
    `num_threads`, `num_workers`: of each rank. Times in seconds.
    """

    launch: RankEnv
    run_dir: Path
    report: Report
    settings: Mapping[str, str] = field(default_factory=dict)
    device: str | None = None
    backend: str | None = None
    num_threads: int = 1
    num_workers: int = 0
    join_timeout_s: float = 120.0
    longest_phase_s: float = 1800.0
    stage: str = "environment"

    def run(self, stop: StopRequest, log: logging.Logger) -> int:
        """All stages."""
        launch, report = self.launch, self.report
        report.add(Finding("environment", OK, describe(launch)))
        report.add(*limits(ranks=launch.local_world_size or 1, threads=self.num_threads))
        report.add(*shared_memory(num_workers=self.num_workers))
        seen = within(DISK_S, lambda: [*disk(self.run_dir)])
        report.add(*(seen or [problem("silent-disk", folder=self.run_dir, timeout_s=DISK_S)]))
        report.add(devices())
        try:
            with start(
                launch, settings=self.settings, device=self.device, backend=self.backend,
                status=StatusFile(self.run_dir / "doctor", launch), stop=stop, log=log,
            ) as group:
                group.watch.leaving = self._leave
                self._check(group, "repetition", repetition(group.device))
                if group.world_size > 1:
                    self._check(group, "joined", self._join(group))
                    self._check(group, "versions", versions(group))
                    self._check(group, "collective", collective(group))
                    self._check(group, "links", links(group))
                else:
                    alone = "a single process: nothing was checked that needs several ranks"
                    report.add(Finding("joined", NOTE, alone))
                self._check(group, "report", ())
                return report.end(group.gather, self.run_dir / "doctor" / "report.json")
        except Stopped:
            raise
        except PeerLost as error:  # or another rank's deadline passed before this one's
            found = problem("hung" if error.nobody_died else "died", of=self.stage, why=error)
        except (UserError, JoinError) as error:  # a user's mistake says itself what to do, and so does HINT
            missing = isinstance(error, JoinError) and HINT not in str(error)
            found = problem("missing" if missing else "refused", of=self.stage, why=error)
        except Exception as error:
            found = problem("check-failed", of=self.stage, why=reason(error))
        report.add(found)
        return report.end()

    def _join(self, group: Group) -> Iterator[Finding]:
        join(group, timeout_s=self.join_timeout_s, longest_phase_s=self.longest_phase_s)
        places = "; ".join(f"{ranges(ranks)} on {host}" for host, ranks in holders(enumerate(group.hosts)).items())
        by = f"{dist.get_backend()} by {os.environ.get('GLOO_SOCKET_IFNAME') or 'host name'}"
        yield Finding("joined", OK, f"all {group.world_size} ranks: {places} ({by}); torch, program and settings are "
                      "the same on all")

    def _check(self, group: Group, stage: str, findings: Iterable[Finding]) -> None:
        self.stage = stage
        group.watch.enter(stage, STAGE_S + STAGE_S_PER_RANK * group.world_size)
        self.report.add(*findings)  # a generator: the check runs here

    def _leave(self, code: int, why: str, suspect: Suspect | None) -> int:
        """A training would end here with `code`: a deadline has passed, or a peer is lost."""
        gone = suspect is not None and not suspect.alive
        self.report.add(problem("died" if gone else "hung", of=self.stage, why=why))
        return self.report.end()


# What the ranks look at -----------------------------------------------------------------------------------------------
# Each function that takes a group is collective: every rank calls it. Most findings are rank 0's


def devices() -> Finding:
    """This process's own devices. Needs no group."""
    if not torch.cuda.is_available():
        return Finding("devices", OK, f"CPU: {os.cpu_count()} of {cpu_model()}, no CUDA device")
    count, name = torch.cuda.device_count(), torch.cuda.get_device_name(0)
    return Finding("devices", OK, f"{count} CUDA devices, {name}, CUDA {torch.version.cuda}")


def repetition(device: torch.device) -> Iterator[Finding]:
    """Whether this rank's device gives the same bits each time that it computes the same matrix products, which take
    all cores, vector units and some memory. Needs no group."""
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


def versions(group: Group) -> Iterator[Finding]:
    """What joining does not compare. Wheels of nccl differ with equal torch; CUDA comes with torch."""
    on_gpu = group.device.type == "cuda"
    nccl = torch.cuda.nccl.version() if on_gpu else ()  # type: ignore[no-untyped-call]
    gathered = group.gather({
        "nccl": ".".join(map(str, nccl)), "Python": platform.python_version(), "CPU": cpu_model(),
        "GPU": torch.cuda.get_device_name(group.device) if on_gpu else "",
    })
    for name in gathered[0] if group.rank == 0 else ():
        found = holders((rank, each[name]) for rank, each in enumerate(gathered))
        seen = f"{name} differs: " + ", ".join(f"{value or 'none'} on {ranges(who)}" for value, who in found.items())
        if len(found) > 1 and name in ("CPU", "GPU"):
            yield Finding("versions", NOTE, f"{seen}; weights are the same to the bit on one kind of {name} only")
        elif len(found) > 1:
            yield problem("differs", seen=seen)


def cpu_model() -> str:
    """The CPU's name, such as "Intel(R) Xeon(R) Processor @ 2.50GHz"; at least its architecture."""
    # Linux only; platform.processor() is empty there
    names = [line for line in read("/proc/cpuinfo").splitlines() if line.startswith("model name")]
    return names[0].partition(":")[2].strip() if names else platform.processor() or platform.machine()


def collective(group: Group) -> Iterator[Finding]:
    """Whether all_reduce, which adds up the gradients, gives the right numbers on this rank."""
    size, wrong = group.world_size, []  # integers are exact in float32: the bits must be equal
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
    """The bandwidth from each rank to its neighbours, and of each kind of link the slowest.

    No rank does two things at once, and no two messages share a direction of a cable where the ranks of a node follow
    each other.
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
            if message.device.type != "cpu":  # the call has only queued its work there
                torch.accelerator.synchronize(message.device)
            seconds.append(time.perf_counter() - began_s)
        if 0 <= peer < group.world_size and not sends:
            # The fastest one counts: what else uses the machine only makes one slower
            own.append((BULK_BYTES / min(seconds), peer, group.rank))
    found = [(bandwidth, sender, receiver) for part in group.gather(own) for bandwidth, sender, receiver in part]
    for between, words in ((True, "between nodes"), (False, "inside a node")):
        kind = [link for link in found if (group.hosts[link[1]] != group.hosts[link[2]]) is between]
        if kind and group.rank == 0:
            yield judge(kind, words, group.hosts)


def judge(kind: Sequence[tuple[float, int, int]], words: str, hosts: Sequence[str]) -> Finding:
    """What to say of links of one kind: a warning if one is below SLOWEST_LINK, or far below the others and slow.
    `kind`: of each link bytes/s, and the ranks that sent and received."""
    bandwidth, sender, receiver = min(kind)
    median = statistics.median(each for each, *_ in kind)
    seen = (
        f"{len(kind)} {words}: slowest {_rate(bandwidth)}, from rank {sender} on {hosts[sender]} to rank {receiver} on "
        f"{hosts[receiver]}; median {_rate(median)}"
    )
    # Beside a link inside one chip any cable looks slow
    if bandwidth >= max(SLOWEST_LINK, min(median / APART, 10 * SLOWEST_LINK)):
        return Finding("links", OK, seen)
    return problem("slow-link", seen=seen, ring_s=200e6 / bandwidth)


def _rate(bandwidth: float) -> str:
    """`bandwidth` in bytes/s."""
    return f"{bandwidth / 1e6:.0f} MB/s" if bandwidth < 1e9 else f"{bandwidth / 1e9:.1f} GB/s"
