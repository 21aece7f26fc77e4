"""What networks this machine has, as the kernel tells it in /sys: InfiniBand, RoCE, EFA, Ethernet. No torch here.

`root` replaces the file system's root, for tests. Inside a container /sys shows the machine's devices, also those that
the container was not given: only /dev/infiniband says which it was.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from train.process.limits import read

EFA, INFINIBAND, ROCE = "EFA", "InfiniBand", "RoCE"
AMAZON = "0x1d0f"  # the vendor of the PCI device; its EFA devices are 0xefa0, 0xefa1, ...
ETHERNET = "1"  # the kernel's type of an interface; IP over InfiniBand is 32
OF_CONTAINERS = ("docker", "veth", "br-", "virbr", "cni", "flannel", "cali", "cilium", "tunl", "ifb")


@dataclass(frozen=True, slots=True)
class Port:
    """A port of an RDMA device. `gids`: its addresses of RoCE, by index: the type, such as "RoCE v2"."""

    device: str
    number: int
    kind: str
    state: str  # ACTIVE, DOWN, INIT, ...
    gbit: float
    may_open: bool  # this process may open the device: it was given to the container
    gids: dict[int, str]

    @property
    def active(self) -> bool:
        return self.state == "ACTIVE"


@dataclass(frozen=True, slots=True)
class Interface:
    """A network interface that is up. `gbit` is None where the driver does not say."""

    name: str
    gbit: float | None


def rdma_ports(root: Path = Path("/")) -> list[Port]:
    """All ports of all RDMA devices, also those that are down."""
    return [port for device in _sorted(root / "sys/class/infiniband") for port in _ports_of(device, root)]


def interfaces(root: Path = Path("/")) -> list[Interface]:
    """Ethernet interfaces that are up: hardware's, or where there is none (in a container) all but a bridge's."""
    found = []
    for folder in _sorted(root / "sys/class/net"):
        up = read(folder / "operstate").strip() in ("up", "unknown")
        if up and read(folder / "type").strip() == ETHERNET and not folder.name.startswith(OF_CONTAINERS):
            speed = read(folder / "speed").strip()  # Mbit/s; -1 or unreadable where nobody knows
            gbit = int(speed) / 1000 if speed.isdigit() and int(speed) > 0 else None
            found.append((Interface(folder.name, gbit), (folder / "device").exists()))
    hardware = [interface for interface, is_hardware in found if is_hardware]
    return hardware or [interface for interface, _ in found]


def efa_without_driver(root: Path = Path("/")) -> int:
    """How many EFA devices are on the PCI bus that no driver has taken."""
    return sum(
        read(folder / "vendor").strip() == AMAZON and read(folder / "device").startswith("0xefa")
        and not (folder / "driver").exists()
        for folder in _sorted(root / "sys/bus/pci/devices")
    )


def _ports_of(device: Path, root: Path) -> Iterator[Port]:
    driver = (device / "device/driver").resolve().name
    nodes = [folder.name for folder in _sorted(root / "sys/class/infiniband_verbs")
             if read(folder / "ibdev").strip() == device.name]
    may_open = any(os.access(root / "dev/infiniband" / node, os.R_OK | os.W_OK) for node in nodes)
    for folder in _sorted(device / "ports"):
        if driver == "efa" or read(device / "device/vendor").strip() == AMAZON:
            kind = EFA
        else:
            kind = INFINIBAND if read(folder / "link_layer").strip() == "InfiniBand" else ROCE
        rate = re.match(r"[\d.]+", read(folder / "rate"))  # 400 Gb/sec (4X NDR)
        # The kernel has a file for each index, and refuses to read those without an address
        types = {int(file.name): read(file).strip() for file in _sorted(folder / "gid_attrs/types")}
        yield Port(
            device.name, int(folder.name), kind, read(folder / "state").partition(":")[2].strip() or "unknown",
            float(rate[0]) if rate else 0.0, may_open, {index: kind for index, kind in types.items() if kind},
        )


def _sorted(folder: Path) -> list[Path]:
    """The entries of a folder, mlx5_2 before mlx5_10; none where it is missing."""
    entries = folder.iterdir() if folder.is_dir() else []
    return sorted(entries, key=lambda path: [int(part) if part.isdigit() else part for part in
                                             re.split(r"(\d+)", path.name)])
