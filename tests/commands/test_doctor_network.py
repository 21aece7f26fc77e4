"""The networks of a machine as the doctor tells them, from trees of /sys as real machines have them."""

from pathlib import Path

import pytest

from train.commands.doctor import fabric, network
from train.commands.doctor.fabric import Interface
from train.commands.doctor.network import _matches, load_library
from train.process.findings import NOTE, OK, UNFIT, WARNING, Finding


class Machine:
    """A tree of /sys and /dev below a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def link(self, path: str, target: str) -> None:
        (self.root / target).mkdir(parents=True, exist_ok=True)
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).symlink_to(self.root / target)

    def ethernet(
        self, name: str, mbit: int | None, *, state: str = "up", hardware: bool = True, kind: str = "1"
    ) -> None:
        self.write(f"sys/class/net/{name}/operstate", state)
        self.write(f"sys/class/net/{name}/type", kind)
        if mbit is not None:
            self.write(f"sys/class/net/{name}/speed", str(mbit))
        if hardware:
            self.link(f"sys/class/net/{name}/device", f"sys/devices/pci/{name}")

    def rdma(
        self, name: str, rate: str, *, layer: str = "InfiniBand", state: str = "4: ACTIVE", driver: str = "mlx5_core",
        vendor: str = "0x15b3", node: bool = True, gids: dict[int, str] | None = None,
    ) -> None:
        folder = f"sys/class/infiniband/{name}"
        number = len([*(self.root / "sys/class/infiniband_verbs").glob("uverbs*")])
        self.write(f"{folder}/ports/1/state", state)
        self.write(f"{folder}/ports/1/rate", rate)
        self.write(f"{folder}/ports/1/link_layer", layer)
        for index, kind in ({0: "IB/RoCE v1"} if gids is None else gids).items():
            self.write(f"{folder}/ports/1/gid_attrs/types/{index}", kind)
        self.write(f"{folder}/device/vendor", vendor)
        self.link(f"{folder}/device/driver", f"sys/bus/pci/drivers/{driver}")
        self.write(f"sys/class/infiniband_verbs/uverbs{number}/ibdev", name)
        if node:
            self.write(f"dev/infiniband/uverbs{number}", "")

    def hgx(self, *, node: bool = True, state: str = "4: ACTIVE") -> None:
        """Eight cards for the GPUs, as in most machines of eight H100."""
        self.ethernet("eno1", 25000)
        for number in range(8):
            self.rdma(f"mlx5_{number}", "400 Gb/sec (4X NDR)", node=node, state=state)
        self.link("sys/module/nvidia_peermem", "sys/module-peermem")

    def found(self, *, uses_nccl: bool = True, missing: dict[str, str] | None = None, **environ: str) -> list[Finding]:
        """`missing`: libraries that can't be loaded, with the reasons."""
        reasons = missing or {}
        return [*network.network(
            uses_nccl=uses_nccl, root=self.root, environ=environ, load=lambda name: reasons.get(name, ""))]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def told(findings: list[Finding], level: str) -> list[str]:
    return [finding.seen for finding in findings if finding.level == level]


# What is there --------------------------------------------------------------------------------------------------------


def test_plain_ethernet_is_one_line_with_and_without_a_gpu(machine: Machine) -> None:
    machine.ethernet("lo", None, state="unknown", hardware=False, kind="772")
    machine.ethernet("eth0", 10000)
    machine.ethernet("eth1", 1000, state="down")
    machine.ethernet("docker0", None, hardware=False)
    (without,) = machine.found(uses_nccl=False)
    assert (without.level, without.seen) == (OK, "eth0 10 Gbit/s; gloo takes TCP sockets")
    (with_gpu,) = machine.found()
    assert (with_gpu.level, with_gpu.seen) == (OK, "eth0 10 Gbit/s; nccl takes TCP sockets between nodes")


def test_a_container_has_an_interface_without_hardware_or_speed(machine: Machine) -> None:
    machine.ethernet("eth0", -1, hardware=False)
    assert fabric.interfaces(machine.root) == [Interface("eth0", None)]
    assert machine.found(uses_nccl=False)[0].seen == "eth0; gloo takes TCP sockets"


def test_a_machine_without_sys_has_no_network_to_tell(tmp_path: Path) -> None:
    (finding,) = Machine(tmp_path / "empty").found()
    assert finding.seen == "no Ethernet; nccl takes TCP sockets between nodes"


def test_eight_cards_are_one_line_in_their_order(machine: Machine) -> None:
    machine.hgx()
    machine.rdma("mlx5_10", "400 Gb/sec (4X NDR)")
    (finding,) = machine.found()
    assert finding.level == OK
    assert finding.seen == "eno1 25 Gbit/s; 9 InfiniBand ports at 400 Gbit/s; nccl takes InfiniBand between nodes"
    assert [port.device for port in fabric.rdma_ports(machine.root)][-2:] == ["mlx5_7", "mlx5_10"]


