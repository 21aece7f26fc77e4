"""--mirror: what a run publishes is also at a second place, comes back from there, and never stops a training."""

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.rigs.checkpoints import SETTINGS, flip
from tests.rigs.fork_server import Forks, Job
from tests.rigs.jobs import outcome, result
from tests.rigs.object_store import BUCKET, S3, Request

LINE = ("train", *SETTINGS, "--name=run", "--save-every-steps=8")
# In step 9: the ranks agree to stop after the next step, 10
STOP: dict[str, Any] = {"where": "loss", "call": 11, "signal": "SIGTERM", "rank": 0}


class Disks:
    """A run directory with its mirror."""

    def __init__(self, forks: Forks, folder: Path) -> None:
        self.forks, self.runs, self.mirror = forks, folder / "runs", folder / "mirror"
        self.run_dir = self.runs / "run"
        self.env: dict[str, str] = {}

    def start(self, *more: str, mirror: str = "", **order: Any) -> Job:
        env = self.env | ({"PROBE": json.dumps(order)} if order else {})
        line = (*LINE, f"--run-dir={self.runs}", f"--mirror={mirror or self.mirror}", *more)
        return self.forks.start(*line, world_size=2, env=env)

    def run(self, *more: str, code: int = 0, **how: Any) -> str:
        job = self.start(*more, **how)
        assert job.wait() == [code, code], job.output
        assert "Traceback" not in job.output
        return job.output

    def mirrored(self) -> list[str]:
        """Return the names of the checkpoints on the mirror, without their digests."""
        return sorted(path.parent.name[:13] for path in self.mirror.glob("run/*/checkpoints/*/*/manifest.json"))

    def lose(self) -> None:
        shutil.rmtree(self.runs)


@pytest.fixture
def disks(forks: Forks, tmp_path: Path) -> Disks:
    return Disks(forks, tmp_path)


