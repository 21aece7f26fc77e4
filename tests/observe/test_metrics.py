"""The metrics of a run, read from metrics.jsonl and through TensorBoard, have each step once, whatever happened."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from rankup.errors import UserError
from rankup.observe.metrics import Metrics, Position, cut_after, entry
from tests.rigs.fork_server import Forks
from tests.rigs.jobs import probe
from tests.rigs.small_filesystems import small_disk

DIGITS = ("train", "--dataset", "digits", "--model", "mlp", "--epochs", "2", "--log-every-steps", "10")
# 8 steps an epoch, 32 in all
MADE_UP = ("train", "--workload", "tests.rigs.faulting_workload:build", "--batch-size", "8", "--epochs", "4",
           "--log-every-steps", "1", "--eval-batch-size", "4", "--join-timeout-s", "30")
SCALARS = {"train/loss", "train/lr", "train/images_per_s", "eval/loss", "eval/accuracy", "eval/accuracy_top5"}


def at(run: Path) -> tuple[str, ...]:
    return ("--run-dir", str(run.parent), "--name", run.name)


def events(run: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # slow

    found = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    found.Reload()
    return found


def scalars(run: Path) -> dict[str, dict[int, float]]:
    """Return tag -> step -> value for tags that have points. Fail if a tag has a step twice."""
    found = events(run)
    values: dict[str, dict[int, float]] = {}
    for tag in found.Tags()["scalars"]:
        points = [(event.step, event.value) for event in found.Scalars(tag)]
        if not points:  # all points were a killed attempt's; the next one may have no cpu_percent yet
            continue
        values[tag] = dict(points)
        assert len(values[tag]) == len(points), f"{tag} has a step twice: {points}"
    return values


def lines(run: Path) -> dict[str, dict[int, float]]:
    """Return the same for metrics.jsonl."""
    values: dict[str, dict[int, float]] = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        entry = json.loads(line)
        for name in entry.keys() - {"step", "time"}:
            assert entry["step"] not in values.setdefault(name, {}), f"{name} has step {entry['step']} twice"
            values[name][entry["step"]] = entry[name]
    return values


def assert_same(run: Path) -> dict[str, dict[int, float]]:
    shown, written = scalars(run), lines(run)
    assert shown.keys() == written.keys()
    for name, points in written.items():
        assert shown[name].keys() == points.keys()
        for step, value in points.items():
            assert math.isclose(shown[name][step], value, rel_tol=1e-6), (name, step)
    return written


@pytest.fixture(scope="module")
def digits(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("digits") / "run"
    forks.ends(*DIGITS, *at(run), world_size=2)
    return run


def test_metrics_and_tensorboard_have_the_values_of_the_run(digits: Path) -> None:
    written = assert_same(digits)
    assert written.keys() == SCALARS
    assert list(written["train/loss"]) == [10, 20, 30, 40, 44]
    assert list(written["eval/accuracy"]) == [22, 44]
    result = json.loads((digits / "result.json").read_text())
    assert result["metrics"] == {name: written[f"eval/{name}"][44] for name in ("loss", "accuracy", "accuracy_top5")}
    found = digits.rglob("events.out.tfevents.*")
    assert [path.parent.name for path in found] == ["tensorboard"]  # each folder is a run in TensorBoard's list
    assert 0.5 < result["metrics"]["accuracy"] < result["metrics"]["accuracy_top5"] <= 1.0


def test_tensorboard_has_the_confusion_matrix_and_scores_of_each_class(digits: Path) -> None:
    (event,) = events(digits).Tensors("eval/confusion/text_summary")
    assert event.step == 44
    fence, title, *lines = event.tensor_proto.string_val[0].decode().splitlines()
    assert (fence, title.split(), lines[-1]) == ("```", ["class", "precision", "recall", "f1", "samples"], "```")
    matrix = [[int(word) for word in line.split()[1:]] for line in lines[-11:-1]]
    assert sum(map(sum, matrix)) == 359
    result = json.loads((digits / "result.json").read_text())
    assert sum(row[place] for place, row in enumerate(matrix)) == round(359 * result["metrics"]["accuracy"])


def test_few_classes_have_no_top5_and_tensorboard_can_be_turned_off(forks: Forks, tmp_path: Path) -> None:
    run = tmp_path / "run"
    fake = ("--dataset", "fake", "--fake-classes", "5", "--fake-samples", "64", "--batch-size", "32", "--epochs", "1")
    forks.ends("train", "--model", "mlp", *fake, "--tensorboard=false", *at(run))
    assert "eval/accuracy_top5" not in lines(run)
    assert lines(run)["eval/accuracy"].keys() == {2}
    assert not (run / "tensorboard").exists()


@pytest.mark.parametrize(("name", "where"), [("SIGTERM", "evaluate"), ("SIGKILL", "loss")])
def test_metrics_have_each_step_once_after_a_stop_or_kill(forks: Forks, tmp_path: Path, name: str, where: str) -> None:
    run = tmp_path / "run"
    call = 15 if where == "loss" else 8  # in step 12, or in the second evaluation, of step 16
    forks.ends(*MADE_UP, *at(run), env=probe(where, call, signal=name), code=143 if name == "SIGTERM" else -9)
    forks.ends(*MADE_UP, *at(run))
    written = assert_same(run)
    assert list(written["train/loss"]) == list(range(1, 33))
    assert list(written["eval/loss"]) == [8, 16, 24, 32]
    assert len(list(run.rglob("metrics*.jsonl"))) == 1


def test_run_with_more_epochs_extends_the_same_curves(forks: Forks, tmp_path: Path) -> None:
    run = tmp_path / "run"
    for epochs in ("1", "2"):
        forks.ends(*MADE_UP, "--schedule", "constant", "--epochs", epochs, *at(run))
    written = assert_same(run)
    assert list(written["train/loss"]) == list(range(1, 17))


# Units --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("torn", [
    b"", b'{"step": 60101, "tra', b"\0\0\n\n", b"[1]\n", b'{"step": 60000, "train/loss": 1.0}',
])
def test_restart_reads_and_writes_only_the_end_of_the_metrics(tmp_path: Path, torn: bytes) -> None:
    """A kill has torn the last line. The checkpoint is of step 60,000, and a rescue is of step 60,100."""
    kinds = ["train" if step % 100 else "eval" for step in range(1, 60_201)]
    lines = [made_up_line(step, kind) for step, kind in enumerate(kinds, 1)]
    path = tmp_path / "metrics.jsonl"
    for last in (60_200, 60_099):  # the second time only the torn line must go
        path.write_bytes("".join(lines[:last]).encode() + torn)
        before = moved_bytes()
        found = cut_after(path, 60_100, 60_000, since=60_000)
        assert moved_bytes() - before < path.stat().st_size / 5
        assert [entry["step"] for entry in found] == [*range(60_000, 60_100)]
        assert path.read_text() == "".join(lines[:60_099])


def test_metrics_are_cut_at_a_damaged_line(tmp_path: Path) -> None:
    lines = [made_up_line(step, "train") for step in range(1, 7)]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join([*lines[:2], lines[2][:9] + lines[3], "\0\0\n", *lines[4:], '{"step"']))
    assert [entry["step"] for entry in cut_after(path, 5, 5)] == [1, 2]
    assert path.read_text() == "".join(lines[:2])


@pytest.mark.parametrize(("evaluated", "kept"), [(8, 4), (4, 3), (0, 3)])
def test_evaluation_of_an_earlier_step_is_kept(tmp_path: Path, evaluated: int, kept: int) -> None:
    """Also if the state that resumes does not know it. The evaluation of the newest step is done again."""
    lines = [made_up_line(step, kind) for step in (4, 8) for kind in ("train", "eval")]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join([*lines, made_up_line(9, "train")]))
    assert len(cut_after(path, 8, evaluated)) == kept
    assert path.read_text() == "".join(lines[:kept])


def made_up_line(step: int, kind: str) -> str:
    return json.dumps({"step": step, "time": 1.0, f"{kind}/loss": 1 / step}) + "\n"


def moved_bytes() -> int:
    """Return how many bytes this process has read and written so far."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["rchar"]) + int(counts["wchar"])


