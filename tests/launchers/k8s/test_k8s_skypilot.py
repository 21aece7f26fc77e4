"""SkyPilot accepts k8s/skypilot.yaml, retries the right exit codes, and its nodes train to the host's weights."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from rankup.errors import FAULT, JOIN_FAILED, PEER_LOST, STOPPED, USER_MISTAKE, worth_restarting
from tests.rigs.containers import digest_by_forks
from tests.rigs.fork_server import Forks
from tests.rigs.jobs import Job, ended, environment, free_port, result, start
from tests.rigs.kube import K8S

FILE = K8S / "skypilot.yaml"
PACKAGE = Path(sys.prefix) / "skypilot"
# A separate process, because SkyPilot's packages are older than ours. The loop asks which exit codes SkyPilot retries
READ = """
import json, sys, sky
from sky.jobs.recovery_strategy import StrategyExecutor

task = sky.Task.from_yaml(sys.argv[1])
(resources,) = task.resources
recovery = resources.job_recovery
goes_on = []
for codes in json.loads(sys.argv[2]):
    executor = object.__new__(StrategyExecutor)
    executor.recover_on_exit_codes = recovery["recover_on_exit_codes"]
    executor.max_restarts_on_errors, executor.restart_cnt_on_failure = recovery["max_restarts_on_errors"], 0
    goes_on.append(executor.should_restart_on_failure(codes))
print(json.dumps({"nodes": task.num_nodes, "recovery": recovery, "envs": task.envs, "goes_on": goes_on,
                  "setup": task.setup, "run": task.run}))
"""
JOB = "--dataset digits --model mlp --dropout 0.2 --augment --max-steps 60"


def read(folder: Path, text: str, codes: object = ()) -> subprocess.CompletedProcess[str]:
    """Run SkyPilot's own parser on a file with this text."""
    if not PACKAGE.exists():
        pytest.skip(f"no SkyPilot in {PACKAGE}: make venv-tests puts it there")
    (folder / "task.yaml").write_text(text)
    env = {"HOME": str(folder), "PYTHONPATH": str(PACKAGE), "PYTHONWARNINGS": "ignore",
           "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    words = [sys.executable, "-c", READ, str(folder / "task.yaml"), json.dumps(codes)]
    return subprocess.run(words, env=environment(env), cwd=folder, capture_output=True, text=True, check=False)


def test_k8s_skypilot_accepts_its_file_and_retries_the_right_codes(tmp_path: Path) -> None:
    """Each list has the codes of both nodes. A node that SkyPilot stops because the other one ended has 137."""
    helps = [[code, 137] for code in (STOPPED, JOIN_FAILED, PEER_LOST)]
    done = read(tmp_path, FILE.read_text(), [*helps, [STOPPED, STOPPED], [USER_MISTAKE, 137], [FAULT, 137], [20, 137]])
    assert done.returncode == 0, done.stderr
    task: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert task["goes_on"] == [True, True, True, True, False, False, False]
    assert task["nodes"] == 2
    assert all(code == STOPPED or worth_restarting(code) for code in task["recovery"]["recover_on_exit_codes"])
    assert set(task["envs"]) == {"NAME", "RUN_DIR", "NPROC", "SETTINGS"}
    plain = yaml.safe_load(FILE.read_text())
    assert (task["setup"], task["run"]) == (plain["setup"], plain["run"])


def node(folder: Path, rank: int, job: Job, **env: str) -> None:
    """Start the command that SkyPilot runs on a node, with the variables that it sets."""
    task = yaml.safe_load(FILE.read_text())
    sky = {
        "SKYPILOT_NODE_RANK": str(rank), "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1", "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NUM_GPUS_PER_NODE": "0", "SKYPILOT_TASK_ID": "sky-2026-11-22-12-00-00-000000_rankup_1",
    }
    start("bash", "-c", task["run"], env={**task["envs"], **sky, **env}, cwd=folder, job=job)


def checkout(folder: Path) -> Path:
    (folder / ".venv").symlink_to(sys.prefix)
    (folder / "train").symlink_to(K8S.parent / "train")
    return folder


# Variables of the Slurm job that SkyPilot keeps if its nodes come from Slurm
ON_SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOBID": "7", "SLURM_JOB_NODELIST": "big[7,9]", "SLURM_NNODES": "2"}


def test_k8s_skypilot_nodes_train_to_the_weights_of_the_host(forks: Forks, tmp_path: Path) -> None:
    folder, job = checkout(tmp_path), Job()
    env = {"NAME": "job", "RUN_DIR": str(tmp_path / "runs"), "NPROC": "2", "MASTER_PORT": str(free_port()), **ON_SLURM}
    with ended(job):
        for rank in range(2):
            node(folder, rank, job, **env, SETTINGS=JOB)
        assert job.wait() == [0, 0], job.outputs
    (tmp_path / "host").mkdir()
    digest = digest_by_forks(forks, tmp_path / "host", f"{JOB} --name job", nproc=4)
    done = result(tmp_path / "runs" / "job")
    assert (done["digest"], done["world_size"]) == (digest, 4)


def test_k8s_skypilot_gets_the_exit_code_of_a_mistake(tmp_path: Path) -> None:
    job = Job()
    with ended(job):
        node(checkout(tmp_path), 0, job, NPROC="0")
        assert job.wait() == [USER_MISTAKE], job.outputs