@pytest.fixture(scope="module")
def undisturbed(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    disks = Disks(forks, tmp_path_factory.mktemp("undisturbed"))
    disks.run()
    assert "step-00000032" in disks.mirrored()
    assert json.loads((disks.mirror / "run" / "00000001" / "result.json").read_text()) == result(disks.run_dir)
    return outcome(disks.run_dir)


def test_lost_disk_is_restored_from_the_mirror(disks: Disks, undisturbed: dict[str, Any]) -> None:
    assert "the mirror" not in disks.run(code=143, **STOP)
    assert disks.mirrored()[-1] == "step-00000010"
    disks.lose()
    output = disks.run()
    assert f"fetched step-00000010 from the mirror {disks.mirror}/run\n" in output
    assert "resumed from step-00000010" in output
    assert outcome(disks.run_dir) == undisturbed
    assert len(disks.mirrored()) <= 3  # `keep`, and at most one whose removal was left to the next upload
    disks.lose()
    assert "is finished: 32 steps" in disks.run()


@pytest.mark.parametrize("damage", ["newest here", "all here and the newest there"])
def test_newest_whole_checkpoint_of_both_is_resumed(disks: Disks, undisturbed: dict[str, Any], damage: str) -> None:
    disks.run("--max-steps=8")
    disks.run(code=143, **STOP)
    here = sorted((disks.run_dir / "checkpoints").iterdir())
    for path in here if damage.startswith("all") else here[-1:]:
        flip(path / "model.safetensors", 99)
    resumed = "step-00000018"
    if damage.endswith("there"):
        (there,) = disks.mirror.glob("run/*/checkpoints/*/step-00000018-*")
        flip(there / "model.safetensors", 99)
        resumed = disks.mirrored()[-2]  # 16, or 8 if the upload of 16 was skipped for the next one
    output = disks.run()
    assert f"fetched {resumed} from the mirror" in output
    assert f"resumed from {resumed}" in output
    assert result(disks.run_dir)["digest"] == undisturbed["digest"]


def test_checkpoint_of_a_stop_while_waiting_for_data_reaches_the_mirror(disks: Disks) -> None:
    order: dict[str, Any] = {"where": "data", "call": 6, "signal": "SIGTERM", "to": "group"}
    output = disks.run("--num-workers=2", "--evaluate-every-epochs=4", code=143, **order, before_s=1.0, sleep_s=600)
    assert disks.mirrored()[-1] == max(path.name for path in (disks.run_dir / "checkpoints").glob("step-*"))
    assert "is not on the mirror" not in output


def test_fresh_starts_a_new_run_on_the_mirror_and_keeps_the_old_one(disks: Disks) -> None:
    disks.run(code=143, **STOP)
    disks.lose()
    output = disks.run("--fresh", "--lr=0.25", code=143, **STOP | {"call": 3})  # saved at step 2
    assert "resumed" not in output
    assert {"step-00000010", "step-00000002"} <= set(disks.mirrored())
    disks.lose()
    assert "resumed from step-00000002" in disks.run("--lr=0.25", "--max-steps=4")


def test_mirror_with_only_damaged_checkpoints_is_an_error_not_a_fresh_start(disks: Disks) -> None:
    disks.run(code=143, **STOP)
    disks.lose()
    for path in disks.mirror.glob("run/*/checkpoints/*/*/model.safetensors"):
        flip(path, 99)
    assert "must hold a whole checkpoint, got only damaged ones" in disks.run(code=2)


def test_unreadable_mirror_that_alone_may_know_the_run_asks_for_a_retry(disks: Disks) -> None:
    disks.mirror.write_text("in the way")
    output = disks.run("--save-timeout-s=1", code=171)
    assert f"{disks.mirror}/run did not answer in time: " in output


def test_mirror_that_denied_access_gets_the_newest_checkpoint_later(
    disks: Disks, s3: S3, undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    url, go_on = f"s3://{BUCKET}/{tmp_path.name}", tmp_path / "go-on"
    fails = "the mirror fails, the training goes on: "
    with s3.door() as door:
        disks.env = door.env
        door.rule = lambda request: 403 if request.method in ("PUT", "POST") else None
        output = disks.run("--max-steps=8", mirror=url)
        assert output.count(fails) == 1
        assert f"the newest checkpoint, step-00000008, is not on the mirror {url}/run: " in output
        job = disks.start(mirror=url, where="loss", call=12, until=str(go_on))
        job.wait_for(fails)
        door.rule = lambda request: None
        go_on.touch()
        assert job.wait() == [0, 0], job.output
        assert "resumed from step-00000008" in job.output
        assert job.output.count(fails) == job.output.count(f"the mirror {url}/run is back") == 1
        assert "is not on the mirror" not in job.output
        disks.lose()
        assert "is finished: 32 steps" in disks.run(mirror=url)
    assert outcome(disks.run_dir) == undisturbed


def test_slow_upload_finishes_before_its_checkpoint_is_removed(disks: Disks, s3: S3, tmp_path: Path) -> None:
    url, go_on = f"s3://{BUCKET}/{tmp_path.name}", tmp_path / "go"
    begun, arrived = threading.Event(), threading.Event()

    def of_8(request: Request) -> bool:
        return request.method == "PUT" and "/step-00000008-" in request.name

    def hold(request: Request) -> None:
        if of_8(request):
            begun.set()
            arrived.wait(120)

    def newest() -> list[str]:
        return sorted(path.name[:13] for path in (disks.run_dir / "checkpoints").glob("step-*"))

    with s3.door() as door:
        disks.env = door.env
        door.rule = hold
        # With --save=sync the mirror hears of each save at once. Otherwise the next save might come before its upload
        job = disks.start("--keep=1", "--save=sync", mirror=url, where="loss", call=11, rank=0, until=str(go_on))
        job.wait_until(begun.is_set, "the upload of step 8")
        go_on.touch()
        job.wait_until(lambda: newest()[-1] >= "step-00000024", "the checkpoint of step 24")
        assert newest()[0] == "step-00000008"  # still being uploaded
        arrived.set()
        assert job.wait() == [0, 0], job.output
        assert "the mirror" not in job.output
        assert [request.name for request in door.seen if of_8(request)][-1].endswith("/manifest.json")
        disks.lose()
        assert "is finished: 32 steps" in disks.run(mirror=url)
