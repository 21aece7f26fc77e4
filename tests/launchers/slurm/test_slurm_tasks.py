"""A task of a step of a scripted Slurm: it starts its agent again, and writes notes for the batch script."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rankup.agent.logs import host_name
from tests.rigs.containers import clean_environment
from tests.rigs.jobs import ROOT, wait_for
from tests.rigs.slurm_script import Scripted

IN_STEP = {**clean_environment(), "PYTHONPATH": str(ROOT), "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0",
           "SLURMD_NODENAME": "big9"}
TASK = """
import os, signal, sys, time
from rankup.slurm_task import restart_if_killed
def agent():
    print("start", flush=True)
    {body}
sys.exit(restart_if_killed(agent, max_restarts=2))
"""


@pytest.mark.parametrize(
    ("body", "code", "starts"),
    [
        ("return 0", 0, 1), ("return 2", 2, 1), ("return 143", 143, 1), ("return 171", 171, 3),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, 3),
        ("os.kill(os.getppid(), signal.SIGTERM); time.sleep(0.2); return 171", 171, 1),
    ],
    ids=["finished", "mistake", "stopped", "gave up", "killed", "a stop was on its way"],
)
def test_slurm_task_restarts_an_agent_after_codes_to_retry(body: str, code: int, starts: int, tmp_path: Path) -> None:
    (tmp_path / ".slurm-7").touch()
    words = [sys.executable, "-c", TASK.format(body=body)]
    done = subprocess.run(words, env=IN_STEP, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.count("start")) == (code, starts), done.stderr
    assert done.stderr.count(", restarted (") == starts - 1
    noted = {0: "code 0\n", 2: "code 2\n", 137: "failed big9\n"}  # an agent that gives up names the node itself
    assert (tmp_path / ".slurm-7").read_text() == noted.get(code, "")


def test_slurm_agent_that_gives_up_names_the_node_of_the_rank_that_failed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import os\nos.kill(os.getpid(), 9)\n")
    (tmp_path / ".slurm-7").touch()
    one = {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1"}
    words = [sys.executable, "-m", "rankup", "launch", "--max-restarts", "0", "train.py"]
    assert subprocess.run(words, env={**IN_STEP, **one}, cwd=tmp_path, check=False).returncode == 137
    assert (tmp_path / ".slurm-7").read_text() == f"failed {host_name()}\n"


def test_slurm_agent_ends_with_its_task(tmp_path: Path) -> None:
    """Otherwise an agent whose task Slurm counts as ended would go on beside its successor."""
    body = "print(os.getpid(), flush=True); time.sleep(600)"
    words = [sys.executable, "-c", TASK.format(body=body)]
    with subprocess.Popen(words, env=IN_STEP, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as task:
        assert task.stdout is not None
        task.stdout.readline()
        agent = int(task.stdout.readline())
        task.kill()
    wait_for("the end of the agent", lambda: not os.path.exists(f"/proc/{agent}"))


@pytest.mark.parametrize(
    ("code", "nodes", "requeues"),
    [(0, "big8,big9", 1), (0, "big7,big8", 0), (1, "big8,big9", 1), (171, "big8,big9", 0)],
)
def test_slurm_finished_agents_requeue_a_job_without_its_first_node(
    code: int, nodes: str, requeues: int, tmp_path: Path
) -> None:
    """Without its batch script, Slurm would let the job hold the other nodes to the end of its time."""
    job = Scripted(tmp_path, answers={"job": f"ExcNodeList=(null) NodeList={nodes} BatchHost=big7"})
    (tmp_path / ".slurm-7").touch()
    words = [sys.executable, "-c", TASK.format(body=f"return {code}")]
    done = subprocess.run(words, env={**job.env, "SLURM_STEP_ID": "0"}, cwd=tmp_path, check=False)
    assert (done.returncode, len(job.requeued())) == (code, requeues)
    assert (tmp_path / ".slurm-7").read_text() == (f"code {code}\n" if code < 128 else "")
