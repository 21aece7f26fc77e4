"""--mirror: what was published is on a second place too, comes back from there, and never stops a training."""

import json
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rankup.errors import ConfigError
from tests.rigs.checkpoints import SETTINGS, flip, save
from tests.rigs.fork_server import Forks, Job
from tests.rigs.jobs import comparable_metrics, result
from tests.rigs.object_store import BUCKET, S3, Freezer, freeze_before_each_request
from train.config import load_config
from train.process.status import write_json
from train.run import mirror, objects
from train.run.checkpoint import newest_good_step
from train.run.lineage import Lineage
from train.run.mirror import Mirror
from train.run.store_lease import StoreLease

LINE = ("train", *SETTINGS, "--name=run", "--save-every-steps=8")
IMPATIENT = "tests.run.test_mirror:impatient"
STOP: dict[str, Any] = {"where": "loss", "call": 12, "signal": "SIGTERM", "rank": 0}  # in step 10


class Place:
    """A run directory and its mirror."""

    def __init__(self, forks: Forks, folder: Path) -> None:
        self.forks, self.runs, self.mirror = forks, folder / "runs", folder / "mirror"
        self.run_dir = self.runs / "run"
        self.env: dict[str, str] = {}

    def start(self, *more: str, mirror: str = "", preload: str = "", **order: Any) -> Job:
        env = self.env | ({"PROBE": json.dumps(order)} if order else {})
        line = (*LINE, f"--run-dir={self.runs}", f"--mirror={mirror or self.mirror}", *more)
        return self.forks.start(*line, world_size=2, env=env, preload=preload)

    def run(self, *more: str, code: int = 0, **how: Any) -> str:
        job = self.start(*more, **how)
        assert job.wait() == [code, code], job.output
        assert "Traceback" not in job.output
        return job.output

    def mirrored(self) -> list[str]:
        """The names of the checkpoints on the mirror, without their digests."""
        return sorted(path.parent.name[:13] for path in self.mirror.glob("run/*/checkpoints/*/*/manifest.json"))

    def lose(self) -> None:
        shutil.rmtree(self.runs)


@pytest.fixture
def place(forks: Forks, tmp_path: Path) -> Place:
    return Place(forks, tmp_path)