def test_infiniband_without_a_gpu_is_part_of_the_one_line_whatever_is_missing(machine: Machine) -> None:
    machine.hgx(node=False, state="1: DOWN")
    (finding,) = machine.found(uses_nccl=False, missing={"libibverbs.so.1": "no"}, NCCL_IB_DISABLE="1")
    assert (finding.level, finding.seen) == (
        OK, "eno1 25 Gbit/s; 8 InfiniBand ports at 400 Gbit/s, unused; gloo takes TCP sockets")


# InfiniBand and RoCE --------------------------------------------------------------------------------------------------


def test_a_container_that_was_not_given_the_devices_is_told_so(machine: Machine) -> None:
    machine.hgx(node=False)
    summary, warning = machine.found()
    assert "nccl takes" not in summary.seen
    assert warning.level == WARNING
    assert warning.seen.startswith("8 InfiniBand ports at 400 Gbit/s of this machine may not be opened here (mlx5_0, ")
    assert "vpc.amazonaws.com/efa in resources.limits" in warning.remedy


def test_a_container_that_was_given_one_of_them_has_that_one(machine: Machine) -> None:
    machine.hgx(node=False)
    machine.write("dev/infiniband/uverbs3", "")
    machine.rdma("mlx5_8", "100 Gb/sec (4X EDR)", node=False)  # whose other speed does not matter: nccl can't take it
    findings = machine.found()
    assert told(findings, WARNING) == []
    assert told(findings, NOTE) == [
        "not given to this container: mlx5_0, mlx5_1, mlx5_2, mlx5_4, mlx5_5, mlx5_6, mlx5_7, mlx5_8"]


def test_ports_that_wait_for_a_subnet_manager_are_a_warning_and_one_that_is_down_a_note(machine: Machine) -> None:
    machine.rdma("mlx5_0", "400 Gb/sec (4X NDR)", state="2: INIT")
    assert told(machine.found(), WARNING) == ["no port of 1 InfiniBand port at 400 Gbit/s is active: mlx5_0 INIT"]
    machine.rdma("mlx5_1", "400 Gb/sec (4X NDR)")
    findings = machine.found()
    assert told(findings, WARNING) == []
    assert told(findings, NOTE)[0] == "not active, so nccl leaves them out: mlx5_0"


def test_an_image_without_libibverbs_has_no_infiniband(machine: Machine) -> None:
    machine.hgx()
    reason = "libibverbs.so.1: cannot open shared object file: No such file or directory"
    (warning,) = [finding for finding in machine.found(missing={"libibverbs.so.1": reason}) if finding.is_problem]
    assert warning.seen == f"nccl needs libibverbs.so.1 for 8 InfiniBand ports at 400 Gbit/s: {reason}"
    assert "apt-get install libibverbs1 ibverbs-providers" in warning.remedy


@pytest.mark.parametrize(
    ("environ", "seen"),
    [
        ({"NCCL_IB_DISABLE": "1"}, "NCCL_IB_DISABLE=1 has nccl take TCP sockets, though there is something better"),
        ({"NCCL_NET": "Socket"}, "NCCL_NET=Socket has nccl take TCP sockets, though there is something better"),
        ({"NCCL_IB_HCA": "=mlx5_8"}, "NCCL_IB_HCA==mlx5_8 names no active device. There are: mlx5_0, mlx5_1, mlx5_2, "
         "mlx5_3, mlx5_4, mlx5_5, mlx5_6, mlx5_7"),
        ({"NCCL_IB_DISABLE": "0", "NCCL_NET": "IB", "NCCL_IB_HCA": "mlx5_1:1", "NCCL_SOCKET_IFNAME": "=eno1"}, None),
    ],
)
def test_variables_that_keep_nccl_from_the_network_are_named(
    machine: Machine, environ: dict[str, str], seen: str | None
) -> None:
    machine.hgx()
    assert told(machine.found(**environ), WARNING) == ([seen] if seen else [])


def test_an_interface_that_is_not_there_is_unfit(machine: Machine) -> None:
    machine.hgx()
    assert told(machine.found(NCCL_SOCKET_IFNAME="eth0"), UNFIT) == [
        "NCCL_SOCKET_IFNAME=eth0 names no interface here. There are: eno1"]


V1_AND_V2 = {0: "IB/RoCE v1", 1: "RoCE v2", 2: "IB/RoCE v1", 3: "RoCE v2"}


def test_roce_needs_an_address_of_version_2(machine: Machine) -> None:
    machine.rdma("mlx5_0", "100 Gb/sec (4X EDR)", layer="Ethernet", gids=V1_AND_V2)
    findings = machine.found(NCCL_IB_GID_INDEX="3")
    assert told(findings, OK) == ["no Ethernet; 1 RoCE port at 100 Gbit/s; nccl takes RoCE between nodes"]
    assert told(findings, WARNING) == told(machine.found(), WARNING) == []
    assert told(machine.found(NCCL_IB_GID_INDEX="2"), WARNING) == [
        "mlx5_0: no address of RoCE v2 at NCCL_IB_GID_INDEX=2"]
    machine.rdma("mlx5_1", "100 Gb/sec (4X EDR)", layer="Ethernet", gids={0: "IB/RoCE v1"})
    assert told(machine.found(), WARNING) == ["mlx5_1: no address of RoCE v2 at any index"]


