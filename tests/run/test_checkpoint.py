"""Checkpoints appear whole or not at all and are verified; the last good one is never lost. Full disks, init_from."""

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.rigs.fork_server import Forks
from tests.rigs.jobs import ROOT, result
from tests.rigs.small_filesystems import small_disk
from tests.rigs.training_states import training_state
from train.errors import UserError
from train.run import publish, weights
from train.run.checkpoint import find_problem, list_checkpoints, load_checkpoint, load_newest
from train.run.training_state import unpack

RUNS = int(os.environ.get("RANKUP_RUNS", "30"))
FILES = ("model.pt", "training.pt", "state.json", "manifest.json")


def save(directory: Path, step: int, *, keep: int = 99, value: float | None = None, **more: Any) -> Path:
    model = {"weight": torch.full((3, 2), float(step) if value is None else value)}
    state = training_state(step, optimizer={"state": {0: {"momentum_buffer": torch.ones(3)}}})
    return publish.save_checkpoint(directory, state, model, keep=keep, **more)


def newest(directory: Path) -> tuple[int, list[str]]:
    """The step that would be resumed, and what was said."""
    said: list[str] = []
    found = load_newest(directory, said.append)
    assert found is not None
    assert float(found.model["weight"][0, 0]) == found.step
    return found.step, said


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << (position % 8)
    path.write_bytes(data)


# What is in it ------------------------------------------------------------------------------------------------


def test_checkpoint_loads_with_the_defaults_of_torch_load(tmp_path: Path) -> None:
    path = save(tmp_path, 7)
    loaded = torch.load(path / "model.pt")  # weights_only is the default
    assert loaded["weight"].tolist() == [[7.0, 7.0]] * 3
    assert torch.load(path / "training.pt")["optimizer"]["state"][0]["momentum_buffer"].tolist() == [1.0] * 3


def test_checkpoint_of_two_ranks_has_plain_names_and_loads_anywhere(forks: Forks, tmp_path: Path) -> None:
    run = tmp_path / "run"
    codes, output = forks.run(*train(run, "--max-steps", "3"), world_size=2)
    assert codes == [0, 0], output
    path = run / "checkpoints" / "step-00000003"
    for name in ("model.pt", "training.pt"):
        torch.load(path / name)
    loaded = torch.load(path / "model.pt")
    plain = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(), nn.Linear(16, 4))
    plain.load_state_dict(loaded)
    nn.DataParallel(plain).module.load_state_dict(loaded)
    assert weights.digest(plain.state_dict()) == result(run)["digest"]
    state = json.loads((path / "state.json").read_text())
    assert {"format", "step", "evaluated", "config", "world_size", "random", "versions", "data"} <= state.keys()


def test_every_rank_reads_onto_the_cpu(tmp_path: Path) -> None:
    # Saved on a device that does not exist here: without map_location this fails as it would fill cuda:0 elsewhere
    torch.save({"weight": torch.ones(2, device="meta")}, tmp_path / "meta.pt")
    assert unpack((tmp_path / "meta.pt").read_bytes())["weight"].shape == (2,)
    path = save(tmp_path, 1)
    assert {t.device.type for t in load_checkpoint(path).model.values()} == {"cpu"}


