"""The run directory over several attempts: runs are refused, resumed, finished or moved aside, and never mixed up."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from tests.rigs.checkpoints import train
from tests.rigs.fork_server import Forks
from tests.rigs.jobs import MAIN, ROOT, environment, probe, result, status


def finished(forks: Forks, run: Path, *more: str, world_size: int = 1) -> str:
    return forks.ends(*train(run, *more), world_size=world_size)


def contents(run: Path) -> dict[str, bytes]:
    """Return the files that an attempt without a step must not change, and their content."""
    kept = [*run.glob("checkpoints/*/*"), run / "metrics.jsonl", run / "result.json", run / "config.yaml"]
    return {str(path): path.read_bytes() for path in kept if path.exists()}


def test_changed_setting_is_refused_by_name(forks: Forks, tmp_path: Path) -> None:
    run = tmp_path / "run"
    finished(forks, run, "--epochs", "1", world_size=2)
    before, first = contents(run), status(run)
    output = forks.ends(*train(run, "--epochs", "2", "--lr", "0.25", "--options.width", "9"), world_size=2, code=2)
    assert "lr: 0.08 -> 0.25" in output
    assert "options: {} -> {width: 9}" in output
    assert "--fresh" in output
    assert output.count("was begun with other settings") == 1
    assert contents(run) == before
    assert status(run) == first  # a refused command does not end the run


def test_run_extended_in_parts_equals_one_that_had_all_epochs_at_once(
    forks: Forks, tmp_path: Path
) -> None:
    more = ("--num-workers", "1", "--keep", "1", "--save-every-steps", "3", "--log-every-steps", "2")
    finished(forks, tmp_path / "whole", "--epochs", "3")
    run = tmp_path / "run"
    finished(forks, run, "--epochs", "1")
    assert "resumed from step-00000008" in finished(forks, run, "--epochs", "2", *more)
    assert "resumed from step-00000016" in finished(forks, run, "--max-steps", "20")
    assert "resumed from step-00000020" in finished(forks, run, "--epochs", "3")
    assert result(run)["digest"] == result(tmp_path / "whole")["digest"]
    assert result(run)["step"] == 24


def test_fresh_starts_a_new_run_and_keeps_the_earlier_one(forks: Forks, tmp_path: Path) -> None:
    run = tmp_path / "run"
    finished(forks, run, "--epochs", "1", "--fresh")
    assert not list(run.glob("before-*"))  # there was no earlier run
    before = contents(run)
    output = finished(forks, run, "--epochs", "1", "--lr", "0.25", "--fresh", world_size=2)
    assert "resumed" not in output
    (moved,) = run.glob("before-*")
    assert f"the earlier run was moved to {moved}" in output
    assert {path.replace(str(moved), str(run)): data for path, data in contents(moved).items()} == before
    assert next(json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize("epochs", ["2", "1"])
def test_finished_run_says_so_and_changes_no_file(forks: Forks, tmp_path: Path, epochs: str) -> None:
    run = tmp_path / "run"
    finished(forks, run, "--epochs", "2", world_size=2)
    before, first = contents(run), status(run)
    output = finished(forks, run, "--epochs", epochs, world_size=2)
    assert f"{run} is finished: 16 steps, accuracy " in output
    assert "ready after" not in output
    assert contents(run) == before
    assert status(run)["state"] == "finished"
    assert status(run)["attempt"] != first["attempt"]


@pytest.mark.parametrize(("other", "more", "message"), [
    ("data", (), "was trained on made-up points, got other points now"),
    ("model", (), "does not fit this model: "),
    ("model", ("--parallel=fsdp", "--checkpoint-format=sharded"), "does not fit this model: "),
])
def test_other_data_or_model_with_equal_settings_is_refused_in_one_line(
    forks: Forks, tmp_path: Path, other: str, more: tuple[str, ...], message: str
) -> None:
    run, preload = tmp_path / "run", f"{__name__}:other_{other}"
    finished(forks, run, "--epochs", "1", *more, world_size=2)
    output = forks.ends(*train(run, "--epochs", "2", *more), world_size=2, preload=preload, code=2)
    assert message in output


def other_data(**changes: Any) -> None:
    from tests.rigs import faulting_workload

    build, changes = faulting_workload.build, changes or {"data_name": "other points"}
    faulting_workload.build = lambda config: dataclasses.replace(build(config), **changes)


def other_model() -> None:
    other_data(model=nn.Sequential(nn.Linear(8, 4)))


def test_killed_job_never_leaves_the_status_of_an_earlier_success(forks: Forks, tmp_path: Path) -> None:
    run = tmp_path / "run"
    finished(forks, run, "--epochs", "1")
    yesterday = status(run)
    assert (yesterday["state"], yesterday["code"]) == ("finished", 0)
    forks.ends(*train(run, "--epochs", "2"), env=probe("loss", 6, signal="SIGKILL"), code=-9)
    todays = status(run)
    assert todays["state"] == "running"
    assert not (run / "result.json").exists()
    assert (run / "config.yaml").read_text().count("epochs: 2") == 1
    finished(forks, run, "--epochs", "2")
    assert status(run)["state"] == "finished"
    assert len({each["attempt"] for each in (yesterday, todays, status(run))}) == 3


def as_user(number: int, *command: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command as a user without privileges and without an entry in the password file."""
    words = ["unshare", "--user", f"--map-user={number}", f"--map-group={number}", *map(str, command)]
    return subprocess.run(words, env=environment(env), capture_output=True, text=True, timeout=300, cwd=ROOT)


