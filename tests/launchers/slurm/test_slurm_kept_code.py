"""A Slurm job runs the code of its first start in all its starts: with stubs of Slurm, and on a real one."""

import os
from pathlib import Path

import pytest

from tests.launchers.slurm.test_slurm_job import Started
from tests.rigs.jobs import ROOT
from tests.rigs.slurm_cluster import Cluster


def started(folder: Path, code: str = "0", *, checkout: Path = ROOT, **env: str) -> Started:
    """A start of the job in that folder."""
    for name in ("codes", "steps"):
        (folder / name).unlink(missing_ok=True)
    return Started(folder, code, **{"KEEP_CODE": "1", "RANKUP": str(checkout), **env})


def copies(folder: Path, run: str = "slurm-7") -> list[Path]:
    """The copies of code in a run's folder, each once."""
    return [path for path in (folder / "runs" / run / "code").iterdir() if not path.is_symlink()]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout that a test may edit, of what a job copies."""
    made = tmp_path / "checkout"
    for pattern in ("slurm/*.py", "slurm/*.sh", "rankup/**/*.py", "train/main.py"):
        for path in ROOT.glob(pattern):
            copy = made / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(path.read_text())
    return made


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A user's folder, with code, data beside it, and an environment."""
    folder = tmp_path / "mine"
    for name, text in {
        "job.py": "RATE = 1\n", "pkg/model.py": "WIDTH = 1\n", "pkg/words.txt": "a b c\n", "data/big.bin": "0" * 9999,
        "env/lib/site.py": "",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_slurm_job_runs_a_copy_of_the_code_at_its_first_start(mine: Path, checkout: Path) -> None:
    job = started(mine, "0", checkout=checkout)
    code, said = job.run("--workload", "job:build")
    (kept,) = copies(mine)
    assert code == 0, said
    assert f"every start of this job runs the code that is here now, kept in {kept}" in said
    (step,) = job.trained()
    assert step.endswith(f"{kept}/slurm/task.sh --nproc 1 {kept}/train/main.py train --workload job:build")
    assert kept == mine / "runs" / "slurm-7" / "code" / "slurm-7"
    assert (kept / "train" / "main.py").read_text() == (checkout / "train" / "main.py").read_text()
    here = kept / "here"
    assert (here / "pkg" / "model.py").read_text() == "WIDTH = 1\n"
    assert not (here / "pkg" / "model.py").is_symlink()
    # What is no code is not copied, and is there all the same
    assert (here / "pkg" / "words.txt").resolve() == mine / "pkg" / "words.txt"
    assert {name for name in ("data", "env", "runs") if (here / name).is_symlink()} == {"data", "env", "runs"}


def test_slurm_requeue_runs_the_code_of_the_first_start_and_says_what_was_edited(mine: Path, checkout: Path) -> None:
    started(mine, "143", checkout=checkout).run()
    (kept,) = copies(mine)
    (checkout / "train" / "main.py").write_text("raise SystemExit('edited')\n")
    (mine / "pkg" / "model.py").write_text("WIDTH = 2\n")
    (mine / "more.py").write_text("")
    (mine / "job.py").unlink()
    (mine / "state").write_text("Restarts=1 JobState=RUNNING\n")
    again = started(mine, "0", checkout=checkout, SLURM_RESTART_COUNT="1")
    code, said = again.run()
    assert code == 0, said
    assert copies(mine) == [kept]
    assert f"{kept}/slurm/task.sh --nproc 1 {kept}/train/main.py train" in again.trained()[0]
    assert (kept / "here" / "pkg" / "model.py").read_text() == "WIDTH = 1\n"
    assert (
        f"this start runs the code of the first, {kept}; not what is there by now: here/pkg/model.py has changed, "
        "train/main.py has changed, here/more.py is new, here/job.py is gone"
    ) in said


def test_slurm_requeue_without_an_edit_says_nothing_of_the_code(mine: Path, checkout: Path) -> None:
    assert "every start of this job" in started(mine, "143", checkout=checkout).run("--name", "mine")[1]
    (mine / "state").write_text("Restarts=1 JobState=RUNNING\n")
    said = started(mine, "0", checkout=checkout, SLURM_RESTART_COUNT="1").run("--name", "mine")[1]
    assert "the code" not in said


def test_slurm_job_that_is_submitted_anew_runs_new_code_and_says_what_differs(mine: Path, checkout: Path) -> None:
    words = ("--run-dir=results", "--name", "mine")
    started(mine, "0", checkout=checkout).run(*words)
    (mine / "job.py").write_text("RATE = 2\n")
    other = started(mine, "0", checkout=checkout, SLURM_JOB_ID="8")
    (mine / "state").write_text("Restarts=0 JobState=RUNNING\n")
    code, said = other.run(*words)
    assert code == 0, said
    assert "the run was at last trained by job 7, with other code: here/job.py has changed" in said
    code_of = mine / "results" / "mine" / "code"
    texts = [(code_of / f"slurm-{job}" / "here" / "job.py").read_text() for job in (7, 8)]
    assert texts == ["RATE = 1\n", "RATE = 2\n"]
    assert "with other code" not in started(mine, "0", checkout=checkout, SLURM_JOB_ID="9").run(*words)[1]


def test_slurm_script_in_the_current_folder_is_run_from_the_copy(mine: Path, checkout: Path) -> None:
    for script in ("job.py", str(mine / "job.py")):
        job = started(mine, "0", checkout=checkout, SCRIPT=f"--max-restarts 1 {script}")
        assert job.run("--name", "x.py", "--lr", "1")[0] == 0
        (kept,) = copies(mine)
        assert job.trained()[0].endswith(f"--max-restarts 1 {kept}/here/job.py --name x.py --lr 1")


def test_slurm_modules_of_the_current_folder_are_those_of_the_copy(mine: Path, checkout: Path) -> None:
    """As a rank looks for them: by the folder that the job names, and by a PYTHONPATH that names the current one."""
    (mine / "probe").write_text('echo "$RANKUP_CODE $PYTHONPATH $RANKUP" > "$STUB/seen"\n')
    paths = os.pathsep.join([str(mine), "/elsewhere", "."])
    job = started(mine, "0", checkout=checkout, PYTHONPATH=paths)
    code, said = job.run()
    assert code == 0, said
    (kept,) = copies(mine)
    here = kept / "here"
    assert job.lines("seen") == [f"{here} {here}{os.pathsep}/elsewhere{os.pathsep}{here} {kept}"]


def test_slurm_job_in_the_checkout_itself_copies_its_other_python_files_too(checkout: Path) -> None:
    (checkout / "mine.py").write_text("RATE = 1\n")
    (checkout / ".venv" / "lib").mkdir(parents=True)
    assert started(checkout, "0", checkout=checkout).run("--workload", "mine:build")[0] == 0
    (kept,) = copies(checkout)
    assert (kept / "mine.py").read_text() == "RATE = 1\n"
    assert (kept / ".venv").resolve() == checkout / ".venv"
    assert not (kept / "train").is_symlink()


def test_slurm_folder_with_too_many_files_is_not_copied_and_the_checkout_is(mine: Path, checkout: Path) -> None:
    (mine / "large.py").write_text("#" * 10_000_001)
    code, said = started(mine, "0", checkout=checkout).run()
    assert (code, f"{mine} has more than 2000 Python files, or 10 MB of them: they are not kept" in said) == (0, True)
    (kept,) = copies(mine)
    assert {path.name for path in kept.iterdir()} == {"rankup", "slurm", "train"}


def test_slurm_code_is_not_copied_where_that_is_not_wanted_or_not_possible(mine: Path, checkout: Path) -> None:
    assert started(mine, "0", checkout=checkout, KEEP_CODE="").run()[0] == 0
    assert not (mine / "runs").exists()
    (mine / "runs").write_text("no folder")
    code, said = started(mine, "0", checkout=checkout).run()
    assert code == 0
    assert f"the code can't be kept in {mine}/runs/slurm-7/code" in said
    assert "each start runs the checkout as it is then" in said
    (mine / "runs").unlink()
    started(mine, "0", checkout=checkout, DOCTOR="only").run()
    assert not (mine / "runs").exists()


WORKLOAD = """
import torch
from train.workloads import images

def build(config):
    print("workload of SPEED")
    return images.build(config)
"""


@pytest.mark.timeout(1200)
def test_slurm_requeued_job_trains_with_its_users_code_of_the_first_start(cluster: Cluster, tmp_path: Path) -> None:
    cluster.idle()
    (tmp_path / "mine.py").write_text(WORKLOAD.replace("SPEED", "yesterday"))
    line = "--workload mine:build --dataset digits --model mlp --max-steps 100000 --run-dir runs --log-every-steps 5"
    job = cluster.submit(tmp_path, line)
    run = f"slurm-{job.number}"
    job.wait_for_step(50, run)
    (tmp_path / "mine.py").write_text("an edit that is no Python\n")
    job.cancel("--batch", "--signal=USR1")
    job.wait_for_text("requeued at step")
    job.go_on()
    job.wait_for_text("resumed from step")
    job.cancel()
    assert job.wait() == "CANCELLED"
    cluster.idle()
    assert "not what is there by now: here/mine.py has changed" in job.output, job.log()
    assert "workload of yesterday" in job.output.partition("resumed from step")[0].rpartition("requeued at step")[2]
