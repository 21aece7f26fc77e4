"""What all ranks find out together, once there is a group: the same versions, right sums, how fast the wire is, whose clock is
wrong. Each function that takes a group is collective: every rank calls it, and most findings are rank 0's."""

import contextlib
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from train.commands.doctor import link_speed
from train.group.group import Group
from train.group.members import ranges
from train.process.env import Launch
from train.process.findings import NOTE, OK, UNFIT, WARNING, Finding
from train.process.limits import read

SLOWEST_LINK = 12.5e6  # bytes/s: 100 Mbit/s. The gradients of a ResNet-50, 102 MB, take 16 s a step over it
APART = 5.0  # times slower than the others of its kind
SLOW_RANK = 3.0
LATE_LINK_S = 0.02
CLOCKS_S = 2.0
TAKEN = 0.1  # of a GPU's memory, by others


def devices(launch: Launch) -> Iterator[Finding]:
    """This process's own, alone: how many, for how many processes, and who else is on them."""
    if not torch.cuda.is_available():
        yield Finding("devices", OK, f"CPU: {os.cpu_count()} of {platform.processor() or platform.machine()}, no CUDA device")
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
    if free < (1 - TAKEN) * total:
        yield Finding(
            "devices", WARNING, f"device {index}: {(total - free) / 2**30:.1f} of {total / 2**30:.1f} GiB are taken already",
            "training may run out of memory, and shares the device.", "nvidia-smi shows by whom.",
        )


def versions(group: Group) -> Iterable[Finding]:
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else ""  # type: ignore[no-untyped-call]
    own = {"nccl": nccl, "Python": platform.python_version(), "CPU": _cpu_model(), "CUDA": torch.version.cuda or ""}
    all_ = group.gather(own)
    levels = {
        "nccl": (UNFIT, "nccl of two versions fails or hangs when it connects.", "Install the same torch on all nodes."),
        "CUDA": (UNFIT, "torch built for two versions of CUDA.", "Install the same torch on all nodes."),
        "Python": (WARNING, "workers and checkpoints may differ in what they can read.", "Install the same Python."),
        "CPU": (NOTE, "", ""),
    }
    for name, (level, why, remedy) in levels.items():
        holders: dict[str, list[int]] = {}
        for rank, told in enumerate(all_):
            holders.setdefault(told[name], []).append(rank)
        if len(holders) > 1 and group.is_rank0:
            seen = ", ".join(f"{value or 'none'} on {ranges(who)}" for value, who in holders.items())
            weights = "; the same weights to the bit are promised for one kind of CPU" if name == "CPU" else ""
            yield Finding("versions", level, f"{name} differs: {seen}{weights}", why, remedy)


def collective(group: Group) -> Iterable[Finding]:
    wrong = link_speed.check_collectives(group.rank, group.world_size, group.device)
    if wrong:
        yield Finding(
            "collective", UNFIT, f"wrong result: {', '.join(wrong)}", "gradients would be wrong, without a word.",
            f"Look for a bad device or cable on {group.log.host}; NCCL_P2P_DISABLE=1 tells whether it is the GPUs' way.",
        )
    elif group.is_rank0:
        yield Finding("collective", OK, "all_reduce, broadcast and all_gather give the right numbers")