def test_run_dir_that_cannot_be_written_gives_one_line(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs").chmod(0o555)
    done = as_user(65534, sys.executable, MAIN, *train(tmp_path / "runs" / "run"))
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1
    assert f"run_dir: {tmp_path}/runs/run/logs must be writable, got Permission denied" in done.stderr


@pytest.mark.parametrize(
    "where", ["run", "run/logs", "run/checkpoints", "run/status", "run/metrics.jsonl", "run/.lock"]
)
def test_file_or_folder_in_the_way_gives_one_line(forks: Forks, tmp_path: Path, where: str) -> None:
    run = tmp_path / "run"
    path = tmp_path / where
    path.parent.mkdir(exist_ok=True)
    path.mkdir() if path.suffix == ".jsonl" or path.name == ".lock" else path.write_text("in the way")
    codes, output = forks.run(*train(run, "--epochs", "1"), world_size=2)
    assert "Traceback" not in output
    if where == "run/status":  # has only reports, which the training does not need
        assert codes == [0, 0], output
    else:
        assert codes == [2, 2], output
        assert "error: " in output


@pytest.mark.parametrize(
    "name", ["logs/rank-0.log", "metrics.jsonl", "stacks/rank-0.txt", "config.yaml", "status.json"]
)
def test_pipe_in_place_of_a_file_makes_nobody_wait(forks: Forks, tmp_path: Path, name: str) -> None:
    run = tmp_path / "run"
    (run / name).parent.mkdir(parents=True)
    os.mkfifo(run / name)
    forks.run("status", run, timeout_s=60)
    needed = name in ("logs/rank-0.log", "metrics.jsonl")  # the training does not read the others, and may replace them
    codes, output = forks.run(*train(run, "--epochs", "1"), timeout_s=60)
    assert codes == [2 if needed else 0], output
    assert (f"{run / name} must be writable, got a pipe. " in output) == needed
    forks.run("stacks", run, timeout_s=60)


def test_user_without_a_name_and_a_home_can_train(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir(mode=0o555)
    done = as_user(12345, sys.executable, MAIN, *train(tmp_path / "run", "--epochs", "1", "--tensorboard=true"),
                   HOME=str(tmp_path / "home"), USER="", LOGNAME="", PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert list((tmp_path / "home").iterdir()) == []
