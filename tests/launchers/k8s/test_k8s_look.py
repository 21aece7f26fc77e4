"""k8s/overlays/debug/look.py: the pods meet at the master's port, or say that they do not."""

import importlib.util
import threading
from pathlib import Path
from types import ModuleType

import pytest

from tests.rigs.jobs import ROOT, free_port


@pytest.fixture
def look() -> ModuleType:
    spec = importlib.util.spec_from_file_location("look", ROOT / "k8s" / "overlays" / "debug" / "look.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pod(rank: int, port: int) -> dict[str, str]:
    return {"RANK": str(rank), "PET_NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def test_look_rank_0_stays_until_the_other_pod_has_come(look: ModuleType) -> None:
    port, said = free_port(), []
    master = threading.Thread(target=lambda: said.append(look.meet(pod(0, port), wait_s=120)))
    master.start()
    assert look.meet(pod(1, port), wait_s=120) == f"127.0.0.1:{port} is reached"
    master.join()
    assert said == [f"port {port}: reached by 1 of 1 other pods (127.0.0.1)"]


def test_look_says_who_did_not_come_and_ends(look: ModuleType) -> None:
    port = free_port()
    assert look.meet(pod(0, port), wait_s=0.1) == f"port {port}: reached by 0 of 1 other pods (none)"
    assert look.meet(pod(1, port), wait_s=0.1).startswith(f"127.0.0.1:{port} is not reached after 0.1 s: ")


def test_look_without_a_master_says_so(look: ModuleType) -> None:
    assert look.meet({"PET_NNODES": "2:4"}) == "no MASTER_ADDR and MASTER_PORT"


V1 = {
    "proc/self/cgroup": "5:memory:/kubepods/pod1\n3:cpu,cpuacct:/kubepods/pod1\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "2147483648\n",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": "1000000\n",
    "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "50000\n",
    "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
}
V2 = {
    "proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "2147483648\n",
    "sys/fs/cgroup/memory.current": "1000000\n", "sys/fs/cgroup/cpu.max": "50000 100000\n",
}


@pytest.mark.parametrize("files", [V1, V2], ids=["version 1", "version 2"])
def test_look_reads_the_limits_of_either_version_of_control_groups(
    look: ModuleType, tmp_path: Path, files: dict[str, str]
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert look.limits(tmp_path) == ["memory limit: 2048 MiB", "CPUs to use: 0.5"]


def test_look_prints_no_secrets(look: ModuleType) -> None:
    assert look.OURS.match("PET_NNODES")
    assert not look.OURS.match("AWS_SECRET_ACCESS_KEY")
