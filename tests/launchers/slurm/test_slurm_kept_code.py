"""A Slurm job runs the code of its first start in all its starts. By stubs of Slurm; a real one: test_slurm_ends.py."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.launchers.slurm.test_slurm_job import Started
from tests.rigs.jobs import ROOT


def started(folder: Path, code: str = "0", *, checkout: Path = ROOT, **env: str) -> Started:
    """A start of the job in that folder."""
    for name in ("codes", "steps"):
        (folder / name).unlink(missing_ok=True)
    return Started(folder, code, **{"KEEP_CODE": "1", "RANKUP": str(checkout), **env})


def git_folder(folder: Path, files: dict[str, str]) -> Path:
    """A git checkout that tracks these files."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    subprocess.run(["git", "add", "."], cwd=folder, check=True)
    return folder


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout that a test may edit, of what a job copies."""
    paths = [path for pattern in ("slurm/*.sh", "rankup/**/*.py", "train/main.py") for path in ROOT.glob(pattern)]
    return git_folder(tmp_path / "checkout", {str(path.relative_to(ROOT)): path.read_text() for path in paths})


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A user's folder: code and words that git tracks, a file that is new, and data that git does not know."""
    files = {"job.py": "RATE = 1\n", "pkg/model.py": "WIDTH = 1\n", "pkg/words.txt": "a b c\n", ".gitignore": "env\n"}
    folder = git_folder(tmp_path / "mine", files)
    for name in ("new.py", "data.bin", "env/lib.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("")
    return folder


def test_slurm_job_runs_a_copy_of_the_code_at_its_first_start(mine: Path, checkout: Path) -> None:
    job = started(mine, checkout=checkout)
    code, said = job.run("--workload", "job:build")
    kept = mine / "runs" / "slurm-7" / "code" / "slurm-7"
    assert (code, f"every start of this job runs the code that is here now, kept in {kept}" in said) == (0, True), said
    (step,) = job.trained()
    assert step.endswith(f"{kept}/slurm/task.sh --nproc 1 {kept}/train/main.py train --workload job:build")
    assert (kept / "train" / "main.py").read_text() == (checkout / "train" / "main.py").read_text()
    copied = {str(path.relative_to(kept / "here")) for path in (kept / "here").rglob("*") if path.is_file()}
    assert copied == {"job.py", "pkg/model.py", "pkg/words.txt", ".gitignore", "new.py"}


def test_slurm_requeue_runs_the_code_of_the_first_start_and_says_what_was_edited(mine: Path, checkout: Path) -> None:
    started(mine, "143", checkout=checkout).run()
    kept = mine / "runs" / "slurm-7" / "code" / "slurm-7"
    (checkout / "train" / "main.py").write_text("raise SystemExit('edited')\n")
    (mine / "pkg" / "model.py").write_text("WIDTH = 2\n")
    (mine / "job.py").unlink()
    (mine / "state").write_text("Restarts=1 JobState=RUNNING\n")
    again = started(mine, checkout=checkout, SLURM_RESTART_COUNT="1")
    code, said = again.run()
    assert code == 0, said
    assert [path.name for path in kept.parent.iterdir()] == ["slurm-7"]
    assert f"{kept}/slurm/task.sh --nproc 1 {kept}/train/main.py train" in again.trained()[0]
    assert (kept / "here" / "pkg" / "model.py").read_text() == "WIDTH = 1\n"
    assert f"this start runs the code of the first, {kept}; not what is there by now: " in said
    assert "Only in the old/here: job.py" in said
    for name in ("here/pkg/model.py", "train/main.py"):
        assert f"Files the old/{name} and the new/{name} differ" in said


def test_slurm_requeue_without_an_edit_says_nothing_of_the_code(mine: Path, checkout: Path) -> None:
    assert "every start of this job" in started(mine, "143", checkout=checkout).run("--name", "mine")[1]
    (mine / "state").write_text("Restarts=1 JobState=RUNNING\n")
    said = started(mine, checkout=checkout, SLURM_RESTART_COUNT="1").run("--name", "mine")[1]
    assert "the code" not in said


def test_slurm_job_that_is_submitted_anew_runs_new_code_and_says_what_differs(mine: Path, checkout: Path) -> None:
    words = ("--run-dir=results", "--name", "mine")
    started(mine, checkout=checkout).run(*words)
    (mine / "job.py").write_text("RATE = 2\n")
    code, said = started(mine, checkout=checkout, SLURM_JOB_ID="8").run(*words)
    assert code == 0, said
    assert "the run was at last trained by slurm-7, with other code: Files the old/here/job.py and the new" in said
    code_of = mine / "results" / "mine" / "code"
    texts = [(code_of / f"slurm-{job}" / "here" / "job.py").read_text() for job in (7, 8)]
    assert texts == ["RATE = 1\n", "RATE = 2\n"]
    assert "with other code" not in started(mine, checkout=checkout, SLURM_JOB_ID="9").run(*words)[1]


def test_slurm_script_and_modules_of_the_current_folder_are_those_of_the_copy(mine: Path, checkout: Path) -> None:
    """As a rank looks for them: by the folder that the job names, and by a PYTHONPATH that names the current one."""
    (mine / "probe").write_text('echo "$RANKUP_CODE $PYTHONPATH $RANKUP" > "$STUB/seen"\n')
    paths = os.pathsep.join([str(mine), "/elsewhere", "."])
    kept = mine / "runs" / "slurm-7" / "code" / "slurm-7"
    here = kept / "here"
    for script in ("job.py", str(mine / "job.py")):
        job = started(mine, checkout=checkout, PYTHONPATH=paths, SCRIPT=f"--max-restarts 1 {script}")
        assert job.run("--name", "x.py", "--lr", "1")[0] == 0
        assert job.trained()[0].endswith(f"--max-restarts 1 {here}/job.py --name x.py --lr 1")
        assert job.lines("seen") == [f"{here} {here}{os.pathsep}/elsewhere{os.pathsep}{here} {kept}"]


def test_slurm_job_in_the_checkout_itself_copies_its_new_python_files_too(checkout: Path) -> None:
    (checkout / "mine.py").write_text("RATE = 1\n")
    (checkout / ".venv" / "lib").mkdir(parents=True)
    assert started(checkout, checkout=checkout).run("--workload", "mine:build")[0] == 0
    kept = checkout / "runs" / "slurm-7" / "code" / "slurm-7"
    assert (kept / "mine.py").read_text() == "RATE = 1\n"
    assert (kept / ".venv").resolve() == checkout / ".venv"


def test_slurm_code_outside_git_runs_as_it_is_then_and_ours_is_kept(checkout: Path, tmp_path: Path) -> None:
    folder = tmp_path / "plain"
    folder.mkdir()
    (folder / "job.py").write_text("")
    job = started(folder, checkout=checkout, SCRIPT="job.py")
    code, said = job.run()
    assert (code, f"the code in {folder} is not kept: it is no git checkout" in said) == (0, True), said
    assert job.trained()[0].endswith("/code/slurm-7/slurm/task.sh --nproc 1 job.py")


def test_slurm_code_is_not_copied_where_that_is_not_wanted_or_not_possible(mine: Path, checkout: Path) -> None:
    assert started(mine, checkout=checkout, KEEP_CODE="").run()[0] == 0
    assert not (mine / "runs").exists()
    (mine / "runs").write_text("no folder")
    code, said = started(mine, checkout=checkout).run()
    assert code == 0
    assert "the code can't be kept in runs/slurm-7/code: each start runs the checkout as it is then" in said
    (mine / "runs").unlink()
    started(mine, checkout=checkout, DOCTOR="only").run()
    assert not (mine / "runs").exists()