@pytest.fixture(scope="module")
def undisturbed(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    place = Place(forks, tmp_path_factory.mktemp("undisturbed"))
    place.run()
    assert "step-00000032" in place.mirrored()
    assert json.loads((place.mirror / "run" / "00000001" / "result.json").read_text()) == result(place.run_dir)
    return {"digest": result(place.run_dir)["digest"], "metrics": comparable_metrics(place.run_dir)}


def test_lost_disk_comes_back_from_the_mirror(place: Place, undisturbed: dict[str, Any]) -> None:
    assert "the mirror" not in place.run(code=143, **STOP)
    assert place.mirrored()[-1] == "step-00000010"
    place.lose()
    output = place.run()
    assert f"fetched step-00000010 from the mirror {place.mirror}/run: {place.run_dir} had no good checkpoint" in output
    assert "resumed from step-00000010" in output
    assert result(place.run_dir)["digest"] == undisturbed["digest"]
    assert comparable_metrics(place.run_dir) == undisturbed["metrics"]
    assert len(place.mirrored()) <= 3  # `keep`, and no more than one that was left out
    place.lose()
    assert "is finished: 32 steps" in place.run()


@pytest.mark.parametrize("damage", ["newest here", "all here", "all here and the newest there"])
def test_newest_whole_one_of_both_places(place: Place, undisturbed: dict[str, Any], damage: str) -> None:
    place.run("--max-steps=8")
    place.run(code=143, **STOP)
    here = sorted((place.run_dir / "checkpoints").iterdir())
    for path in here if damage.startswith("all") else here[-1:]:
        flip(path / "model.safetensors", 99)
    resumed = "step-00000018"
    if damage.endswith("there"):
        (there,) = place.mirror.glob("run/*/checkpoints/*/step-00000018-*")
        flip(there / "model.safetensors", 99)
        resumed = place.mirrored()[-2]  # 16, or 8 if the upload of that was left out for the next
    output = place.run()
    assert f"fetched {resumed} from the mirror" in output
    assert f"resumed from {resumed}" in output
    assert result(place.run_dir)["digest"] == undisturbed["digest"]


def test_newer_checkpoint_here_is_never_replaced(place: Place, undisturbed: dict[str, Any]) -> None:
    place.run("--max-steps=4")
    kept = place.mirror.with_name("kept")
    shutil.copytree(place.mirror, kept)
    place.run(code=143, **STOP)
    shutil.rmtree(place.mirror)
    kept.rename(place.mirror)
    output = place.run()
    assert "fetched" not in output
    assert "resumed from step-00000014" in output
    assert result(place.run_dir)["digest"] == undisturbed["digest"]


def test_mirror_that_fails_is_one_line_and_the_end_says_what_is_missing(
    place: Place, undisturbed: dict[str, Any]
) -> None:
    place.run(code=143, **STOP)
    shutil.rmtree(place.mirror)
    place.mirror.write_text("in the way")
    output = place.run(preload=IMPATIENT)
    assert output.count("the mirror fails, the training goes on: ") == 1
    assert f"the newest checkpoint, step-00000032, is not on the mirror {place.mirror}/run: " in output
    assert result(place.run_dir)["digest"] == undisturbed["digest"]


def test_fresh_begins_anew_there_too_and_keeps_what_was_there(place: Place) -> None:
    place.run(code=143, **STOP)
    place.lose()
    output = place.run("--fresh", "--lr=0.25", code=143, **STOP | {"call": 4})  # step 2
    assert "resumed" not in output
    assert {"step-00000010", "step-00000002"} <= set(place.mirrored())
    place.lose()
    assert "resumed from step-00000002" in place.run("--lr=0.25", "--max-steps=4")


def test_only_damaged_ones_are_left_and_nothing_begins_anew_without_a_word(place: Place) -> None:
    place.run(code=143, **STOP)
    place.lose()
    for path in place.mirror.glob("run/*/checkpoints/*/*/model.safetensors"):
        flip(path, 99)
    assert "must hold a whole checkpoint, got only damaged ones" in place.run(code=2)


def test_mirror_that_cannot_be_read_is_asked_again_later_where_it_alone_may_know_the_run(place: Place) -> None:
    place.mirror.write_text("in the way")
    output = place.run(preload=IMPATIENT, code=171)
    assert f"{place.mirror}/run did not answer in time: " in output


def impatient() -> None:
    """Preloaded: a mirror that does not answer is given up at once, at the opening and at the end alike."""
    mirror.SEARCH_S = mirror.LOOK_S = mirror.END_S = 0.1


def test_mirror_in_a_store_of_objects_that_denies_and_then_does_not(
    place: Place, s3: S3, undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    url = f"s3://{BUCKET}/{tmp_path.name}"
    with s3.door() as door:
        place.env = door.env
        door.rule = lambda request: 403 if request.method in ("PUT", "POST") else None
        output = place.run("--max-steps=8", mirror=url)
        assert output.count("the mirror fails, the training goes on: ") == 1
        assert f"the newest checkpoint, step-00000008, is not on the mirror {url}/run: " in output
        door.rule = lambda request: None
        assert "the mirror" not in place.run(mirror=url, code=143, **STOP)
        place.lose()
        assert f"fetched step-00000018 from the mirror {url}/run" in place.run(mirror=url)
    assert result(place.run_dir)["digest"] == undisturbed["digest"]
    assert comparable_metrics(place.run_dir) == undisturbed["metrics"]


def test_mirror_that_fails_for_a_while_gets_the_newest_checkpoint_all_the_same(
    place: Place, s3: S3, tmp_path: Path
) -> None:
    url, go_on = f"s3://{BUCKET}/{tmp_path.name}", tmp_path / "go-on"
    with s3.door() as door:
        place.env = door.env
        door.rule = lambda request: 403 if request.method in ("PUT", "POST") else None
        job = place.start(mirror=url, where="loss", call=12, until=str(go_on))
        job.wait_for("the mirror fails, the training goes on: ")
        door.rule = lambda request: None
        go_on.touch()
        assert job.wait() == [0, 0], job.output
        assert job.output.count("the mirror fails, the training goes on: ") == 1
        assert job.output.count(f"the mirror {url}/run is back") == 1
        assert "is not on the mirror" not in job.output
        place.lose()
        assert "is finished: 32 steps" in place.run(mirror=url)


def test_address_with_a_key_in_it_is_refused_and_not_repeated(place: Place) -> None:
    assert "mirror must be an address without user" in (output := place.run(mirror="s3://me:secret@bucket", code=2))
    assert "secret@" not in output
    assert not (place.run_dir / "config.yaml").exists()


def test_mirror_in_the_run_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="mirror must be another place than run_dir"):
        load_config({"run_dir": str(tmp_path), "mirror": f"{tmp_path}/"})


# One process, whose requests are held up ------------------------------------------------------------------------------


def open_mirror(url: str, run_dir: Path, freezer: Freezer | None = None) -> Mirror:
    """Of a run whose `keep` is 1."""
    config: Any = SimpleNamespace(mirror=url, keep=1, save_timeout_s=60.0)
    log = SimpleNamespace(info=print, debug=print, warning=print)
    group: Any = SimpleNamespace(run_dir=run_dir, attempt=run_dir.parent.name, log=log)
    run_dir.mkdir(parents=True)
    made = Mirror(config, group)
    if freezer:
        freezer.hold(made._open(0.0))
    return made


def idle(mirror: Mirror, *, may_fail: bool = True) -> None:
    """Wait until it has copied what there is, or failed to. A request that failed once may still be tried again."""
    until_s = time.monotonic() + 120
    with mirror._news:
        while mirror._busy and not (may_fail and mirror._failing):
            assert time.monotonic() < until_s
            mirror._news.wait(0.02)  # a failure notifies nobody


def an_attempt(url: str, run_dir: Path, to_do: list[int], freezer: Freezer | None = None) -> None:
    """What rank 0 does with a mirror."""
    value = 0.0 if freezer else 0.5  # tells the checkpoints of two attempts apart
    made = open_mirror(url, run_dir, freezer)
    made.fetch(None, wanted=lambda other: True)
    lineage = Lineage.read(run_dir) or Lineage.new("", "")
    left = [step for step in to_do if step > newest_good_step(run_dir / "checkpoints")]
    if not left:
        return
    lineage.go_on(run_dir.parent.name, writer=None)
    lineage.write(run_dir)
    made.start()
    for step in left:
        idle(made)
        with (run_dir / "metrics.jsonl").open("a") as file:
            file.write(f"{run_dir.parent.name} {step}\n")
        save(run_dir / "checkpoints", step, keep=1, value=step + value, run=lineage.run)
        made.copy(step)
    idle(made)
    write_json(run_dir / "result.json", run_dir.parent.name)
    made.finish(stopped=False)
    assert made._thread is not None
    made._thread.join(120)


def test_owner_frozen_before_any_of_its_requests_takes_nothing_from_its_successor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.fsync", lambda number: None)
    assert freeze_before_each_request(tmp_path, an_attempt) > 25


def test_upload_that_takes_longer_than_its_checkpoint_stays_gets_done(tmp_path: Path) -> None:
    run_dir = tmp_path / "machine" / "run"
    freezer = Freezer(0, lambda name: hang(name) if "put_file" in name and "model.safetensors" in name else None)

    def hang(name: str) -> None:
        freezer.stands.set()
        assert freezer.go_on.wait(120)

    made = open_mirror(f"memory://{tmp_path.name}", run_dir, freezer)
    made.fetch(None, wanted=lambda other: True)
    lineage = Lineage.new("", "")
    lineage.write(run_dir)
    made.start()
    save(run_dir / "checkpoints", 8, keep=1, run=lineage.run)
    made.copy(8)
    assert freezer.stands.wait(120)
    save(run_dir / "checkpoints", 16, keep=1, run=lineage.run)
    made.copy(16)
    freezer.go_on.set()
    idle(made)
    written = [name for name in freezer.names if "pipe_file" in name and "manifest.json" in name]
    assert len(written) == 2, freezer.names
    assert "step-00000008" in written[0]
    assert "step-00000016" in written[1]
    made.finish(stopped=False)


def test_attempt_that_was_replaced_copies_no_more_files(tmp_path: Path) -> None:
    run_dir = tmp_path / "machine" / "run"
    made = open_mirror(f"memory://{tmp_path.name}", run_dir)
    made.fetch(None, wanted=lambda other: True)
    Lineage.new("", "").write(run_dir)
    (run_dir / "metrics.jsonl").write_text("own\n")
    made.start()
    idle(made)
    objects = made._open(0.0).objects
    StoreLease(objects, tmp_path, "successor").claim(2)
    (run_dir / "metrics.jsonl").write_text("late\n")
    made.finish(stopped=False)
    assert objects.read("00000001/metrics.jsonl") == b"own\n"
    assert "another attempt owns" in made._failing


def test_mirror_that_is_slow_but_moves_is_never_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, failed = [0.0], set[str]()
    monkeypatch.setattr(objects, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=lambda pause_s: None))

    def slow(name: str) -> None:
        """Each request takes 50 s, and each file's first one fails."""
        clock[0] += 50
        if "put_file" in name and name not in failed:
            failed.add(name)
            raise OSError("busy")

    run_dir = tmp_path / "machine" / "run"
    freezer = Freezer(0, slow)
    made = open_mirror(f"memory://{tmp_path.name}", run_dir)
    made.fetch(None, wanted=lambda other: True)
    lineage = Lineage.new("", "")
    lineage.write(run_dir)
    save(run_dir / "checkpoints", 8, keep=1, run=lineage.run)
    freezer.hold(made._open(0.0))
    made.start()
    idle(made, may_fail=False)
    assert any("pipe_file" in name and "manifest.json" in name for name in freezer.names), freezer.names
    made.finish(stopped=False)
