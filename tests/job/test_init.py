"""Which run `rankup.init` opens: the one it names, the one that `rankup launch` names, or one in an object store."""

import json
import sys
from pathlib import Path

import pytest

from tests.job.test_loop import ran
from tests.rigs.fork_server import Forks
from tests.rigs.jobs import ended, start
from tests.rigs.object_store import BUCKET, S3

STEPS = """
import sys, rankup
job, count = rankup.init({}), {{'n': 0}}
job.track(count=count)
for _ in job.steps(3):
    with job.step():
        count['n'] += 1
print('counted', count['n'])
job.finish()
"""


def script(folder: Path, run: str = "") -> Path:
    (folder / "job.py").write_text(STEPS.format(run))
    return folder / "job.py"


@pytest.mark.parametrize(("options", "place"), [
    (["--name=mine"], "runs/mine"),
    (["--run-dir=all"], "all/job"),
    (["--run-dir=all", "--name=mine"], "all/mine"),
    (["--run-dir=all", "--work-dir=elsewhere"], "all/job"),
    (["--work-dir=elsewhere"], "elsewhere/runs/job"),
])
def test_init_without_a_run_takes_that_of_launch(
    options: list[str], place: str, forks: Forks, tmp_path: Path
) -> None:
    output = forks.ends("launch", *options, script(tmp_path), cwds=[tmp_path])
    assert f"finished after 3 steps: {tmp_path / place}/;" in output
    assert [path.parent for path in tmp_path.rglob("run.json")] == [tmp_path / place]
    assert "rankup.init says" not in output


@pytest.mark.parametrize(("option", "said"), [
    ("--name=other", "the run is mine, as rankup.init says, and not runs/other, as launch says"),
    ("--run-dir=.", ""),
    ("--no-fork", ""),  # the user has chosen no run
])
def test_run_of_init_wins_over_launch_in_one_line(option: str, said: str, forks: Forks, tmp_path: Path) -> None:
    name = "job" if option == "--run-dir=." else "mine"
    output = forks.ends("launch", option, script(tmp_path, f"{name!r}"), cwds=[tmp_path])
    assert [line for line in output.splitlines() if "rankup.init says" in line] == ([said] if said else [])
    assert (tmp_path / name / "run.json").exists()


@pytest.mark.parametrize(("hash_seed", "said"), [("random", [0, 1]), ("5", [0, 0])])
def test_random_order_of_sets_is_said_where_it_matters(
    hash_seed: str, said: list[int], tmp_path: Path
) -> None:
    """Without launch, Python's own start decides. A new run of one rank depends on no other process."""
    line = (sys.executable, script(tmp_path))
    found = []
    for _ in said:
        with ended(start(*line, env={"PYTHONHASHSEED": hash_seed}, cwd=tmp_path)) as job:
            assert job.wait() == [0], job.output
        found.append(job.output.count("PYTHONHASHSEED is not set: a set of strings has another order"))
    assert found == said


@pytest.mark.parametrize(("given", "option", "run", "seed"), [
    ("", "", "slurm-7_3", 3), ("", "--name=mine", "mine_3", 3), ("seed=5", "--run-dir=all", "slurm-7_3", 5),
])
def test_init_in_a_task_of_an_array_has_a_run_and_a_seed_of_its_own(
    given: str, option: str, run: str, seed: int, forks: Forks, tmp_path: Path
) -> None:
    """Otherwise all tasks would train the same weights."""
    env = {"SLURM_JOB_ID": "10", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}
    output = forks.ends("launch", *filter(None, [option]), script(tmp_path, given), cwds=[tmp_path], env=env)
    (state,) = tmp_path.rglob("state.json")
    assert (state.parents[2].name, json.loads(state.read_text())["seed"]) == (run, seed)
    assert ("seed 3, the number of this task in an array of jobs" in output) == (not given)


@pytest.mark.parametrize("by_launch", [False, True])
def test_run_of_init_may_be_in_an_object_store(by_launch: bool, s3: S3, forks: Forks, tmp_path: Path) -> None:
    url = f"s3://{BUCKET}/{tmp_path.name}"
    with s3.door() as door:
        for machine in ("one", "two"):
            env = {**door.env, "RANKUP_CACHE": str(tmp_path / machine)}
            line = ["launch", f"--run-dir={url}", "--name=mine"] if by_launch else ["launch"]
            words = script(tmp_path, "" if by_launch else f"'{url}/mine'")
            output = forks.ends(*line, words, cwds=[tmp_path], env=env)
            assert ("counted 3" in output) == (machine == "one")
    assert "no step was left to train, all 3 are done: " in output  # the second machine has found the run
    assert {path.name for path in tmp_path.iterdir()} == {"job.py", "one", "two"}