@pytest.mark.parametrize("kind", ["train", "eval"])
def test_line_before_the_checkpoint_is_not_written_again(tmp_path: Path, kind: str) -> None:
    """The newest line of its kind may be so far back that a restart does not read it."""
    other = "eval" if kind == "train" else "train"
    lines = made_up_line(1, kind) + "".join(made_up_line(step, other) for step in range(2, 4001))
    (tmp_path / "metrics.jsonl").write_text(lines)
    newest = {kind: 1, other: 4000}
    progress = Position(
        4000, evaluated=newest["eval"], metrics={"eval/loss": 1.0},
        line=json.loads(made_up_line(newest["train"], "train")),
    )
    Metrics(tmp_path, progress, saved=progress, tensorboard=False).close()
    assert (tmp_path / "metrics.jsonl").read_text() == lines


def test_numbers_that_json_does_not_have_are_null(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, Position(), saved=Position(), tensorboard=False)
    metrics.write(entry(1, {"train/loss": math.nan, "train/lr": math.inf, "train/images_per_s": 1234.0}))
    metrics.close()
    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert (line["train/loss"], line["train/lr"], line["train/images_per_s"]) == (None, None, 1234.0)


def test_full_disk_is_an_error_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    metrics = Metrics(tmp_path, Position(), saved=Position(), tensorboard=False)
    for write in (lambda: metrics.write(entry(1, {"train/loss": 1.0})), metrics.close):
        with pytest.raises(UserError, match=r"metrics: .* has no space left"):
            write()


def test_folder_of_tensorboard_that_is_not_writable_is_an_error_of_the_user(tmp_path: Path) -> None:
    """A thread of TensorBoard would print a traceback, which fails this test."""
    with small_disk(tmp_path / "disk", "1m") as (disk, resize):
        (tmp_path / "tensorboard").symlink_to(disk)
        resize("1m,ro")
        with pytest.raises(UserError, match="must be writable"):
            Metrics(tmp_path, Position(), saved=Position(), tensorboard=True)
