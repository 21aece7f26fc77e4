"""Which network nccl will take between nodes on this machine, what keeps it from a better one, and what to set.

nccl says nothing of itself where it falls back to TCP sockets: the job runs, only many times slower. What it looks for
is in NCCL's documentation of its environment variables; on EFA it is aws-ofi-nccl, a library beside NCCL.
"""

import ctypes
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from train.commands.doctor import fabric
from train.commands.doctor.fabric import EFA, INFINIBAND, ROCE, Interface, Port
from train.process.findings import NOTE, OK, UNFIT, WARNING, Finding
from train.process.limits import read

STAGE = "network"
VERBS = "libibverbs.so.1"
SLOW = "nccl takes TCP sockets between nodes without a word, many times slower."
MAX_NAMED = 8


def load_library(name: str) -> str:
    """Load a library as nccl will. Returns "" or the reason why that fails."""
    try:
        ctypes.CDLL(name)
    except OSError as error:
        return str(error)
    return ""


def network(
    *, uses_nccl: bool, root: Path = Path("/"), environ: Mapping[str, str] = os.environ,
    load: Callable[[str], str] = load_library,
) -> Iterator[Finding]:
    """What is there, then what is missing. Where nccl is not used, one line: nothing else of it matters.

    `root`, `environ` and `load` are for tests.
    """
    ports, wires = fabric.rdma_ports(root), fabric.interfaces(root)
    if not uses_nccl:
        unused = f"; {_count(ports)}, unused" if ports else ""
        yield Finding(STAGE, OK, f"{_wires(wires)}{unused}; gloo takes TCP sockets")
        return
    problems = [*_without_driver(root), *_sockets(environ, root)]
    own = [port for port in ports if port.active and port.may_open]
    if ports:
        problems += [*_devices(ports), *_switched_off(environ)]
    if _has(own, EFA):
        problems += _plugin(environ, load)
    if _has(own, INFINIBAND, ROCE):
        problems += _verbs([port for port in own if port.kind != EFA], environ, load, root)
    told = [_wires(wires), *([_count(ports)] if ports else [])]
    if not any(finding.level == WARNING for finding in problems):
        taken = [kind for kind in (EFA, INFINIBAND, ROCE) if _has(own, kind)]
        told.append(f"nccl takes {taken[0] if taken else 'TCP sockets'} between nodes")
    yield Finding(STAGE, OK, "; ".join(told))
    yield from problems


def _devices(ports: list[Port]) -> Iterator[Finding]:
    """Ports that are down, and devices that this process may not open."""
    active = [port for port in ports if port.active]
    if not active:
        states = ", ".join(f"{port.device} {port.state}" for port in ports[:MAX_NAMED])
        yield Finding(
            STAGE, WARNING, f"no port of {_count(ports)} is active: {states}", SLOW,
            "Look at cables and switch (ibstat), and on InfiniBand for a subnet manager: INIT is a port without one.",
        )
    elif len(active) < len(ports):
        yield Finding(STAGE, NOTE, f"not active, so nccl leaves them out: {_names(p for p in ports if not p.active)}")
    closed = [port for port in active if not port.may_open]
    if closed and len(closed) == len(active):
        yield Finding(
            STAGE, WARNING, f"{_count(closed)} of this machine may not be opened here ({_names(closed)})", SLOW,
            "Give the container its devices: rdma/... or vpc.amazonaws.com/efa in resources.limits, or devices: "
            "[/dev/infiniband] in compose; on the machine itself the user needs /dev/infiniband/uverbs*.",
        )
    elif closed:
        yield Finding(STAGE, NOTE, f"not given to this container: {_names(closed)}")


def _switched_off(environ: Mapping[str, str]) -> Iterator[Finding]:
    for name, off in (("NCCL_IB_DISABLE", "1"), ("NCCL_NET", "socket")):
        if environ.get(name, "").lower() == off:
            yield Finding(
                STAGE, WARNING, f"{name}={environ[name]} has nccl take TCP sockets, though there is something better",
                "they are many times slower.", f"Unset {name}.",
            )


def _sockets(environ: Mapping[str, str], root: Path) -> Iterator[Finding]:
    """The interface by which nccl's ranks find each other, on every kind of network."""
    wanted = environ.get("NCCL_SOCKET_IFNAME", "")
    folder = root / "sys/class/net"
    there = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    if wanted and there and not any(_matches(wanted, name) for name in there):
        yield Finding(
            STAGE, UNFIT, f"NCCL_SOCKET_IFNAME={wanted} names no interface here. There are: {', '.join(there)}",
            "nccl needs one on every kind of network, for the ranks to find each other.",
            "Unset it: the one that routes to the master is taken.",
        )


def _without_driver(root: Path) -> Iterator[Finding]:
    if count := fabric.efa_without_driver(root):
        yield Finding(
            STAGE, WARNING, f"{count} EFA device{'' if count == 1 else 's'} without a driver", SLOW,
            "Install the EFA driver on the machine (Amazon's EFA installer), or take an image that has it.",
        )