def test_cards_of_two_kinds_or_speeds_get_a_note_with_what_to_set(machine: Machine) -> None:
    machine.link("sys/module/nvidia_peermem", "sys/module-peermem")
    machine.rdma("mlx5_0", "400 Gb/sec (4X NDR)")
    machine.rdma("mlx5_1", "100 Gb/sec (4X EDR)")
    assert told(machine.found(), NOTE) == ["ports of unequal speed: for the fastest alone set NCCL_IB_HCA==mlx5_0"]
    machine.rdma("mlx5_2", "25 Gb/sec (1X EDR)", layer="Ethernet", gids=V1_AND_V2)
    assert told(machine.found(), NOTE) == [
        "InfiniBand and RoCE: if nccl fails to connect, set NCCL_IB_HCA==mlx5_0,mlx5_1"]
    assert told(machine.found(NCCL_IB_HCA="=mlx5_0"), NOTE) == []


def test_gpus_that_can_not_reach_the_network_directly_are_a_note(machine: Machine) -> None:
    machine.rdma("mlx5_0", "400 Gb/sec (4X NDR)")
    machine.write("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.12")
    (note,) = told(machine.found(), NOTE)
    assert note.startswith("GPUs and network exchange through the CPU's memory")
    machine.write("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.158.01")
    assert told(machine.found(), NOTE) == []


# EFA ------------------------------------------------------------------------------------------------------------------


def efa(machine: Machine, *, node: bool = True) -> None:
    """A p4d.24xlarge: four EFA devices."""
    machine.ethernet("ens32", None)
    for number in range(4):
        machine.rdma(f"rdmap{16 + number}s27", "100 Gb/sec (4X EDR)", layer="Unspecified", driver="efa",
                     vendor="0x1d0f", node=node, gids={0: "IB/RoCE v1"})


def test_efa_with_its_plugin_is_one_line(machine: Machine) -> None:
    efa(machine)
    (finding,) = machine.found(missing={"libibverbs.so.1": "not asked for"}, FI_PROVIDER="efa")
    assert finding.seen == "ens32; 4 EFA ports at 100 Gbit/s; nccl takes EFA between nodes"


def test_efa_without_its_plugin_names_the_library_that_is_missing(machine: Machine) -> None:
    efa(machine)
    reason = "libfabric.so.1: cannot open shared object file: No such file or directory"
    (warning,) = [finding for finding in machine.found(missing={"libnccl-net.so": reason}) if finding.is_problem]
    assert warning.seen == f"nccl's plugin for EFA can't be loaded: {reason}"
    assert told(machine.found(NCCL_NET_PLUGIN="none"), WARNING) == [
        "nccl's plugin for EFA can't be loaded: NCCL_NET_PLUGIN=none"]
    # A name of its own: libnccl-net-ofi.so
    assert told(machine.found(missing={"libnccl-net.so": reason, "ofi": reason}, NCCL_NET_PLUGIN="ofi"), WARNING) == []


def test_efa_needs_its_provider_its_devices_and_its_driver(machine: Machine) -> None:
    efa(machine)
    assert told(machine.found(FI_PROVIDER="tcp"), WARNING) == ["FI_PROVIDER=tcp keeps libfabric from EFA"]
    machine.write("sys/bus/pci/devices/0000:20:1b.0/vendor", "0x1d0f")
    machine.write("sys/bus/pci/devices/0000:20:1b.0/device", "0xefa1")
    assert told(machine.found(), WARNING) == ["1 EFA device without a driver"]
    machine.link("sys/bus/pci/devices/0000:20:1b.0/driver", "sys/bus/pci/drivers/efa")
    assert told(machine.found(), WARNING) == []


def test_a_pod_without_efa_in_its_limits_is_told_so(machine: Machine) -> None:
    efa(machine, node=False)
    (seen,) = told(machine.found(), WARNING)
    assert seen.startswith("4 EFA ports at 100 Gbit/s of this machine may not be opened here")


# nccl's own rules -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "name", "number", "matches"),
    [
        ("eth", "eth1", None, True), ("=eth", "eth1", None, False), ("=eth0,eth1", "eth1", None, True),
        ("^docker", "docker0", None, False), ("^docker", "eth0", None, True), ("^=docker0", "docker01", None, True),
        ("mlx5_1", "mlx5_10", 1, True), ("=mlx5_1", "mlx5_10", 1, False), ("=mlx5_0:1,mlx5_1:1", "mlx5_1", 1, True),
        ("mlx5_0:2", "mlx5_0", 1, False), ("^=mlx5_1,mlx5_4", "mlx5_4", 1, False),
    ],
)
def test_names_are_matched_as_nccl_does(wanted: str, name: str, number: int | None, matches: bool) -> None:
    assert _matches(wanted, name, number) is matches


def test_a_library_is_loaded_or_the_reason_is_told() -> None:
    assert load_library("libc.so.6") == ""
    assert "cannot open shared object file" in load_library("libno-such.so.1")


def test_this_machine_is_read_without_an_error() -> None:
    first, *_ = network.network(uses_nccl=True)
    assert (first.stage, first.level) == ("network", OK)
