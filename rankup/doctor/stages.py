"""Is this machine, and this group of machines, fit to train? In stages, each with a time limit and printed as it ends.

Runs alone on a node, or under any launcher over all ranks. Rank 0 collects what every rank found. If the ranks can't
join, each rank prints its own findings.
"""

import contextlib
import logging
import os
import platform
import re
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rankup.agent.ends import StatusFile
from rankup.agent.logs import host_name
from rankup.agent.processes import read
from rankup.agent.protocol import HINT
from rankup.doctor import NOTE, OK, Finding, Report, check_machine, problem
from rankup.env.rank_env import RankEnv, describe, holders, ranges
from rankup.errors import JoinError, PeerLost, Stopped, UserError, reason
from rankup.group.group import Group
from rankup.group.joining import check_devices, check_settings, form, meet, start
from rankup.group.stop import StopRequest
from rankup.group.watchdog import Suspect

STAGE_S = 60.0  # for all ranks together,
STAGE_S_PER_RANK = 0.1  # and more with many
SLOWEST_LINK = 12.5e6  # bytes/s: 100 Mbit/s. The gradients of a ResNet-50, 102 MB, take 16 s a step over it
APART = 5.0  # times slower than the median of its kind
PING_BYTES, PINGS = 8, 20  # latency: round trips of this size
BULK_BYTES, BULKS = 2 * 2**20, 3  # bandwidth
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
        report = Report(
            log, rank=found.rank, json_out=json_out, world_size=found.world_size, hosts=[host_name()]
        )
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
    stage_timeout_s: float = STAGE_S
    longest_phase_s: float = 1800.0
    stage: str = "environment"

    def run(self, stop: StopRequest, log: logging.Logger) -> int:
        """All stages."""
        launch, report = self.launch, self.report
        report.add(Finding("environment", OK, describe(launch)))
        check_machine(
            report, self.run_dir, ranks=launch.local_world_size or 1, threads=self.num_threads,
            num_workers=self.num_workers, has_gpus=not (self.device or "").startswith("cpu"),
            local_rank=launch.local_rank if launch.world_size > 1 else None,
        )
        report.add(*devices(launch))
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
                    self._check(group, "links", links(group, report.facts))
                else:
                    seen = "a single process: nothing was checked that needs several ranks"
                    report.add(Finding("joined", NOTE, seen))
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
        meet(group, timeout_s=self.join_timeout_s)
        self.report.facts["hosts"] = list(group.hosts)
        places = "; ".join(f"{ranges(ranks)} on {host}" for host, ranks in holders(enumerate(group.hosts)).items())
        yield Finding("joined", OK, f"all {group.world_size} ranks: {places}")
        interface = os.environ.get("GLOO_SOCKET_IFNAME") or "by host name"
        yield Finding("connectivity", OK, f"each rank reaches the next over high ports ({interface})")
        self.stage = "group"
        form(group, timeout_s=self.join_timeout_s, longest_phase_s=self.longest_phase_s)
        yield Finding("group", OK, f"the process group is formed ({dist.get_backend()})")
        self.stage = "versions"
        check_settings(group)
        yield Finding("versions", OK, f"torch {torch.__version__}, program and settings are the same on all")
        self.stage = "devices"
        check_devices(group)

    def _check(self, group: Group, stage: str, findings: Iterable[Finding]) -> None:
        self.stage = stage
        group.watch.enter(stage, min(STAGE_S, self.stage_timeout_s) + STAGE_S_PER_RANK * group.world_size)
        self.report.add(*findings)  # a generator: the check runs here

    def _leave(self, code: int, why: str, suspect: Suspect | None) -> int:
        """A training would end here with `code`: a deadline has passed, or a peer is lost."""
        gone = suspect is not None and not suspect.alive
        self.report.add(problem("died" if gone else "hung", of=self.stage, why=why))
        return self.report.end()


# What the ranks look at -----------------------------------------------------------------------------------------------
# Each function that takes a group is collective: every rank calls it. Most findings are rank 0's


def devices(launch: RankEnv) -> Iterator[Finding]:
    """This process's own devices: how many, and for how many processes. Needs no group."""
    if not torch.cuda.is_available():
        yield Finding("devices", OK, f"CPU: {os.cpu_count()} of {cpu_model()}, no CUDA device")
        return
    count, local = torch.cuda.device_count(), launch.local_world_size or 1
    yield Finding("devices", OK, f"{count} CUDA devices, {torch.cuda.get_device_name(0)}, CUDA {torch.version.cuda}")
    if count < local:
        yield problem("few-devices", local=local, count=count)


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
        "nccl": ".".join(map(str, nccl)), "Python": platform.python_version(), "GPU driver": driver_version(),
        "CPU": cpu_model(), "GPU": torch.cuda.get_device_name(group.device) if on_gpu else "",
    })
    for name in gathered[0] if group.rank == 0 else ():
        found = holders((rank, each[name]) for rank, each in enumerate(gathered))
        seen = f"{name} differs: " + ", ".join(f"{value or 'none'} on {ranges(who)}" for value, who in found.items())
        if len(found) > 1 and name in ("CPU", "GPU"):
            yield Finding("versions", NOTE, f"{seen}; weights are the same to the bit on one kind of {name} only")
        elif len(found) > 1:
            yield problem("differs", seen=seen)


