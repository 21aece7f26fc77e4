"""`rankup submit` with a real Slurm, on a login node and over a real sshd: a requeued job runs what was sent."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rigs import ssh
from tests.rigs.jobs import ROOT, wait_for
from tests.rigs.slurm_cluster import Cluster, SlurmJob

pytestmark = pytest.mark.timeout(1200)
TRAIN = """
import pathlib, sys, time
from recipe import WORD
print("words", WORD, *sys.argv[1:], pathlib.Path("points/scale.txt").read_text(), flush=True)
while not pathlib.Path("runs", WORD).exists():
    time.sleep(0.1)
pathlib.Path("beside.txt").write_text("lost?")
print("done", WORD, flush=True)
"""


def write(folder: Path, word: str) -> None:
    (folder / "recipe.py").write_text(f"WORD = {word!r}\n")


def git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=me", "-c", "user.email=me@example.org"]
    return subprocess.run(["git", *who, *words], cwd=folder, capture_output=True, text=True, check=True).stdout


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A user's repository: a script and a module, data that git ignores, an environment, a secret."""
    folder = tmp_path / "my project"
    (folder / "points").mkdir(parents=True)
    (folder / "points" / "scale.txt").write_text("1.5")
    (folder / "train.py").write_text(TRAIN)
    (folder / ".gitignore").write_text("points/\n.venv\n")
    (folder / ".env").write_text("TOKEN=hunter2\n")
    (folder / ".venv").symlink_to(sys.prefix)
    write(folder, "old")
    git(folder, "init", "-q", "-b", "main")
    git(folder, "add", "train.py", "recipe.py", ".gitignore")
    git(folder, "commit", "-q", "-m", "first")
    return folder


def command(cluster: Cluster, folder: Path, *words: str, path: str = "") -> "subprocess.Popen[str]":
    env = {**cluster.env, "PYTHONPATH": str(ROOT), "PATH": f"{path}{cluster.env['PATH']}"}
    with (folder.parent / "said.txt").open("w") as said:
        return subprocess.Popen(
            ["rankup", *words], cwd=folder, env=env, text=True, stdin=subprocess.DEVNULL, stdout=said, stderr=said
        )


def said(folder: Path) -> str:
    return (folder.parent / "said.txt").read_text()


def submitted(cluster: Cluster, mine: Path, where: Path, process: "subprocess.Popen[str]") -> SlurmJob:
    """Wait for the job of a command. `where`: the job's folder."""
    wait_for("the job", lambda: " writes to " in said(mine), process=process, log=lambda: said(mine))
    return SlurmJob(cluster, said(mine).partition("submit: job ")[2].split()[0], where)


def test_slurm_submit_requeued_job_runs_what_was_submitted(cluster: Cluster, mine: Path) -> None:
    """The user follows the job, edits, requeues, and the old code runs again, in the old folder. A second submit runs
    the new code."""
    assert command(cluster, mine, "add", "slurm", "--nodes", "1", "train.py").wait() == 0
    with command(cluster, mine, "submit", "train.sbatch", "--lr", "0 2") as process:
        job = submitted(cluster, mine, mine, process)
        job.wait_for_text("words old")
        write(mine, "new")
        cluster.run("scontrol", "requeue", job.number)
        job.go_on()
        job.wait_for_text("words old", count=2)
        (mine / "runs" / "old").touch()
        assert process.wait(timeout=300) == 0, said(mine)
    text = said(mine)
    assert job.output.count("words old --lr 0 2 1.5") == 2, job.output
    followed = "".join(line for line in text.splitlines(keepends=True) if not line.startswith("submit: "))
    assert job.output in followed, text
    assert "words new" not in job.output
    assert "beside.txt" in text
    assert f"submit: job {job.number} is over: completed, exit code 0" in text
    assert "left out, because git does not track it: .env" in text
    record = json.loads((mine / "runs" / f"slurm-{job.number}" / "status.json").read_text())["snapshot"]
    assert record["commit"] == git(mine, "rev-parse", "HEAD").strip()
    assert (record["branch"], record["dirty"]) == ("main", True)  # add's file is not tracked
    shown = cluster.run("rankup", "status", f"slurm-{job.number}", cwd=mine, PYTHONPATH=str(ROOT))
    assert f"{record['snapshot']}, main at {record['commit'][:8]} with changes" in shown
    (mine / "runs" / "new").touch()
    assert command(cluster, mine, "submit", "train.sbatch").wait(timeout=300) == 0
    assert "words new 1.5" in said(mine)