def wire(group: Group, facts: dict[str, Any], again: Callable[[], None]) -> Iterable[Finding]:
    own = link_speed.measure_links(group.rank, group.hosts, group.device, after_round=again)
    gathered = group.gather([asdict(link) for link in own])
    found = [link_speed.LinkSpeed(**{**told, "ranks": tuple(told["ranks"])}) for part in gathered for told in part]
    if not group.is_rank0:
        return
    facts["links"] = [asdict(link) for link in found]
    for kind, word in ((True, "between nodes"), (False, "inside a node")):
        some = [link for link in found if link.between_nodes is kind]
        if some:
            slowest, latest = min(some, key=lambda k: k.bandwidth), max(some, key=lambda k: k.latency_s)
            yield Finding(
                "links", OK, f"{word}: slowest {_place(slowest, group)} {_rate(slowest.bandwidth)}; latest "
                f"{_place(latest, group)} {latest.latency_s * 1e6:.0f} us; {len(some)} measured",
            )
    for link in link_speed.slow_links(found, least=SLOWEST_LINK, apart=APART)[:4]:
        others = statistics.median(k.bandwidth for k in found if k.between_nodes is link.between_nodes)
        yield Finding(
            "links", WARNING, f"{_place(link, group)}: {_rate(link.bandwidth)} (median {_rate(others)})",
            f"every step waits for it: 100 MB of gradients take {200e6 / link.bandwidth:.1f} s in a ring of two.",
            "Look at its cable, its port on the switch and its interface (ethtool, ip -s link); or use --compress bf16 and a "
            "larger --batch-size.",
        )
    for link in [k for k in found if k.latency_s > LATE_LINK_S][:4]:
        yield Finding(
            "links", WARNING, f"{_place(link, group)}: {link.latency_s * 1e3:.1f} ms one way",
            "each collective takes it several times.", "Put the nodes closer together, or use a larger --batch-size.",
        )


def ranks(group: Group, facts: dict[str, Any]) -> Iterable[Finding]:
    times = group.gather(link_speed.compute_s(group.device))
    if not group.is_rank0:
        return
    median = statistics.median(times)
    slowest = max(range(len(times)), key=times.__getitem__)
    ratio = times[slowest] / median
    facts["compute_s"] = times
    place = f"rank {slowest} on {group.hosts[slowest]}"
    yield Finding("ranks", OK, f"slowest: {place}, {ratio:.2f} of the median's time for the same work")
    if ratio > SLOW_RANK:
        yield Finding(
            "ranks", WARNING, f"{place} takes {ratio:.1f} times as long as the median for the same work",
            "all ranks wait for the slowest at every step.", "Look at its clock, its cooling and its kind of CPU (lscpu).",
        )


def clocks(group: Group) -> Iterable[Finding]:
    least = [float("inf")] * group.world_size
    for _ in range(5):
        group.barrier()  # all leave it at about the same time
        told = group.gather(time.time())
        least = [min(old, now - told[0], key=abs) for old, now in zip(least, told, strict=True)]
    if not group.is_rank0:
        return
    worst = max(range(len(least)), key=lambda r: abs(least[r]))
    if abs(least[worst]) <= CLOCKS_S:
        yield Finding("clocks", OK, f"at most {abs(least[worst]):.1f} s apart")
        return
    yield Finding(
        "clocks", WARNING, f"rank {worst} on {group.hosts[worst]} is {least[worst]:+.1f} s from rank 0",
        "logs of several nodes can't be read side by side, and certificates and tokens look expired.",
        "Have both machines' clocks set over the network (timedatectl set-ntp true).",
    )


def shared_disk(group: Group, run_dir: Path) -> Iterable[Finding]:
    path = run_dir / "doctor" / "seen"
    if group.is_rank0:
        with contextlib.suppress(OSError):  # the stage of this disk has said so; the others wait below all the same
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(group.attempt)
    group.barrier()
    blind = [r for r, text in enumerate(group.gather(read(path))) if text != group.attempt]
    group.barrier()
    if group.is_rank0 and 0 not in blind:
        path.unlink()
        if blind:
            yield Finding(
                "storage", NOTE, f"{run_dir} of rank 0 is not seen by rank {ranges(blind)}: rank 0 alone reads and "
                "writes checkpoints, which serves all but sharded ones",
            )
        else:
            yield Finding("storage", OK, f"all ranks see the same {run_dir}")


def _place(link: link_speed.LinkSpeed, group: Group) -> str:
    low, high = link.ranks
    return f"ranks {low} on {group.hosts[low]} and {high} on {group.hosts[high]}"


def _rate(bandwidth: float) -> str:
    return f"{bandwidth / 1e6:.0f} MB/s" if bandwidth < 1e9 else f"{bandwidth / 1e9:.1f} GB/s"


def _cpu_model() -> str:
    for text in read(Path("/proc/cpuinfo")).splitlines():
        if text.startswith("model name"):
            return text.partition(":")[2].strip()
    return platform.processor() or platform.machine()