def test_digest_sees_names_types_shapes_and_bits() -> None:
    state = {"a": torch.zeros(2, 3), "b": torch.zeros((), dtype=torch.int64)}
    digests = {
        weights.digest(state),
        weights.digest({"c": state["a"], "b": state["b"]}),
        weights.digest({**state, "a": torch.zeros(3, 2)}),
        weights.digest({**state, "a": torch.zeros(2, 3, dtype=torch.bfloat16)}),
        weights.digest({**state, "a": -torch.zeros(2, 3)}),
    }
    assert len(digests) == 5
    assert weights.digest({"b": state["b"], "a": state["a"]}) in digests


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
    "model swapped": (lambda p: shutil.copy(p / "training.pt", p / "model.pt"), "model.pt has "),
} | {
    f"{name} {what}": (damage, why)
    for name in FILES[:3]
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


def test_any_flipped_byte_is_found(tmp_path: Path) -> None:
    path = save(tmp_path, 10)
    whole = {name: (path / name).read_bytes() for name in FILES}
    draw = random.Random(0)
    for name in FILES * (RUNS // 10):
        # The manifest is text around digests: not every byte of it matters, those of the digests do
        low = whole[name].find(b'"sha256": "') + 11 if name == "manifest.json" else 0
        position = draw.randrange(low, low + 64) if name == "manifest.json" else draw.randrange(len(whole[name]))
        flip(path / name, position)
        assert find_problem(path) != "", (name, position)
        (path / name).write_bytes(whole[name])
    assert find_problem(path) == ""


def test_all_checkpoints_damaged_is_refused_not_started_anew(tmp_path: Path) -> None:
    for step in (10, 20):
        flip(save(tmp_path, step) / "model.pt", 100)
    with pytest.raises(UserError, match=r"only damaged ones: step-00000020: model.pt .*step-00000010: .*--fresh"):
        load_newest(tmp_path, print)


def test_no_checkpoint_is_none(tmp_path: Path) -> None:
    assert load_newest(tmp_path / "not there", print) is None
    (tmp_path / ".writing-step-00000010-1").mkdir()
    (tmp_path / "step-10").mkdir()
    (tmp_path / "step-00000010").write_text("a file")
    assert load_newest(tmp_path, print) is None


def test_steps_are_ordered_as_numbers(tmp_path: Path) -> None:
    for step in (99_999_999, 100_000_000):
        publish.save_checkpoint(tmp_path, training_state(step), {}, keep=1)
    found = load_newest(tmp_path, print)
    assert found is not None
    assert found.step == 100_000_000
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-100000000"]


# Retention ----------------------------------------------------------------------------------------------------


def steps(directory: Path) -> list[int]:
    return [int(path.name[5:13]) for path in list_checkpoints(directory)]


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_newest_are_kept(tmp_path: Path, keep: int) -> None:
    for step in range(1, 6):
        save(tmp_path, step, keep=keep)
    assert steps(tmp_path) == [1, 2, 3, 4, 5][-keep:]
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-{step:08d}" for step in steps(tmp_path)]


def test_damaged_ones_do_not_count_as_kept(tmp_path: Path) -> None:
    save(tmp_path, 1)
    for step in (2, 3):
        flip(save(tmp_path, step) / "model.pt", 50)
    save(tmp_path, 4, keep=2)
    assert steps(tmp_path) == [1, 2, 3, 4]
    save(tmp_path, 5, keep=2)
    assert steps(tmp_path) == [4, 5]


def test_same_step_saved_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, 1, value=-1.0)
    save(tmp_path, 1, keep=1)
    assert newest(tmp_path) == (1, [])
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


@pytest.mark.parametrize("again", [True, False])
def test_kill_between_the_renames_leaves_the_replaced_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    save(tmp_path, 1)
    rename = Path.rename

    def killed(self: Path, target: Path) -> Path:
        if self.name.startswith(".writing-"):
            raise KeyboardInterrupt
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path, 1, keep=1)
    assert newest(tmp_path) == (1, [])
    if again:  # and once more right there
        flip(save(tmp_path, 1, keep=99) / "model.pt", 50)
        (tmp_path / "step-00000001").rename(tmp_path / "step-00000001.replaced")
        save(tmp_path, 1)
    save(tmp_path, 2, keep=2)
    assert steps(tmp_path) == [1, 2]
    assert newest(tmp_path) == (2, [])


# A process that dies, a disk that fills -----------------------------------------------------------------------


def save_until_killed(directory: Path, pipe: int) -> None:
    """Save each step twice, as after a stop in evaluation, and write each step that is surely saved to the pipe."""
    found = load_newest(directory, lambda text: os._exit(3))
    step = found.step if found is not None else 0
    while True:
        step += 1
        for _ in range(2):
            save(directory, step, keep=1)
            os.write(pipe, f"{step}\n".encode())