def driver_version(root: Path = Path("/")) -> str:
    """The version of NVIDIA's kernel driver, such as 570.124.06, also in a container; "" where there is none."""
    found = re.search(r"\b\d{3,}\.\d+(?:\.\d+)?\b", read(root / "proc/driver/nvidia/version"))
    return found[0] if found else ""


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


def links(group: Group, facts: dict[str, Any]) -> Iterator[Finding]:
    """Latency and bandwidth from each rank to the next, and the slowest link of each kind. All go to rank 0's `facts`:
    two ranks, s of one way, bytes/s as the mean of both directions, and whether the link is between nodes."""
    own = []
    for links in rounds(group.hosts):
        for low in links:
            if group.rank in (low, low + 1):
                own += measure(low, group)
        group.barrier()
    found = [link for part in group.gather(own) for link in part]
    if group.rank == 0:
        facts["links"] = found
        for between, words in ((True, "between nodes"), (False, "inside a node")):
            if kind := [link for link in found if link["between_nodes"] is between]:
                yield judge(kind, words, group.hosts)


def rounds(hosts: Sequence[str]) -> list[list[int]]:
    """The links of each rank to the next one, by the lower rank, in the order in which all ranks measure them.

    In a round no rank has two links, and where the ranks of a node follow each other no node has two between nodes.
    """
    links = range(len(hosts) - 1)
    kinds = [[low for low in links if (hosts[low] == hosts[low + 1]) is inside] for inside in (False, True)]
    return [kind[first::2] for kind in kinds for first in (0, 1)]


def measure(low: int, group: Group) -> list[dict[str, Any]]:
    """The link from the rank `low` to the next. Both call this, and the lower one has the result.

    The fastest of several round trips counts: what else uses the machine only makes one slower. No clock of two
    machines is exact enough to time one way alone.
    """
    first, other, best_s = group.rank == low, 2 * low + 1 - group.rank, []
    for size, count in ((PING_BYTES, PINGS), (BULK_BYTES, BULKS)):
        message = torch.zeros(size, dtype=torch.uint8, device=group.device)
        best_s.append(min(round_trip_s(message, other, first=first) for _ in range(count)))
    ping_s, bulk_s = best_s
    return [{
        "ranks": [low, other], "between_nodes": group.hosts[low] != group.hosts[other],
        "latency_s": ping_s / 2, "bandwidth": 2 * BULK_BYTES / max(bulk_s - ping_s, 1e-9),
    }] if first else []


def round_trip_s(message: torch.Tensor, other: int, *, first: bool) -> float:
    """Seconds for `message` to the rank `other` and back; the one that is not `first` echoes it."""
    began_s = time.perf_counter()
    for call in (dist.send, dist.recv) if first else (dist.recv, dist.send):
        call(message, other)
    if message.device.type != "cpu":  # calls only queue work there, and return at once
        torch.accelerator.synchronize(message.device)
    return time.perf_counter() - began_s


def judge(kind: Sequence[dict[str, Any]], words: str, hosts: Sequence[str]) -> Finding:
    """What to say of links of one kind: a warning if one is below SLOWEST_LINK, or far below the others and slow."""
    slowest = min(kind, key=lambda link: link["bandwidth"])
    bandwidth, (low, high) = slowest["bandwidth"], slowest["ranks"]
    median = statistics.median(link["bandwidth"] for link in kind)
    seen = (
        f"{len(kind)} {words}: slowest {_rate(bandwidth)}, ranks {low} on {hosts[low]} and {high} on {hosts[high]}; "
        f"median {_rate(median)}; longest latency {max(link['latency_s'] for link in kind) * 1e6:.0f} us"
    )
    # Beside a link inside one chip any cable looks slow
    if bandwidth >= max(SLOWEST_LINK, min(median / APART, 10 * SLOWEST_LINK)):
        return Finding("links", OK, seen)
    return problem("slow-link", seen=seen, ring_s=200e6 / bandwidth)


def _rate(bandwidth: float) -> str:
    """`bandwidth` in bytes/s."""
    return f"{bandwidth / 1e6:.0f} MB/s" if bandwidth < 1e9 else f"{bandwidth / 1e9:.1f} GB/s"