@pytest.mark.parametrize("by_launch", [False, True])
def test_last_copy_of_a_script_without_finish_reaches_the_store(
    by_launch: bool, s3: S3, forks: Forks, tmp_path: Path
) -> None:
    """Python calls the functions of atexit when no library starts threads any more, not even to look up a host."""
    words = script(tmp_path, f"'s3://{BUCKET}/{tmp_path.name}/mine'")
    words.write_text(words.read_text().replace("job.finish()\n", ""))
    with s3.door() as door:
        env = {**door.env, "RANKUP_CACHE": str(tmp_path / "cache")}
        env["AWS_ENDPOINT_URL"] = env["AWS_ENDPOINT_URL"].replace("127.0.0.1", "localhost")
        if by_launch:
            assert "finished after 3 steps" in forks.ends("launch", words, cwds=[tmp_path], env=env)
        else:
            with ended(start(sys.executable, words, env=env, cwd=tmp_path)) as job:
                assert job.wait() == [0], job.output


@pytest.mark.parametrize(("run", "got"), [
    ("'s3://bucket'", "s3://bucket"), ("'s3://'", "s3://"),
    ("__import__('pathlib').Path('s3://bucket/mine')", "s3:/bucket"),
    ("'gs://key:secret@bucket/mine'", ""),
    ("None", "None"), ("True", "True"), ("b'mine'", "b'mine'"), (r"'mi\0ne'", r"'mi\x00ne'"),
])
def test_address_that_names_no_run_is_refused(run: str, got: str, forks: Forks, tmp_path: Path) -> None:
    output = forks.ends("launch", script(tmp_path, run), cwds=[tmp_path], code=2)
    assert f"rankup.init: run must be a{' folder' if got else 'n address without'}" in output
    assert got in output
    assert "secret" not in output
    assert [path.name for path in tmp_path.iterdir()] == ["job.py"]


def test_launch_refuses_an_address_where_only_a_folder_fits(forks: Forks, tmp_path: Path) -> None:
    output = forks.ends("launch", "--work-dir=s3://b/x", script(tmp_path), cwds=[tmp_path], code=2)
    assert "--work-dir must be a folder of this machine, got s3://b/x." in output
    output = forks.ends("export", "mine", "s3://b/x.pt", cwds=[tmp_path], code=2)
    assert "FILE must be a path on this machine, got s3://b/x.pt." in output


def test_with_finishes_a_script_and_a_second_open_job_is_refused(forks: Forks, tmp_path: Path) -> None:
    text = (
        "import os, signal, sys, rankup\nwith rankup.init(os.environ['RUN']) as job:\n    count = {'n': 0}\n"
        "    job.track(count=count)\n    for step in job.steps(10**6 if job.run_dir.name == 'stops' else 3):\n"
        "        with job.step():\n"
        "            count['n'] += 1\n        if step == 1:\n            eval(os.environ.get('DO', 'None'))\n"
        "print('after', flush=True)\n"
    )
    output = ran(forks, tmp_path, text, ranks=2, code=2, RUN="one", DO="rankup.init('other')")
    assert "rankup.init: the earlier job of this process must have ended, got one that is open" in output
    output = ran(forks, tmp_path, text, ranks=2, code=143, RUN="stops", DO="os.kill(os.getpid(), signal.SIGTERM)")
    assert "after" not in output
    output = ran(forks, tmp_path, text, ranks=2, RUN="whole")
    assert "finished after 3 steps" in output
    assert output.count("after\n") == 2


@pytest.mark.parametrize("end", ["sys.exit(0)", "break"])
def test_script_that_leaves_its_loop_without_finish_ends_in_one_line(end: str, forks: Forks, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import sys, rankup\njob = rankup.init('run')\nfor _ in job.steps(5):\n    with job.step():\n        pass\n"
        f"    if job.step_number == 3:\n        {end}\n"
    )
    output = forks.ends("launch", "--nproc=2", "script.py", cwds=[tmp_path], code=2)
    assert "error: the script must end its loop over job.epochs or job.steps, or call job.finish, got an end" in output
