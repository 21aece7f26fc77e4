"""Job arrays, whose tasks train at the same time, and a Slurm that starts over files of an earlier one."""

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


def test_slurm_array_trains_one_seed_in_each_task(cluster: Cluster, forks: Forks, tmp_path: Path) -> None:
    """Both jobs run at once on the same two nodes, and share neither a port nor a run."""
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


def test_slurm_starts_over_files_left_by_a_crash(cluster: Cluster) -> None:
    """The pids in these files now belong to other processes, and a file has the name of the lost network."""
    del cluster  # only its existence matters: it holds a number
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
