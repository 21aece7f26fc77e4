"""The typed state of a checkpoint comes back as it was, and what this program can't go on from is refused by name."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from rankup.errors import UserError
from rankup.loop.record import FORMAT, RANDOM_SCHEME, Position, write_record
from rankup.state.copies import find_problem, fingerprint, list_copies
from tests.rigs.checkpoints import load_checkpoint, load_newest, save_checkpoint, training_state
from tests.rigs.fork_server import Forks

# 8 steps an epoch
SETTINGS = (
    "train", "--workload", "tests.rigs.faulting_workload:build", "--batch-size", "8", "--schedule", "constant",
    "--tensorboard=false", "--join-timeout-s", "30", "--name", "run",
)


def save(directory: Path, step: int, **fields: Any) -> Path:
    model = {"weight": torch.full((3,), float(step))}
    return save_checkpoint(directory, training_state(step, **fields), model, keep=99)


def rewrite(path: Path, **changes: Any) -> None:
    """Change fields of state.json as another version of the program would have written them: every digest fits."""
    state, manifest = (json.loads((path / name).read_text()) for name in ("state.json", "manifest.json"))
    (path / "state.json").write_text(json.dumps(state | changes))
    manifest["files"]["state.json"] = fingerprint((path / "state.json").read_bytes())
    (path / "manifest.json").write_text(json.dumps(manifest))


def test_position_comes_back_as_it_was() -> None:
    position = Position(7, 2, [3], metrics={"loss": 0.1}, line={"step": 7, "loss": float("inf")})
    who = {"run": "0123456789abcdef", "attempt": "a", "written_by": "rank 0 on node0"}
    record = json.loads(write_record(position, seed=3, world_size=2, about={"data": "points"}, **who))
    assert Position.of(record) == position
    assert (record["random"], record["versions"]["torch"]) == (RANDOM_SCHEME, torch.__version__)
    assert {**record, **who, "seed": 3, "world_size": 2, "data": "points"} == record


# Another format, another scheme -------------------------------------------------------------------------------


def test_another_format_is_refused_by_name_though_an_older_checkpoint_would_fit(tmp_path: Path) -> None:
    save(tmp_path, 10)
    rewrite(save(tmp_path, 20), format=FORMAT + 1)
    expected = rf"step-00000020 must be of format {FORMAT}, got format {FORMAT + 1}\. .*--fresh"
    with pytest.raises(UserError, match=expected):
        load_newest(tmp_path, print)
    with pytest.raises(UserError, match=expected):
        load_checkpoint(tmp_path / "step-00000020")
    assert load_checkpoint(tmp_path / "step-00000010").step == 10


def test_state_without_a_run_is_refused_in_one_line(tmp_path: Path) -> None:
    path = save(tmp_path, 10)
    rewrite(path, run="")
    with pytest.raises(UserError, match='must be of a run with an id, got ""'):
        load_checkpoint(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": FORMAT + 1}, f"must be of format {FORMAT}, got format {FORMAT + 1}. "),
        ({"random": "dice"}, f"must draw random numbers by the scheme of this program ({RANDOM_SCHEME}), got another "),
    ],
)
def test_job_that_cannot_go_on_exactly_ends_with_2_and_one_line(
    forks: Forks, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    output = forks.ends(*SETTINGS, "--run-dir", tmp_path, "--max-steps", "8", world_size=2)
    path = tmp_path / "run" / "checkpoints" / "step-00000008"
    rewrite(path, **changes)
    output = forks.ends(*SETTINGS, "--run-dir", tmp_path, "--max-steps", "16", world_size=2, code=2)
    assert output.count(f"error: checkpoint: {path} {message}") == 1, output
    assert "set --fresh to start anew, or another --name" in output
    assert "Traceback" not in output
    forks.ends(*SETTINGS, "--run-dir", tmp_path, "--max-steps", "16", "--fresh", world_size=2)


def test_weights_of_another_scheme_of_random_numbers_still_load(forks: Forks, tmp_path: Path) -> None:
    forks.ends(*SETTINGS, "--run-dir", tmp_path, "--max-steps", "8")
    rewrite(tmp_path / "run" / "checkpoints" / "step-00000008", random="dice")
    forks.ends("evaluate", *SETTINGS[1:3], "--run-dir", tmp_path, "--name", "run")


# The step -----------------------------------------------------------------------------------------------------


def test_copy_under_a_higher_steps_name_is_passed_over_and_said(tmp_path: Path) -> None:
    save(tmp_path, 10)
    save(tmp_path, 20)
    shutil.copytree(tmp_path / "step-00000010", tmp_path / "step-00000030")
    said: list[str] = []
    found = load_newest(tmp_path, said.append)
    assert found is not None
    assert found.step == 20
    assert said == [
        "checkpoint step-00000030 was passed over: "
        "its name says step 30, its manifest says step 10, its state says step 10"
    ]


@pytest.mark.parametrize("file", ["manifest.json", "state.json"])
def test_manifest_or_state_of_another_step_is_passed_over(tmp_path: Path, file: str) -> None:
    save(tmp_path, 10)
    path = save(tmp_path, 20)
    if file == "state.json":
        rewrite(path, step=15)
    else:
        (path / file).write_text((path / file).read_text().replace('"step": 20', '"step": 15'))
    assert "says step 15" in find_problem(path)
    found = load_newest(tmp_path, print)
    assert found is not None
    assert found.step == 10


def test_copy_under_a_name_that_is_no_step_is_as_good_as_the_original(tmp_path: Path) -> None:
    shutil.copytree(save(tmp_path, 10), tmp_path / "best")
    assert load_checkpoint(tmp_path / "best").step == 10


def test_copy_under_a_higher_steps_name_does_not_push_a_good_one_out(tmp_path: Path) -> None:
    for step in (10, 20):
        save(tmp_path, step)
    shutil.copytree(tmp_path / "step-00000010", tmp_path / "step-00000030")
    save_checkpoint(tmp_path, training_state(25), {}, keep=2)
    assert [path.name for path in list_copies(tmp_path)] == ["step-00000020", "step-00000025", "step-00000030"]
