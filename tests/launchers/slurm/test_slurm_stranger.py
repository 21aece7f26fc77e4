"""A stranger's folder on a real Slurm: a training script, a virtual environment with rankup's wheel, and ten lines for
sbatch or what `rankup add` wrote; no checkout. A rank, an agent and a node are killed."""

import os
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.rigs import own_venv, repositories
from tests.rigs.containers import wait_for
from tests.rigs.jobs import ROOT
from tests.rigs.slurm_cluster import Cluster, SlurmJob

pytestmark = pytest.mark.timeout(1200)
BATCH = """#!/bin/sh
#SBATCH --nodes=2
#SBATCH --time=01:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.out
. venv/bin/activate
exec rankup launch --name mine train.py
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Path:
    """The stranger's folder. Training takes 400 steps of 50 ms and writes runs/ddp.pt."""
    folder = tmp_path_factory.mktemp("own folder")
    own_venv.own_venv(folder / "venv", wheel)
    script = (ROOT / "train/examples/repository/train.py").read_text()
    for old, new in (
        ("EPOCHS = 3", "EPOCHS = 25"), ('run="runs/ddp"', '"runs/mine"'),
        ("import torch\n", "import time\n\nimport torch\n"),
        ("            optimizer.zero_grad()", "            time.sleep(0.05)\n            optimizer.zero_grad()"),
    ):
        assert script.count(old) == 1, old
        script = script.replace(old, new)
    (folder / "train.py").write_text(script)
    (folder / "job.sbatch").write_text(BATCH)
    return folder


def weights(folder: Path) -> list[bytes]:
    """Return the trained weights in `folder`, and remove the run."""
    found = [value.numpy().tobytes() for value in torch.load(folder / "runs" / "ddp.pt").values()]
    (folder / "runs").rename(folder / f"runs-{len(list(folder.iterdir()))}")
    return found


@pytest.fixture(scope="module")
def undisturbed(own: Path) -> list[bytes]:
    """The weights of two ranks on this machine."""
    words = [own / "venv/bin/rankup", "launch", "--nproc", "2", "train.py"]
    env = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}
    subprocess.run(words, cwd=own, env=env, check=True, timeout=600)
    return weights(own)


def command(cluster: Cluster, own: Path, *words: str) -> "subprocess.Popen[str]":
    """Start a command that a user types, and that prints into out.txt."""
    with (own / "out.txt").open("w") as output:
        path = f"{own / 'venv' / 'bin'}:{os.environ['PATH']}"
        return subprocess.Popen(
            words, cwd=own, env={**cluster.env, "PATH": path}, stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT, text=True,
        )


def newest(cluster: Cluster, own: Path) -> SlurmJob:
    """Return the job that a command has started."""
    number = wait_for("the job", lambda: cluster.run("squeue", "-h", "-o", "%A").strip(), log=cluster.report)
    return SlurmJob(cluster, number, own)


def test_slurm_stranger_submits_ten_lines_and_loses_a_rank_an_agent_and_a_node(
    cluster: Cluster, own: Path, undisturbed: list[bytes]
) -> None:
    job = SlurmJob(cluster, cluster.run("sbatch", "--parsable", "job.sbatch", cwd=own).strip(), own)
    job.wait_for_step(30, "mine")
    job.kill_rank("node1")
    job.wait_for_text("resumed from step", count=1)
    job.wait_for_step(80, "mine")
    job.kill_agent("node0")
    job.wait_for_text("resumed from step", count=2)
    assert "slurm: the agent on node0 ended with 137, restarted (1 of 3)" in job.output, job.output
    assert job.show()["Restarts"] == "0"
    job.wait_for_step(130, "mine")
    cluster.run("scancel", "--batch", "--signal=USR1", job.number)
    wait_for("the requeue", lambda: job.show()["Restarts"] == "1", log=job.log)
    job.go_on()
    job.wait_for_step(180, "mine")
    cluster.local("kill", "node1")
    wait_for("the second requeue", lambda: job.show()["JobState"] == "PENDING", log=job.log)
    cluster.local("start", "node1")
    assert job.wait() == "COMPLETED", job.log()
    assert job.output.startswith("slurm: 2 nodes, 1 rank on each: srun --nodes=2"), job.output
    assert str(ROOT) not in job.output
    assert weights(own) == undisturbed