def kill_savers(directory: Path, runs: int) -> None:
    """Kill a saving process `runs` times at random points; after each the last step that it reported must be there."""
    draw = random.Random()
    last = 0
    for number in range(runs):
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            save_until_killed(directory, writer)
        os.close(writer)
        with os.fdopen(reader) as lines:
            began_s = time.monotonic()
            if number % 5:  # else before the first one
                last = int(lines.readline())
            time.sleep(draw.uniform(0, 1.5) * (time.monotonic() - began_s + 0.002))
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            last = max([last, *map(int, lines.read().split())])
        if last:
            step, said = newest(directory)
            assert step in (last, last + 1), (number, step, last)
            assert said == []
    print(f"{runs} kills, {last} steps")


def test_kill_at_any_point_of_a_save_leaves_the_last_good_one(tmp_path: Path) -> None:
    code = f"from tests.run.test_checkpoint import *; kill_savers(Path(sys.argv[1]), {RUNS})"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[2]) > 5, done.stdout


CALLS = {
    "mkdir": (Path, "mkdir", ".writing-"),
    "write": (publish, "_write_durably", "model.pt"),
    "last write": (publish, "_write_durably", "manifest.json"),
    "sync": (publish, "_sync", ".writing-"),
    "rename": (Path, "rename", ".writing-"),
}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])
@pytest.mark.parametrize("call", CALLS)
def test_failing_disk_loses_no_earlier_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    for step in (10, 20):
        save(tmp_path, step)
    owner, name, fragment = CALLS[call]
    real = getattr(owner, name)

    def fails(path: Path, *arguments: Any, **more: Any) -> Any:
        if path.name.startswith(fragment):
            raise OSError(number, os.strerror(number))
        return real(path, *arguments, **more)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fails)
        with pytest.raises(UserError) as caught:
            save(tmp_path, 30, keep=1)
    text = str(caught.value)
    assert ("has no space left" if number in (errno.ENOSPC, errno.EDQUOT) else os.strerror(number)) in text
    assert str(tmp_path) in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000010", "step-00000020"]
    assert newest(tmp_path) == (20, [])


def test_take_over_by_another_attempt_publishes_nothing(tmp_path: Path) -> None:
    class TakenOver(Exception):
        pass

    def check() -> None:
        raise TakenOver

    save(tmp_path, 10)
    with pytest.raises(TakenOver):
        save(tmp_path, 20, keep=1, check_owner=check)
    assert newest(tmp_path) == (10, [])


# 8 steps an epoch, 32 in all; checkpoints of 3 to 4 KiB, or with --options.width 20000 of 2 x 1 MiB
SETTINGS = (
    "--workload", "tests.rigs.faulting_workload:build", "--batch-size", "8", "--epochs", "4", "--schedule", "constant",
    "--log-every-steps", "1", "--tensorboard=false", "--join-timeout-s", "30",
)


def train(run: Path, *more: str) -> tuple[str, ...]:
    return ("train", *SETTINGS, "--run-dir", str(run.parent), "--name", run.name, *more)


def test_full_disk_ends_all_ranks_with_2_and_room_lets_them_go_on(forks: Forks, tmp_path: Path) -> None:
    wide = ("--options.width", "20000", "--keep", "3")
    codes, output = forks.run(*train(tmp_path / "undisturbed", *wide), world_size=2)
    assert codes == [0, 0], output
    with small_disk(tmp_path / "disk", "5m") as disk:
        run = disk.path / "run"
        codes, output = forks.run(*train(run, *wide), world_size=2)
        assert codes == [2, 2], output
        assert "Traceback" not in output
        assert output.count("has no space left") == 1
        assert "run the same command again" in output
        assert steps(run / "checkpoints") == [8, 16]
        codes, output = forks.run(*train(run, *wide), world_size=2)
        assert codes == [2, 2], output
        assert steps(run / "checkpoints") == [8, 16]
        assert find_problem(run / "checkpoints" / "step-00000016") == ""
        disk.resize("50m")
        codes, output = forks.run(*train(run, *wide), world_size=2)
        assert codes == [0, 0], output
        assert "resumed from step-00000016" in output
        assert result(run)["digest"] == result(tmp_path / "undisturbed")["digest"]


