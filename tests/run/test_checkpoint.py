"""What a checkpoint holds, how damage is found, and how a job goes on from it."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import nn

from rankup.state.copies import find_problem, fingerprint, list_copies
from tests.rigs.checkpoints import (
    SETTINGS,
    flip,
    load_newest,
    newest,
    save,
    save_checkpoint,
    steps,
    train,
    training_state,
)
from tests.rigs.fork_server import Forks
from tests.rigs.jobs import result
from train.run import weights

FILES = ("model.safetensors", "optimizer.safetensors", "tree.json", "state.json", "manifest.json")


# What is in it ------------------------------------------------------------------------------------------------


def test_checkpoint_of_two_ranks_has_plain_names_and_loads_anywhere(forks: Forks, tmp_path: Path) -> None:
    run = tmp_path / "run"
    forks.ends(*train(run, "--max-steps", "3"), world_size=2)
    path = run / "checkpoints" / "step-00000003"
    assert not [file for file in path.iterdir() if file.suffix not in (".json", ".safetensors")]
    loaded = load_file(path / "model.safetensors")
    plain = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(), nn.Linear(16, 4))
    plain.load_state_dict(loaded)
    nn.DataParallel(plain).module.load_state_dict(loaded)
    assert weights.digest(plain.state_dict()) == result(run)["digest"]
    state = json.loads((path / "state.json").read_text())
    assert {"format", "step", "evaluated", "config", "world_size", "random", "versions", "data"} <= state.keys()


# Damage -------------------------------------------------------------------------------------------------------


def empty_directory(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()


def half_written(path: Path) -> None:
    (path / "manifest.json").unlink()
    (path / "state.json").unlink()


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "empty directory": (empty_directory, "manifest.json is missing"),
    "half written": (half_written, "manifest.json is missing"),
    "manifest rewritten": (lambda p: (p / "manifest.json").write_text("{}\n"), "manifest.json is damaged"),
    "manifest of something else": (lambda p: (p / "manifest.json").write_text("[1]\n"), "manifest.json is damaged"),
    "manifest empty": (lambda p: (p / "manifest.json").write_text(""), "manifest.json is damaged"),
    "model swapped": (lambda p: shutil.copy(p / "tree.json", p / "model.safetensors"), "model.safetensors has "),
} | {
    f"{name} {what}": (damage, why)
    for name in FILES[:4]
    for what, damage, why in (
        ("flipped", lambda p, n=name: flip(p / n, (p / n).stat().st_size // 2), f"{name} does not match its digest"),
        ("truncated", lambda p, n=name: os.truncate(p / n, (p / n).stat().st_size - 1), f"{name} has "),
        ("empty", lambda p, n=name: os.truncate(p / n, 0), f"{name} has 0 bytes instead of "),
        ("removed", lambda p, n=name: (p / n).unlink(), f"{name} is missing"),
        ("a directory", lambda p, n=name: ((p / n).unlink(), (p / n).mkdir()), "can't be read (Is a directory)"),
    )
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_checkpoint_is_passed_over_and_said(tmp_path: Path, damage: str) -> None:
    save(tmp_path, 10)
    path = save(tmp_path, 20)
    harm, why = DAMAGE[damage]
    harm(path)
    step, said = newest(tmp_path)
    assert step == 10
    assert len(said) == 1
    assert said[0].startswith(f"checkpoint step-00000020 was passed over: {why}")


@pytest.mark.parametrize("name", ["/etc/hostname", "../secret", "shards/secret", "..", ""])
def test_manifest_names_no_file_elsewhere(tmp_path: Path, name: str) -> None:
    """What it names is read, and copied to where the run is mirrored."""
    path = save(tmp_path, 10)
    (path / "shards").mkdir()
    for secret in (tmp_path / "secret", path / "shards" / "secret"):
        secret.write_text("secret")
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"][name] = fingerprint(b"secret")
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert find_problem(path) == "manifest.json is damaged"


def test_no_checkpoint_is_none(tmp_path: Path) -> None:
    assert load_newest(tmp_path / "not there", print) is None
    (tmp_path / ".writing-step-00000010-1").mkdir()
    (tmp_path / "step-10").mkdir()
    (tmp_path / "step-00000010").write_text("a file")
    assert load_newest(tmp_path, print) is None


def test_steps_are_ordered_as_numbers(tmp_path: Path) -> None:
    for step in (99_999_999, 100_000_000):
        save_checkpoint(tmp_path, training_state(step), {}, keep=1)
    found = load_newest(tmp_path, print)
    assert found is not None
    assert found.step == 100_000_000
    assert [path.name for path in list_copies(tmp_path)] == ["step-100000000"]


# Resuming -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("harm", ["flipped", "empty directory"])
def test_job_resumes_from_the_newest_good_one_to_the_same_weights(forks: Forks, tmp_path: Path, harm: str) -> None:
    output = forks.ends(*train(tmp_path / "undisturbed"), world_size=2)
    run = tmp_path / "run"
    stop = {"PROBE": json.dumps({"where": "loss", "call": 22, "rank": 1, "signal": "SIGTERM"})}
    output = forks.ends(*train(run), world_size=2, env=stop, code=143)
    last = list_copies(run / "checkpoints")[-1]
    flip(last / "optimizer.safetensors", 500) if harm == "flipped" else empty_directory(last)
    output = forks.ends(*train(run), world_size=2)
    assert f"checkpoint {last.name} was passed over: " in output
    assert "resumed from step-00000016" in output
    assert result(run)["digest"] == result(tmp_path / "undisturbed")["digest"]


def test_job_with_damaged_checkpoints_only_is_refused_until_fresh(forks: Forks, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert forks.run(*train(run, "--max-steps", "8"), world_size=2)[0] == [0, 0]
    flip(run / "checkpoints" / "step-00000008" / "model.safetensors", 100)
    output = forks.ends(*train(run), world_size=2, code=2)
    assert output.count("only damaged ones: checkpoint step-00000008: model.safetensors does not match its digest") == 1
    assert "--fresh" in output
    assert steps(run / "checkpoints") == [8]
    forks.ends(*train(run, "--fresh"), world_size=2)
    assert len(list(run.glob("before-*/checkpoints/step-00000008"))) == 1


@pytest.mark.parametrize("more", [(), ("--optimizer", "adamw", "--accumulate", "2", "--warmup-steps", "4")])
def test_five_steps_and_five_more_equal_ten_to_the_bit(forks: Forks, tmp_path: Path, more: tuple[str, ...]) -> None:
    for run, parts in (("whole", ("10",)), ("parts", ("5", "10"))):
        for part in parts:
            output = forks.ends(*train(tmp_path / run, "--max-steps", part, *more), world_size=2)
    assert "resumed from step-00000005" in output
    whole, parts_ = (tmp_path / run / "checkpoints" / "step-00000010" for run in ("whole", "parts"))
    for name in ("model.safetensors", "optimizer.safetensors", "tree.json"):
        assert (whole / name).read_bytes() == (parts_ / name).read_bytes()


@pytest.mark.parametrize(("first", "then"), [(1, 2), (2, 1)])
def test_another_world_size_goes_on_from_rank_0s_disk_alone(
    forks: Forks, tmp_path: Path, first: int, then: int
) -> None:
    """Each rank has a run directory of its own, as on nodes without a shared disk."""
    folders = [tmp_path / f"node{rank}" for rank in range(2)]
    for folder in folders:
        folder.mkdir()
    arguments = ("train", *SETTINGS, "--name", "run")
    output = forks.ends(*arguments, "--max-steps", "12", world_size=first, cwds=folders)
    output = forks.ends(*arguments, "--max-steps", "20", world_size=then, cwds=folders)
    assert "resumed from step-00000012" in output
    assert f"world size was {first}, is {then}: the run goes on, but its last bits will differ" in output
    assert result(folders[0] / "runs" / "run")["step"] == 20
    assert not (folders[1] / "runs" / "run" / "checkpoints").exists()
    assert not (folders[1] / "runs" / "run" / "metrics.jsonl").exists()