@pytest.fixture
def login(cluster: Cluster, tmp_path: Path) -> Iterator[ssh.Login]:
    with ssh.login(tmp_path / "ssh", SLURM_CONF=cluster.env["SLURM_CONF"], PYTHONPATH=str(ROOT)) as made:
        yield made


def test_slurm_submit_over_ssh_requeued_job_runs_what_was_sent(
    cluster: Cluster, mine: Path, login: ssh.Login, tmp_path: Path
) -> None:
    """The folder there has the environment and the data. Ctrl-C leaves the job running. The commands that look at a run
    run there."""
    there = tmp_path / "there"
    for name in ("points", ".venv"):
        there.mkdir(exist_ok=True)
        (there / name).symlink_to((mine / name).resolve())
    path = f"{login.bin}:"
    assert command(cluster, mine, "add", "slurm", "--nodes", "1", "train.py").wait() == 0
    with command(cluster, mine, "submit", "--host", f"login:{there}", "train.sbatch", path=path) as process:
        job = submitted(cluster, mine, there, process)
        wait_for("its output", lambda: "words old 1.5" in said(mine), log=lambda: said(mine) + job.log())
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=100) == 0
    look = f"Look: rankup status --host login:{there}. Stop: ssh login scancel {job.number}."
    assert f"job {job.number} goes on. {look}" in said(mine)
    assert "+ rsync -rlp --checksum " in said(mine)
    assert not (mine / "runs").exists()
    write(mine, "new")
    cluster.run("scontrol", "requeue", job.number)
    job.go_on()
    job.wait_for_text("words old", count=2)
    (there / "runs" / "old").touch()
    assert job.wait() == "COMPLETED", job.log()
    assert "words new" not in job.output
    assert command(cluster, mine, "logs", "--host", f"login:{there}", f"slurm-{job.number}", path=path).wait() == 0
    assert "rank 0 on node0: done old" in said(mine)
    assert command(cluster, mine, "status", "--host", f"login:{there}", path=path).wait() == 0
    assert f"slurm-{job.number}" in said(mine)


def test_slurm_submit_names_the_reason_of_slurm(cluster: Cluster, mine: Path) -> None:
    assert command(cluster, mine, "add", "slurm", "--nodes", "1", "train.py").wait() == 0
    text = (mine / "train.sbatch").read_text()
    (mine / "train.sbatch").write_text(text.replace("##SBATCH --partition=gpu", "#SBATCH --partition=gone"))
    assert command(cluster, mine, "submit", "train.sbatch").wait() == 2
    assert "train.sbatch: Slurm must accept the job, got: Invalid partition name specified" in said(mine)
    (mine / "train.sbatch").write_text(text.replace("#SBATCH --requeue\n", "#SBATCH --requeue\n#SBATCH --hold\n"))
    with command(cluster, mine, "submit", "train.sbatch") as process:
        job = submitted(cluster, mine, mine, process)
        wait_for("the reason", lambda: "waits: JobHeldUser" in said(mine), log=lambda: said(mine))
        job.cancel()
        assert process.wait(timeout=100) == 1
    assert f"job {job.number} is over: cancelled, exit code 1" in said(mine)


def test_slurm_submit_follows_a_batch_file_of_the_users_own(cluster: Cluster, mine: Path) -> None:
    """It names its output itself, in a folder that does not exist yet, and says nothing of requeues. The folder has
    runs/.gitkeep, as many have."""
    (mine / "own.sbatch").write_text(
        '#!/bin/sh\n#SBATCH --nodes=1 --requeue --job-name=own\n#SBATCH --output="logs of mine/%x-%j.out"\n'
        'echo "start <${SLURM_RESTART_COUNT:-0}> $(cat recipe.py)"\n'
        "while [ ! -e runs/go ]; do sleep 0.2; done\necho over > runs/result.txt\nexit 5\n"
    )
    (mine / "runs").mkdir()
    (mine / "runs" / ".gitkeep").touch()
    git(mine, "add", "own.sbatch", "runs/.gitkeep")
    with command(cluster, mine, "submit", "own.sbatch") as process:
        job = submitted(cluster, mine, mine, process)
        wait_for("its output", lambda: "start <0> WORD = 'old'" in said(mine), log=lambda: said(mine))
        write(mine, "new")
        cluster.run("scontrol", "requeue", job.number)
        job.go_on()
        wait_for("its output", lambda: "start <1> WORD = 'old'" in said(mine), log=lambda: said(mine))
        (mine / "runs" / "go").touch()
        assert process.wait(timeout=300) == 5, said(mine)
    assert f"writes to {mine}/logs of mine/own-{job.number}.out" in said(mine)
    assert said(mine).count("start <") == 2
    assert (mine / "runs" / "result.txt").read_text() == "over\n"