def fill(folder: Path) -> None:
    with (folder / "filler").open("wb", buffering=0) as filler:
        for size in (65536, 4096, 1):
            try:
                while filler.write(bytes(size)):
                    pass
            except OSError:
                continue


def fill_at_step_10() -> None:
    import train.loop

    step = train.loop.step

    def filling(training: Any) -> Any:
        if training.progress.step == 10:
            fill(Path(os.environ["DISK"]))
        return step(training)

    train.loop.step = filling


def test_disk_that_fills_between_two_saves_is_one_line(forks: Forks, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "1m") as disk:
        run = disk.path / "run"
        # Metrics fill the pages that they have; the next save is far
        arguments = train(run, "--tensorboard=true", "--epochs", "60", "--save-every-steps", "8")
        far = (*arguments, "--save-every-steps", "100000", "--evaluate-every-epochs", "60")
        codes, output = forks.run(*arguments, "--max-steps", "8")
        assert codes == [0], output
        filling = "tests.run.test_checkpoint:fill_at_step_10"
        codes, output = forks.run(*far, preload=filling, env={"DISK": str(disk.path)})
        assert codes == [2], output
        assert f"error: metrics: {run} has no space left, 0 MiB free" in output
        assert "Traceback" not in output
        codes, output = forks.run(*arguments)
        assert codes == [2], output
        assert "Traceback" not in output
        (disk.path / "filler").unlink()
        codes, output = forks.run(*arguments, "--max-steps", "16")
        assert codes == [0], output
        assert "resumed from step-00000008" in output


# Resuming -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("harm", ["flipped", "empty directory"])
def test_job_resumes_from_the_newest_good_one_to_the_same_weights(forks: Forks, tmp_path: Path, harm: str) -> None:
    codes, output = forks.run(*train(tmp_path / "undisturbed"), world_size=2)
    assert codes == [0, 0], output
    run = tmp_path / "run"
    stop = {"PROBE": json.dumps({"where": "loss", "call": 22, "rank": 1, "signal": "SIGTERM"})}
    codes, output = forks.run(*train(run), world_size=2, env=stop)
    assert codes == [143, 143], output
    last = list_checkpoints(run / "checkpoints")[-1]
    flip(last / "training.pt", 500) if harm == "flipped" else empty_directory(last)
    codes, output = forks.run(*train(run), world_size=2)
    assert codes == [0, 0], output
    assert f"checkpoint {last.name} was passed over: " in output
    assert "resumed from step-00000016" in output
    assert result(run)["digest"] == result(tmp_path / "undisturbed")["digest"]