@pytest.mark.parametrize("make", [repositories.one_gpu, repositories.package, repositories.own_loop])
def test_slurm_stranger_trains_from_elsewhere_what_rankup_add_wrote_and_ends_with_the_weights_of_this_machine(
    make: Callable[[Path, str], repositories.Repository], cluster: Cluster, wheel: Path, tmp_path: Path
) -> None:
    """The file finds the environment (venv/, .venv/ or the active one, which is elsewhere) and needs no edit."""
    with repositories.index(tmp_path) as index:
        made = make(tmp_path / "my repository", index)
        places = {"one_gpu": made.folder / "venv", "package": made.folder / ".venv", "own_loop": tmp_path / "my envs"}
        commands = own_venv.own_venv(places[make.__name__], wheel)
        pip = ("--python", commands / "python", "install", "--find-links", index, "--no-index")
        own_venv.pip(*pip, "extra")
        if make is repositories.own_loop:
            own_venv.pip(*pip, "--no-build-isolation", "-e", made.folder)
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "VIRTUAL_ENV": str(commands.parent)}
    words = [commands / "rankup", "add", "slurm", *f"{made.options} {made.script}".split()]
    subprocess.run(words, cwd=made.folder, env=env, stdin=subprocess.DEVNULL, check=True, timeout=100)
    (file,) = made.folder.glob("*.sbatch")
    submit = ("sbatch", "--parsable", f"--chdir={made.folder}", file)
    job = SlurmJob(cluster, cluster.run(*submit, cwd=tmp_path).strip(), made.folder)
    job.wait_for_text("step 20\n")
    job.kill_rank("node1" if made.nodes == 2 else "")
    assert job.wait() == "COMPLETED", job.log()
    assert "ended with 137" in job.output, job.output
    words = [commands / "rankup", "launch", "--nproc", str(made.nodes), "--name", "here", *made.script.split()]
    here = subprocess.run(words, cwd=made.folder, env=env, stdout=subprocess.PIPE, text=True, check=True, timeout=600)
    digests = re.findall(r"digest (\w+) extra-word", job.output)
    assert digests == re.findall(r"digest (\w+) extra-word", here.stdout), job.output
    assert len(digests) == 1


def test_slurm_stranger_runs_in_salloc_and_stops_it_with_ctrl_c(
    cluster: Cluster, own: Path, undisturbed: list[bytes]
) -> None:
    """The same line again resumes the run."""
    words = ("salloc", "-N2", "rankup", "launch", "--name", "mine", "train.py")
    with command(cluster, own, *words) as shell:
        job = newest(cluster, own)
        job.wait_for_step(30, "mine")
        job.kill_rank("node1")
        job.wait_for_step(60, "mine")
        (here,) = [process for process in cluster.processes() if "--name" in process.cmdline()
                   and "srun" not in process.name() and "SLURMD_NODENAME" not in process.environ()]
        here.send_signal(signal.SIGINT)
        assert shell.wait(timeout=300) == 143, (own / "out.txt").read_text()
    output = (own / "out.txt").read_text()
    assert "slurm: 2 nodes, 1 rank on each: srun" in output
    assert "slurm: SIGINT: saving, then stopping" in output
    assert "saved at step" in output
    cluster.idle()
    with command(cluster, own, *words) as shell:
        assert shell.wait(timeout=600) == 0, (own / "out.txt").read_text()
    assert "resumed from step" in (own / "out.txt").read_text()
    assert weights(own) == undisturbed


def test_slurm_stranger_runs_an_agent_in_each_task_of_srun(
    cluster: Cluster, own: Path, undisturbed: list[bytes]
) -> None:
    words = ("srun", "-N2", "--ntasks-per-node=1", "rankup", "launch", "--name", "mine", "train.py")
    with command(cluster, own, *words) as shell:
        job = newest(cluster, own)
        job.wait_for_step(30, "mine")
        job.kill_agent("node1")
        job.wait_for_step(60, "mine")
        job.kill_rank("node0")
        assert shell.wait(timeout=600) == 0, (own / "out.txt").read_text()
    output = (own / "out.txt").read_text()
    assert "slurm: the agent on node1 ended with 137, restarted (1 of 3)" in output
    assert "srun --nodes" not in output
    assert weights(own) == undisturbed
