"""What all ranks find out together, once there is a group: versions, right sums, the speed of links and ranks, clocks.

Each function that takes a group is collective: every rank calls it. Most findings are rank 0's.
"""

import contextlib
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from rankup.agent.logs import host_name
from rankup.env.rank_env import RankEnv, ranges
from train.commands.doctor import gpu_health, link_speed
from train.commands.doctor.link_speed import LinkSpeed
from train.commands.machine import cpu_model
from train.group.group import Group
from train.process.findings import NOTE, OK, UNFIT, WARNING, Finding
from train.process.limits import read

SLOWEST_LINK = 12.5e6  # bytes/s: 100 Mbit/s. The gradients of a ResNet-50, 102 MB, take 16 s a step over it
APART = 5.0  # times slower than the median of its kind
SLOW_RANK = 3.0  # times the median's time
LATE_LINK_S = 0.02
MAX_CLOCK_SKEW_S = 2.0
MAX_TAKEN = 0.1  # of a GPU's memory, by other processes
MAX_NAMED = 4  # links in one report: with one bad switch there would be hundreds
CLOCK_TRIES = 5


def devices(launch: RankEnv) -> Iterator[Finding]:
    """This process's own devices: how many, for how many processes, and whether others use them. Needs no group."""
    if not torch.cuda.is_available():
        cpu = platform.processor() or platform.machine()
        yield Finding("devices", OK, f"CPU: {os.cpu_count()} of {cpu}, no CUDA device")
        return
    count, local = torch.cuda.device_count(), launch.local_world_size or 1
    yield Finding("devices", OK, f"{count} CUDA devices, {torch.cuda.get_device_name(0)}, CUDA {torch.version.cuda}")
    if count < local:
        yield Finding(
            "devices", UNFIT, f"{local} processes on this node, but {count} CUDA devices are visible",
            "two processes on one device fail under nccl.", f"Start {count}, or look at CUDA_VISIBLE_DEVICES.",
        )
        return
    index = launch.local_rank if count > 1 else 0
    free, total = torch.cuda.mem_get_info(index)
    if free < (1 - MAX_TAKEN) * total:
        taken = f"{(total - free) / 2**30:.1f} of {total / 2**30:.1f} GiB"
        yield Finding(
            "devices", WARNING, f"device {index}: {taken} are taken already",
            "training may run out of memory, and shares the device.", "nvidia-smi shows which process has them.",
        )


def versions(group: Group) -> Iterator[Finding]:
    """Versions that joining does not compare: nccl, CUDA, Python, the GPU's driver, the kinds of CPU and GPU."""
    nccl = torch.cuda.nccl.version() if torch.cuda.is_available() else ()  # type: ignore[no-untyped-call]
    same_torch = "Install the same torch on all nodes."
    unreadable = "workers and checkpoints may differ in what they can read."
    gpu = torch.cuda.get_device_name(group.device) if group.device.type == "cuda" else ""
    compared = {
        "nccl": (".".join(map(str, nccl)), UNFIT, "nccl of two versions fails or hangs when it connects.", same_torch),
        "CUDA": (torch.version.cuda or "", UNFIT, "torch was built for two versions of CUDA.", same_torch),
        "Python": (platform.python_version(), WARNING, unreadable, "Install the same Python."),
        "GPU driver": (
            gpu_health.driver_version(), WARNING, "what works on one node may fail on another, mostly after an update.",
            "Install the same driver on all nodes, and restart those that were updated.",
        ),
        "CPU": (cpu_model(), NOTE, "", ""),
        "GPU": (gpu, NOTE, "", ""),
    }
    gathered = group.gather({name: own for name, (own, *_) in compared.items()})
    for name, (_, level, why, remedy) in compared.items():
        holders: dict[str, list[int]] = {}
        for rank, versions_there in enumerate(gathered):
            holders.setdefault(versions_there[name], []).append(rank)
        if len(holders) > 1 and group.is_rank0:
            seen = ", ".join(f"{value or 'none'} on {ranges(who)}" for value, who in holders.items())
            weights = f"; weights are the same to the bit on one kind of {name} only" if name in ("CPU", "GPU") else ""
            yield Finding("versions", level, f"{name} differs: {seen}{weights}", why, remedy)


def collective(group: Group) -> Iterator[Finding]:
    """Whether each collective that training uses gives the right numbers."""
    wrong = link_speed.check_collectives(group)
    if wrong:
        yield Finding(
            "collective", UNFIT, f"wrong result: {', '.join(wrong)}",
            "gradients would be wrong, and nothing would say so.",
            f"Look for a bad device or cable on {host_name()}. If it is right with NCCL_P2P_DISABLE=1, the "
            "connection between the GPUs is bad.",
        )
    elif group.is_rank0:
        yield Finding("collective", OK, "all_reduce, broadcast and all_gather give the right numbers")