def _plugin(environ: Mapping[str, str], load: Callable[[str], str]) -> Iterator[Finding]:
    """What nccl needs for EFA."""
    named = environ.get("NCCL_NET_PLUGIN", "")
    names = [f"libnccl-net-{named}.so", named] if named else ["libnccl-net.so"]
    reasons = [load(name) for name in names] if named != "none" else ["NCCL_NET_PLUGIN=none"]
    if all(reasons):
        yield Finding(
            STAGE, WARNING, f"nccl's plugin for EFA can't be loaded: {reasons[0]}", SLOW,
            "Put libfabric and aws-ofi-nccl into the image (Amazon's EFA installer has both), and their folders into "
            "LD_LIBRARY_PATH.",
        )
    provider = environ.get("FI_PROVIDER", "efa")
    if "efa" not in provider.split(","):
        yield Finding(
            STAGE, WARNING, f"FI_PROVIDER={provider} keeps libfabric from EFA", SLOW, "Unset it: EFA is found anyway.",
        )


def _verbs(
    ports: list[Port], environ: Mapping[str, str], load: Callable[[str], str], root: Path
) -> Iterator[Finding]:
    """What nccl needs for InfiniBand and RoCE. `ports`: those that are active and may be opened."""
    if why := load(VERBS):
        yield Finding(
            STAGE, WARNING, f"nccl needs {VERBS} for {_count(ports)}: {why}", SLOW,
            "Put it and the devices' own library into the image: apt-get install libibverbs1 ibverbs-providers.",
        )
    wanted = environ.get("NCCL_IB_HCA", "")
    chosen = [port for port in ports if not wanted or _matches(wanted, port.device, port.number)]
    if not chosen:
        yield Finding(
            STAGE, WARNING, f"NCCL_IB_HCA={wanted} names no active device. There are: {_names(ports)}", SLOW,
            "Unset it, or name these.",
        )
    roce = [port for port in chosen if port.kind == ROCE]
    index = environ.get("NCCL_IB_GID_INDEX", "-1")
    fixed = index.isdigit()  # -1, the default: any
    without = [port for port in roce
               if "RoCE v2" not in ([port.gids.get(int(index))] if fixed else port.gids.values())]
    if without:
        which = f"at NCCL_IB_GID_INDEX={index}" if fixed else "at any index"
        yield Finding(
            STAGE, WARNING, f"{_names(without)}: no address of RoCE v2 {which}",
            "version 1 does not cross routers, and without an address nothing connects: ibv_modify_qp fails.",
            "Give its interface an IP address. Unset NCCL_IB_GID_INDEX: nccl finds the index itself since 2.21.",
        )
    if roce and len(roce) < len(chosen):
        best = ",".join(port.device for port in chosen if port.kind == INFINIBAND)
        yield Finding(STAGE, NOTE, f"InfiniBand and RoCE: if nccl fails to connect, set NCCL_IB_HCA=={best}")
    elif len({port.gbit for port in chosen}) > 1:
        top = max(port.gbit for port in chosen)
        best = ",".join(port.device for port in chosen if port.gbit == top)
        yield Finding(STAGE, NOTE, f"ports of unequal speed: for the fastest alone set NCCL_IB_HCA=={best}")
    by_dma_buf = "Open Kernel Module" in read(root / "proc/driver/nvidia/version")
    if chosen and not by_dma_buf and not (root / "sys/module/nvidia_peermem").exists():
        yield Finding(
            STAGE, NOTE, "GPUs and network exchange through the CPU's memory: that they do so directly needs NVIDIA's "
            "open driver (DMA-BUF, Linux 5.12) or the module nvidia_peermem; NCCL_DEBUG=INFO then says GDRDMA",
        )


def _matches(wanted: str, name: str, number: int | None = None) -> bool:
    """nccl's own rule for NCCL_SOCKET_IFNAME and NCCL_IB_HCA: prefixes, = for whole names, ^ for all others."""
    excludes, exact = wanted.startswith("^"), wanted.lstrip("^").startswith("=")
    for part in wanted.lstrip("^=").split(","):
        device, _, port = part.partition(":")
        same = name == device if exact else name.startswith(device)
        if same and (not port or port == str(number)):
            return not excludes
    return excludes


def _has(ports: list[Port], *kinds: str) -> bool:
    return any(port.kind in kinds for port in ports)


def _count(ports: list[Port]) -> str:
    """Such as "8 InfiniBand ports at 400 Gbit/s"."""
    groups: dict[tuple[str, float], int] = {}
    for port in ports:
        groups[port.kind, port.gbit] = groups.get((port.kind, port.gbit), 0) + 1
    return " and ".join(
        f"{count} {kind} port{'' if count == 1 else 's'}{f' at {gbit:g} Gbit/s' if gbit else ''}"
        for (kind, gbit), count in groups.items()
    )


def _names(ports: Iterator[Port] | list[Port]) -> str:
    names = [port.device for port in ports]
    return ", ".join(names[:MAX_NAMED]) + (", ..." if len(names) > MAX_NAMED else "")


def _wires(wires: list[Interface]) -> str:
    """Such as "eth0 25 Gbit/s"."""
    told = [f"{wire.name} {wire.gbit:g} Gbit/s" if wire.gbit else wire.name for wire in wires[:MAX_NAMED]]
    return ", ".join(told) or "no Ethernet"
