"""Several Slurm jobs at once, arrays, and the mistakes that a user can make: each its own message and state."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.rigs.containers import digest_by_forks
from tests.rigs.fork_server import Forks
from tests.rigs.slurm_cluster import LOCAL, Cluster

pytestmark = pytest.mark.timeout(1200)
JOB = "--dataset digits --model mlp --max-steps 60 --tensorboard=false"


def test_slurm_array_trains_a_seed_in_each_task_side_by_side(cluster: Cluster, forks: Forks, tmp_path: Path) -> None:
    """Two jobs at once on the same two nodes: neither their ports nor their runs meet."""
    first = cluster.submit(tmp_path, f"{JOB} --run-dir runs", "--array=3-4")
    for index in (3, 4):
        job = type(first)(cluster, f"{first.number}_{index}", tmp_path)
        assert job.wait() == "COMPLETED", job.log()
        run = tmp_path / "runs" / f"slurm-{first.number}_{index}"
        assert yaml.safe_load((run / "config.yaml").read_text())["seed"] == index
        (tmp_path / f"host-{index}").mkdir()
        digest = digest_by_forks(forks, tmp_path / f"host-{index}", f"{JOB} --seed {index} --name job")
        assert json.loads((run / "result.json").read_text())["digest"] == digest
    outputs = [path.read_text() for path in tmp_path.glob("slurm-*.out")]
    assert len({text.split("master node0:")[1].split(";")[0] for text in outputs}) == 2, outputs


def test_slurm_comes_up_over_what_a_machine_that_went_down_left(cluster: Cluster) -> None:
    """Its files name processes that are others' by now, and a file has the name of the network, which is gone."""
    del cluster  # there is a Slurm, and it holds a number
    another = Cluster()
    innocent = subprocess.Popen(["sleep", "600"])
    try:
        another.folder.mkdir(exist_ok=True)
        for name in ("slurm.conf", "slurmctld.pid", "node0.pid1", "node1.unshare"):
            (another.folder / name).write_text(f"{innocent.pid}\n")
        Path("/run/netns", another.folder.name).touch()
        another.local("up")
        assert another.run("sinfo", "-h", "-t", "idle", "-o", "%D").strip() == "2"
        assert innocent.poll() is None
        said = another.run(LOCAL, "up", check=False, RANKUP_SLURM_DIR=f"{another.folder}-b")
        assert f"a Slurm named {another.folder.name} runs already" in said
        assert another.run("sinfo", "-h", "-t", "idle", "-o", "%D").strip() == "2"
    finally:
        innocent.kill()
        innocent.wait()
        another.close()
        shutil.rmtree(f"{another.folder}-b", ignore_errors=True)
    assert not another.folder.exists()