def links(group: Group, facts: dict[str, Any], after_round: Callable[[], None]) -> Iterator[Finding]:
    """Latency and bandwidth of the links. Writes all of them to `facts` on rank 0."""
    own = link_speed.measure_links(group.rank, group.hosts, group.device, after_round=after_round)
    gathered = group.gather([asdict(link) for link in own])
    if not group.is_rank0:
        return
    found = [LinkSpeed(**{**link, "ranks": tuple(link["ranks"])}) for part in gathered for link in part]
    facts["links"] = [asdict(link) for link in found]
    medians = {}
    for between_nodes, words in ((True, "between nodes"), (False, "inside a node")):
        kind = [link for link in found if link.between_nodes is between_nodes]
        if not kind:
            continue
        medians[between_nodes] = statistics.median(link.bandwidth for link in kind)
        slowest, latest = min(kind, key=lambda link: link.bandwidth), max(kind, key=lambda link: link.latency_s)
        yield Finding(
            "links", OK, f"{words}: slowest {_place(slowest, group)} {_rate(slowest.bandwidth)}; longest latency "
            f"{_place(latest, group)} {latest.latency_s * 1e6:.0f} us; {len(kind)} measured",
        )
    for link in link_speed.slow_links(found, least=SLOWEST_LINK, apart=APART)[:MAX_NAMED]:
        median = _rate(medians[link.between_nodes])
        yield Finding(
            "links", WARNING, f"{_place(link, group)}: {_rate(link.bandwidth)} (median {median})",
            f"every step waits for it: 100 MB of gradients take {200e6 / link.bandwidth:.1f} s in a ring of two.",
            "Look at its cable, its port on the switch and its interface (ethtool, ip -s link); or use --compress bf16 "
            "and a larger --batch-size.",
        )
    for link in [each for each in found if each.latency_s > LATE_LINK_S][:MAX_NAMED]:
        yield Finding(
            "links", WARNING, f"{_place(link, group)}: {link.latency_s * 1e3:.1f} ms one way",
            "each collective waits for it several times.",
            "Put the nodes closer together, or use a larger --batch-size.",
        )


def ranks(group: Group, facts: dict[str, Any]) -> Iterator[Finding]:
    """How long the same piece of work takes on each rank. Writes the seconds to `facts` on rank 0."""
    times = group.gather(link_speed.compute_s(group.device))
    if not group.is_rank0:
        return
    slowest = max(range(len(times)), key=times.__getitem__)
    ratio = times[slowest] / statistics.median(times)
    facts["compute_s"] = times
    place = f"rank {slowest} on {group.hosts[slowest]}"
    yield Finding("ranks", OK, f"slowest: {place}, {ratio:.2f} of the median's time for the same work")
    if ratio > SLOW_RANK:
        yield Finding(
            "ranks", WARNING, f"{place} takes {ratio:.1f} times as long as the median for the same work",
            "all ranks wait for the slowest at every step.",
            "Look at its clock, its cooling and its kind of CPU (lscpu).",
        )


def clocks(group: Group) -> Iterator[Finding]:
    """How far each rank's clock is from rank 0's."""
    # All leave a barrier at about the same time, so their clocks should agree then. A rank that waits for a CPU leaves
    # late: the smallest difference of several tries is nearest to the clocks' own.
    skews = [float("inf")] * group.world_size
    for _ in range(CLOCK_TRIES):
        group.barrier()
        times = group.gather(time.time())
        skews = [min(skew, now - times[0], key=abs) for skew, now in zip(skews, times, strict=True)]
    if not group.is_rank0:
        return
    worst = max(range(len(skews)), key=lambda rank: abs(skews[rank]))
    if abs(skews[worst]) <= MAX_CLOCK_SKEW_S:
        yield Finding("clocks", OK, f"at most {abs(skews[worst]):.1f} s apart")
        return
    yield Finding(
        "clocks", WARNING, f"rank {worst} on {group.hosts[worst]} is {skews[worst]:+.1f} s from rank 0",
        "logs of several nodes can't be read side by side, and certificates and tokens look expired.",
        "Have both machines' clocks set over the network (timedatectl set-ntp true).",
    )


def shared_disk(group: Group, run_dir: Path) -> Iterator[Finding]:
    """Whether all ranks see the run's directory of rank 0."""
    path = run_dir / "doctor" / "seen"
    if group.is_rank0:
        # A disk that can't be written has its own finding already; the others wait below in any case
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(group.attempt)
    group.barrier()
    blind = [rank for rank, text in enumerate(group.gather(read(path))) if text != group.attempt]
    group.barrier()  # all have read it
    if group.is_rank0 and 0 not in blind:
        path.unlink()
        if blind:
            yield Finding(
                "storage", NOTE, f"{run_dir} of rank 0 is not seen by rank {ranges(blind)}: rank 0 alone reads and "
                "writes checkpoints, which is enough for all but sharded ones",
            )
        else:
            yield Finding("storage", OK, f"all ranks see the same {run_dir}")


def _place(link: LinkSpeed, group: Group) -> str:
    low, high = link.ranks
    return f"ranks {low} on {group.hosts[low]} and {high} on {group.hosts[high]}"


def _rate(bandwidth: float) -> str:
    """`bandwidth` in bytes/s."""
    return f"{bandwidth / 1e6:.0f} MB/s" if bandwidth < 1e9 else f"{bandwidth / 1e9:.1f} GB/s"
