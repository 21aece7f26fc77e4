"""Faults around containers, such as a missing node, a wrong address, or too little memory or disk.

Each fault has its own message and exit code, and costs no checkpoint.
"""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rigs.containers import Project, project, wait_for

pytestmark = [pytest.mark.usefixtures("image"), pytest.mark.timeout(1200)]
JOB = "--dataset digits --model mlp --name job"


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Project]:
    with project(tmp_path, RESTART="no", ARGS=JOB) as made:
        yield made


def wait_for_peers(nodes: Project, seconds: int) -> None:
    """Let each node wait as long as this for the other one."""
    command = f"command: --join-timeout-s {seconds} train/main.py train {JOB}"
    nodes.override(f"services: {{node0: {{{command}}}, node1: {{{command}}}}}")


def test_closed_port_is_still_named_after_node0_and_its_name_are_gone(nodes: Project) -> None:
    nodes.override('services: {node1: {environment: {MASTER_PORT: "29499"}}}')
    wait_for_peers(nodes, 3000)
    nodes.up()
    refused, gone = "node0:29499 refuses the connection", 'By now the name "node0" does not resolve here'
    wait_for("the refusal", lambda: f"still waiting: {refused}" in nodes.logs(), log=nodes.logs)
    nodes.kill_container("node0")
    wait_for("node0 gone", lambda: gone in nodes.logs(), log=nodes.logs)
    assert all(refused in line for line in nodes.logs().splitlines() if gone in line)  # the cause comes first


def test_runs_folder_of_another_user_is_refused_by_name(nodes: Project) -> None:
    nodes.runs.mkdir()
    nodes.runs.chmod(0o755)
    subprocess.run(["chown", "4242:4242", nodes.runs], check=True)
    nodes.up(RANKUP_UID="1000", RANKUP_GID="1000")
    assert nodes.codes() == [2, 2], nodes.logs()
    for node in ("node0", "node1"):  # in the last lines, which Kubernetes keeps as a pod's message
        assert "run_dir: runs/job/logs must be writable" in nodes.compose("logs", "--no-log-prefix", node)[-2048:]
    assert nodes.runs.stat().st_uid == 4242


def test_container_out_of_memory_and_full_disk_cost_no_checkpoint(nodes: Project) -> None:
    line = f"{JOB} --no-tensorboard --keep 100 --max-steps"
    nodes.runs.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m,mode=0777", "tmpfs", nodes.runs], check=True)
    try:
        nodes.up(ARGS=f"{line} 40")
        assert nodes.codes() == [0, 0], nodes.logs()
        digest = nodes.result("job")["digest"]

        nodes.up(ARGS=f"{line} 60", MEMORY="64m")
        assert nodes.codes() == [137, 137], nodes.logs()  # only the kernel sends SIGKILL here
        # The engine gets one event about the memory and one about the end. If the memory's is second, it is dropped
        assert any(nodes.state(node)["OOMKilled"] for node in ("node0", "node1"))
        assert nodes.result("job")["digest"] == digest

        (nodes.runs / "other").write_bytes(bytes(10_000_000)[: _free(nodes.runs) - 100_000])
        nodes.up(ARGS=f"{line} 400 --save-every-steps 5", MEMORY="0")
        assert nodes.codes() == [2, 2], nodes.logs()
        assert "resumed from step-00000040" in nodes.logs()
        assert "checkpoints has no space left" in nodes.logs()
        (nodes.runs / "other").unlink()
        nodes.up(ARGS=f"{line} 60")
        assert nodes.codes() == [0, 0], nodes.logs()
    finally:
        nodes.remove()
        wait_for("umount", lambda: subprocess.run(["umount", nodes.runs], check=False).returncode == 0)


def _free(folder: Path) -> int:
    about = os.statvfs(folder)
    return about.f_bavail * about.f_frsize