def test_job_with_damaged_checkpoints_only_is_refused_until_fresh(forks: Forks, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert forks.run(*train(run, "--max-steps", "8"), world_size=2)[0] == [0, 0]
    flip(run / "checkpoints" / "step-00000008" / "model.pt", 100)
    codes, output = forks.run(*train(run), world_size=2)
    assert codes == [2, 2], output
    assert output.count("only damaged ones: step-00000008: model.pt does not match its digest") == 1
    assert "--fresh" in output
    assert steps(run / "checkpoints") == [8]
    codes, output = forks.run(*train(run, "--fresh"), world_size=2)
    assert codes == [0, 0], output
    assert len(list(run.glob("before-*/checkpoints/step-00000008"))) == 1


@pytest.mark.parametrize("more", [(), ("--optimizer", "adamw", "--accumulate", "2", "--warmup-steps", "4")])
def test_five_steps_and_five_more_equal_ten_to_the_bit(forks: Forks, tmp_path: Path, more: tuple[str, ...]) -> None:
    for run, parts in (("whole", ("10",)), ("parts", ("5", "10"))):
        for part in parts:
            codes, output = forks.run(*train(tmp_path / run, "--max-steps", part, *more), world_size=2)
            assert codes == [0, 0], output
    assert "resumed from step-00000005" in output
    whole, parts_ = (tmp_path / run / "checkpoints" / "step-00000010" for run in ("whole", "parts"))
    for name in ("model.pt", "training.pt"):
        assert_equal(torch.load(whole / name), torch.load(parts_ / name))


def assert_equal(one: Any, other: Any) -> None:
    """The same numbers to the bit, in nested dicts and lists."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_equal(one[key], other[key])
    elif isinstance(one, list | tuple):
        for a, b in zip(one, other, strict=True):
            assert_equal(a, b)
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    else:
        assert one == other


@pytest.mark.parametrize(("first", "then"), [(1, 2), (2, 1)])
def test_another_world_size_goes_on_from_rank_0s_disk_alone(
    forks: Forks, tmp_path: Path, first: int, then: int
) -> None:
    """Each rank has a run directory of its own, as on nodes without a shared disk."""
    folders = [tmp_path / f"node{rank}" for rank in range(2)]
    for folder in folders:
        folder.mkdir()
    arguments = ("train", *SETTINGS, "--name", "run")
    codes, output = forks.run(*arguments, "--max-steps", "12", world_size=first, cwds=folders)
    assert codes == [0] * first, output
    codes, output = forks.run(*arguments, "--max-steps", "20", world_size=then, cwds=folders)
    assert codes == [0] * then, output
    assert "resumed from step-00000012" in output
    assert f"world size was {first}, is {then}: the run goes on, but its last bits will differ" in output
    assert result(folders[0] / "runs" / "run")["step"] == 20
    assert not (folders[1] / "runs" / "run" / "checkpoints").exists()
    assert not (folders[1] / "runs" / "run" / "metrics.jsonl").exists()


# Weights of others --------------------------------------------------------------------------------------------


def plain_model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def started_from(path: Path) -> tuple[dict[str, torch.Tensor], str]:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    said: list[str] = []
    weights.init_from(model, path, said.append)
    return model.state_dict(), "\n".join(said)


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
@pytest.mark.parametrize("envelope", [None, "state_dict", "model"])
def test_weights_load_whatever_wrapped_the_model(tmp_path: Path, prefix: str, envelope: str | None) -> None:
    given = plain_model().state_dict()
    prefixed: dict[str, Any] = {prefix + name: value for name, value in given.items()}
    torch.save({envelope: prefixed, "epoch": 3} if envelope else prefixed, tmp_path / "w.pt")
    own, said = started_from(tmp_path / "w.pt")
    assert weights.digest(own) == weights.digest(given)
    assert said == f"started from {tmp_path / 'w.pt'}: 4 of 4 tensors"


def test_names_inside_are_not_taken_for_prefixes() -> None:
    names = ("submodule.weight", "a.module.b._orig_mod.weight", "module_x.w")
    state = {name: torch.ones(1) for name in names}
    assert list(weights.without_prefixes(state)) == ["submodule.weight", "a.b.weight", "module_x.w"]


def test_tensors_of_other_shapes_keep_their_value_and_are_listed(tmp_path: Path) -> None:
    given = plain_model().state_dict()
    others = {"2.weight": torch.ones(9, 4), "2.bias": torch.ones(9), "head": torch.ones(1)}
    torch.save({**given, **others}, tmp_path / "w.pt")
    own, said = started_from(tmp_path / "w.pt")
    torch.manual_seed(2)
    fresh = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).state_dict()
    assert torch.equal(own["0.weight"], given["0.weight"])
    assert torch.equal(own["2.weight"], fresh["2.weight"])
    assert "2 of 4 tensors" in said
    assert "2.weight keeps its initial value: its shape there is (9, 4), here (2, 4)" in said
    assert "not used from the file: head" in said


def test_a_checkpoint_of_ours_is_taken_too(tmp_path: Path) -> None:
    given = plain_model().state_dict()
    path = publish.save_checkpoint(tmp_path, training_state(3), given, keep=1)
    assert weights.digest(started_from(path)[0]) == weights.digest(given)
    flip(path / "model.pt", 100)
    with pytest.raises(UserError, match="got a damaged one: model"):
        started_from(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"other": torch.ones(3)}, "got none that fits"),
        ([1, 2], "got none that fits"),
        (torch.ones(3), "got none that fits"),
        ({0: torch.ones(3), "epoch": 1}, "got none that fits"),
        (Path("x"), "must hold weights that load with weights_only"),
        (b"no archive", "must hold weights that load with weights_only"),
        (b"", "must hold weights that load with weights_only"),
        (None, "must name an existing file"),
    ],
    ids=str,
)
def test_unfit_weights_are_refused_in_one_line(tmp_path: Path, content: Any, message: str) -> None:
    path = tmp_path / "w.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    with pytest.raises(UserError, match=message) as caught:
        started_from(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_truncated_weights_are_refused_in_one_line(tmp_path: Path) -> None:
    torch.save(plain_model().state_dict(), tmp_path / "w.pt")
    os.truncate(tmp_path / "w.pt", (tmp_path / "w.pt").stat().st_size // 2)
    with pytest.raises(UserError, match="must hold weights"):
        started_from(tmp_path / "w.pt")


def test_job_starts_from_weights_on_rank_0s_disk(forks: Forks, tmp_path: Path) -> None:
    folders = [tmp_path / f"node{rank}" for rank in range(2)]
    for folder in folders:
        folder.mkdir()
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(), nn.Linear(16, 5))
    torch.save({f"module.{name}": value for name, value in model.state_dict().items()}, folders[0] / "w.pt")
    arguments = ("train", *SETTINGS, "--name", "run", "--max-steps", "4", "--init-from", "w.pt")
    codes, output = forks.run(*arguments, "--lr", "1e-30", "--weight-decay", "0", world_size=2, cwds=folders)
    assert codes == [0, 0], output
    assert "started from w.pt: 2 of 4 tensors" in output
    assert "3.weight keeps its initial value: its shape there is (5, 16), here (4, 16)" in output
    trained = torch.load(folders[0] / "runs" / "run" / "checkpoints" / "step-00000004" / "model.pt")
    assert torch.equal(trained["0.weight"], model.state_dict()["0.weight"])
    codes, output = forks.run(*arguments[:-1], "missing.pt", "--fresh", world_size=2, cwds=folders)
    assert codes == [2, 2], output
    assert output.count("init_from must name an existing file or checkpoint directory, got missing.pt") == 1


# The same weights on every rank -------------------------------------------------------------------------------


def other_weights_on_rank_1() -> None:
    """A build that is not the same everywhere, as one that draws from the clock."""
    if os.environ["RANK"] != "1":
        return
    from tests.rigs import faulting_workload

    build = faulting_workload.build

    def other(config: Any) -> Any:
        workload = build(config)
        nn.init.ones_(workload.model[0].weight)
        return workload

    faulting_workload.build = other


def other_weights_that_ddp_leaves() -> None:
    import train.parallel.ddp

    other_weights_on_rank_1()
    ddp = train.parallel.ddp.DistributedDataParallel
    train.parallel.ddp.DistributedDataParallel = (  # type: ignore
        lambda *given, **more: ddp(*given, **more, init_sync=False)
    )


def test_all_ranks_take_rank_0s_initial_weights(forks: Forks, tmp_path: Path) -> None:
    for name, preload in (("equal", ""), ("other", "tests.run.test_checkpoint:other_weights_on_rank_1")):
        codes, output = forks.run(*train(tmp_path / name, "--max-steps", "4"), world_size=2, preload=preload)
        assert codes == [0, 0], output
    assert result(tmp_path / "equal")["digest"] == result(tmp_path / "other")["digest"]


def test_ranks_with_different_initial_weights_are_refused(forks: Forks, tmp_path: Path) -> None:
    preload = "tests.run.test_checkpoint:other_weights_that_ddp_leaves"
    codes, output = forks.run(*train(tmp_path / "run", "--max-steps", "4"), world_size=2, preload=preload)
    assert codes == [2, 2], output
    assert "the initial weights must be the same on all ranks, got " in output
