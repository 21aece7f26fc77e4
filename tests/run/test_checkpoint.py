"""What a checkpoint contains, how damage is found, and how a job resumes from it."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rankup.loop.settings import FORMAT
from rankup.state.copies import list_copies
from tests.job.test_loop import ran
from tests.rigs.checkpoints import (
    find_problem,
    fingerprint,
    flip,
    load_checkpoint,
    load_newest,
    newest,
    save,
    steps,
    train,
)
from tests.rigs.fork_server import Forks
from tests.rigs.jobs import result


def rewrite(path: Path, **changes: Any) -> None:
    """Change fields of state.json, and the manifest's digest with them, as another version of the program would."""
    state, manifest = (json.loads((path / name).read_text()) for name in ("state.json", "manifest.json"))
    (path / "state.json").write_text(json.dumps(state | changes))
    manifest["files"]["state.json"] = fingerprint((path / "state.json").read_bytes())
    (path / "manifest.json").write_text(json.dumps(manifest))


MODEL, MANIFEST = "model.safetensors", "manifest.json"
DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "manifest removed": (lambda p: (p / MANIFEST).unlink(), f"{MANIFEST} is missing"),
    "manifest of something else": (lambda p: (p / MANIFEST).write_text("[1]\n"), f"{MANIFEST} is damaged"),
    "flipped": (lambda p: flip(p / MODEL, 100), f"{MODEL} does not match its digest"),
    "truncated": (lambda p: os.truncate(p / MODEL, 50), f"{MODEL} has 50 bytes instead of "),
    "removed": (lambda p: (p / "tree.json").unlink(), "tree.json is missing"),
    "a directory": (lambda p: ((p / "state.json").unlink(), (p / "state.json").mkdir()), "can't be read (Is a direct"),
    "a broken link": (lambda p: (shutil.rmtree(p), p.symlink_to("gone")), f"{MANIFEST} is missing"),
    "a link to itself": (lambda p: (shutil.rmtree(p), p.symlink_to(p)), "can't be read (Too many levels of symbo"),
    "a field of another type": (lambda p: rewrite(p, epoch="2"), "its files don't fit together (state.json: epoch "),
    "a list for a dict": (lambda p: rewrite(p, line=[]), "its files don't fit together (state.json: line is []"),
    "lists of other lengths": (lambda p: rewrite(p, streams=[1]), "its files don't fit together (state.json: streams"),
    "a pass without its place": (lambda p: rewrite(p, cycles=[[1]]), "its files don't fit together (state.json: cycle"),
    "ranks without a step": (lambda p: rewrite(p, world_sizes=[[3]]), "its files don't fit together (state.json: worl"),
    "one of two flags": (lambda p: rewrite(p, flags={"a": [[1, 2]]}), "its files don't fit together (state.json: flag"),
    "a text for a metric": (lambda p: rewrite(p, metrics={"a": "1"}), "its files don't fit together (state.json: metr"),
    "a line without a step": (lambda p: rewrite(p, line={}), "its files don't fit together (state.json: line is {}"),
    "null for a dict": (lambda p: rewrite(p, built=None), "its files don't fit together (state.json: built is None"),
    "state of another step": (lambda p: rewrite(p, step=15), "its name says step 20, its state 15"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_checkpoint_is_skipped_and_reported(tmp_path: Path, damage: str) -> None:
    save(tmp_path, 10)
    path = save(tmp_path, 20)
    harm, why = DAMAGE[damage]
    harm(path)
    step, said = newest(tmp_path)
    assert step == 10
    assert len(said) == 1
    assert said[0].startswith(f"checkpoint step-00000020 was skipped: {why}")
    assert load_checkpoint((tmp_path / "step-00000010").rename(tmp_path / "best")).step == 10  # any name is fine


@pytest.mark.parametrize("name", ["/etc/hostname", "../secret", "shards/secret", "..", ""])
def test_manifest_with_a_path_outside_is_refused(tmp_path: Path, name: str) -> None:
    """Files that a manifest names are read, and are copied to the run's mirror."""
    path = save(tmp_path, 10)
    (path / "shards").mkdir()
    for secret in (tmp_path / "secret", path / "shards" / "secret"):
        secret.write_text("secret")
    manifest = json.loads((path / MANIFEST).read_text())
    manifest["files"][name] = fingerprint(b"secret")
    (path / MANIFEST).write_text(json.dumps(manifest))
    assert find_problem(path) == f"{MANIFEST} is damaged"


def test_folder_without_a_checkpoint_gives_none(tmp_path: Path) -> None:
    assert load_newest(tmp_path / "not there", print) is None
    (tmp_path / ".writing-step-00000010-1").mkdir()
    (tmp_path / "step-10").mkdir()
    (tmp_path / "step-00000010").write_text("a file")
    assert load_newest(tmp_path, print) is None


def test_steps_are_sorted_as_numbers(tmp_path: Path) -> None:
    for step in (99_999_999, 100_000_000):
        save(tmp_path, step, keep=1)
    found = load_newest(tmp_path, print)
    assert found is not None
    assert found.step == 100_000_000
    assert [path.name for path in list_copies(tmp_path)] == ["step-100000000"]


def test_job_resumes_from_the_newest_undamaged_checkpoint(forks: Forks, tmp_path: Path) -> None:
    forks.ends(*train(tmp_path / "undisturbed"), world_size=2)
    run = tmp_path / "run"
    stop = {"PROBE": json.dumps({"where": "loss", "call": 22, "rank": 1, "signal": "SIGTERM"})}
    output = forks.ends(*train(run), world_size=2, env=stop, code=143)
    last = list_copies(run / "checkpoints")[-1]
    flip(last / "optimizer.safetensors", 500)
    output = forks.ends(*train(run), world_size=2)
    assert f"checkpoint {last.name} was skipped: " in output
    assert "resumed from step-00000016" in output
    assert result(run)["digest"] == result(tmp_path / "undisturbed")["digest"]


def test_job_with_only_damaged_checkpoints_is_refused_until_fresh(forks: Forks, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert forks.run(*train(run, "--max-steps", "8"), world_size=2)[0] == [0, 0]
    flip(run / "checkpoints" / "step-00000008" / "model.safetensors", 100)
    output = forks.ends(*train(run), world_size=2, code=2)
    assert output.count("only damaged ones: checkpoint step-00000008: model.safetensors does not match its digest") == 1
    assert "--fresh" in output
    assert steps(run / "checkpoints") == [8]
    forks.ends(*train(run, "--fresh"), world_size=2)
    assert len(list(run.glob("before-*/checkpoints/step-00000008"))) == 1


def test_five_steps_and_five_more_equal_ten_to_the_bit(forks: Forks, tmp_path: Path) -> None:
    more = ("--optimizer", "adamw", "--accumulate", "2", "--warmup-steps", "4")
    for run, parts in (("whole", ("10",)), ("parts", ("5", "10"))):
        for part in parts:
            output = forks.ends(*train(tmp_path / run, "--max-steps", part, *more), world_size=2)
    assert "resumed from step-00000005" in output
    whole, parts_ = (tmp_path / run / "checkpoints" / "step-00000010" for run in ("whole", "parts"))
    for name in ("model.safetensors", "optimizer.safetensors", "tree.json"):
        assert (whole / name).read_bytes() == (parts_ / name).read_bytes()
    assert {file.suffix for file in whole.iterdir()} == {".json", ".safetensors"}
    state = json.loads((whole / "state.json").read_text())
    assert {"format", "step", "evaluated", "config", "world_size", "versions", "data"} <= state.keys()


def test_checkpoint_of_another_format_gives_code_2_and_one_line(forks: Forks, tmp_path: Path) -> None:
    """It is refused although an older checkpoint would fit."""
    run = tmp_path / "run"
    forks.ends(*train(run, "--max-steps", "8", "--save-every-steps", "4"), world_size=2)
    assert steps(run / "checkpoints") == [4, 8]
    path = run / "checkpoints" / "step-00000008"
    rewrite(path, format=FORMAT + 1)
    output = forks.ends(*train(run), world_size=2, code=2)
    assert output.count(f"error: checkpoint: {path} must be of format {FORMAT}, got format {FORMAT + 1}. ") == 1, output
    forks.ends("evaluate", *train(run)[1:3], *train(run)[-4:], code=2)


def test_checkpoint_that_changes_between_its_verification_and_its_use_is_not_taken(
    forks: Forks, tmp_path: Path
) -> None:
    text = (
        "import os, pathlib, torch, rankup\njob, model = rankup.init('run'), torch.nn.Linear(4, 1)\n"
        "for path in pathlib.Path('run/checkpoints').glob('*/model.safetensors') if os.environ.get('HARM') else ():\n"
        "    with path.open('r+b') as file:\n        file.seek(-4, 2)\n        file.write(b'1234')\n"
        "job.track(model=model)\nfor _ in job.steps(4 if os.environ.get('HARM') else 2):\n    with job.step():\n"
        "        with torch.no_grad():\n            model.weight.add_(1)\njob.finish()\n"
    )
    ran(forks, tmp_path, text)
    output = ran(forks, tmp_path, text, code=2, HARM="1")
    assert "must stay as it is while a run resumes from it, got a change. Start the job again." in output
