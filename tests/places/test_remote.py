"""`--run-dir s3://...`: whatever happens, the run resumes from the store, on any machine, to the same bits.

The S3 server is real, and each machine is a separate cache folder. The door in front of the server does the harm."""

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.rigs.checkpoints import SETTINGS, steps
from tests.rigs.fork_server import Forks, Job
from tests.rigs.jobs import outcome, result
from tests.rigs.object_store import BUCKET, S3, Door, Request

COLD = 120  # seconds, for a busy machine


@pytest.fixture
def door(s3: S3) -> Iterator[Door]:
    with s3.door() as made:
        yield made


@pytest.fixture(scope="module")
def undisturbed(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run in a folder of this machine."""
    runs = tmp_path_factory.mktemp("undisturbed")
    forks.ends("train", *SETTINGS, "--run-dir", str(runs), "--name", "run")
    return runs / "run"


class Machines:
    """Runs commands with run_dir in the store. A machine is a name, and its disk is empty at first."""

    def __init__(self, forks: Forks, s3: S3, door: Door, folder: Path) -> None:
        self.forks, self.s3, self.door, self.folder = forks, s3, door, folder
        self.url = f"s3://{BUCKET}/{folder.name}"

    def start(self, machine: str, *more: str, command: str = "train", env: dict[str, str] | None = None,
              world_size: int = 1) -> Job:
        env = {**self.door.env, "RANKUP_CACHE": str(self.folder / machine), **(env or {})}
        line = (command, *SETTINGS, "--run-dir", self.url, "--name", "run", *more)
        preload = "tests.rigs.object_store:impatient"
        return self.forks.start(*line, env=env, world_size=world_size, preload=preload)

    def run(self, machine: str, *more: str, code: int = 0, **how: Any) -> str:
        job = self.start(machine, *more, **how)
        assert set(job.wait()) == {code}, job.output
        return job.output

    def folder_of(self, machine: str) -> Path:
        (folder,) = (self.folder / machine / "runs").glob("*/run")
        return folder

    @property
    def client(self) -> Any:
        import boto3

        return boto3.client("s3", endpoint_url=self.s3.env["AWS_ENDPOINT_URL"], region_name="us-east-1",
                            aws_access_key_id="somebody", aws_secret_access_key="secret")

    def names(self) -> list[str]:
        listed = self.client.list_objects_v2(Bucket=BUCKET, Prefix=f"{self.folder.name}/run/0")["Contents"]
        return [entry["Key"] for entry in listed]

    def stored(self, name: str) -> bytes:
        key = max(key for key in self.names() if key.split("/", 3)[3] == name)  # from the last owner
        content: bytes = self.client.get_object(Bucket=BUCKET, Key=key)["Body"].read()
        return content


@pytest.fixture
def machines(forks: Forks, s3: S3, door: Door, tmp_path: Path) -> Machines:
    return Machines(forks, s3, door, tmp_path)


def at(step: int, file: str, answer: Callable[[], int | None]) -> Callable[[Request], int | None]:
    """Return a rule for the upload of one file of a checkpoint."""
    return lambda request: (
        answer() if request.method == "PUT" and f"/step-{step:08d}-" in request.name and request.name.endswith(file)
        else None
    )


def test_run_killed_during_an_upload_resumes_elsewhere_to_the_same_bits(
    machines: Machines, door: Door, undisturbed: Path
) -> None:
    reached, over = threading.Event(), threading.Event()

    def hang() -> None:
        reached.set()
        over.wait(COLD)

    door.rule = at(16, "model.safetensors", hang)
    job = machines.start("first")
    assert reached.wait(COLD), job.output
    job.kill()
    door.rule = lambda request: None
    over.set()
    assert "resumed from step-00000008" in machines.run("second")
    there = machines.folder_of("second")
    assert outcome(there) == outcome(undisturbed)
    assert json.loads(machines.stored("result.json"))["digest"] == result(undisturbed)["digest"]
    assert "is finished" in machines.run("third")


def test_store_that_dies_costs_no_finished_step(machines: Machines, door: Door, undisturbed: Path) -> None:
    door.rule = at(16, "model.safetensors", lambda: 503)
    output = machines.run("first", "--save-timeout-s", "20", code=171)
    assert "did not answer in time: write 00000001/checkpoints/" in output
    trains = threading.Event()
    # The training does not wait for the upload that the first attempt could not finish
    door.rule = lambda request: 503 if request.name.endswith("model.safetensors") and not trains.wait(COLD) else None
    job = machines.start("first")
    job.wait_for(": accuracy", timeout_s=COLD / 2)
    trains.set()
    assert job.wait() == [0], job.output
    step = int(job.output.split("resumed from step-")[1][:8])
    assert step >= 16, "the newer checkpoint on this machine's disk was not resumed"
    assert result(machines.folder_of("first"))["digest"] == result(undisturbed)["digest"]
    assert "is finished" in machines.run("second")


def test_run_without_a_copy_of_its_final_checkpoint_is_no_success(machines: Machines, door: Door) -> None:
    door.rule = at(32, "model.safetensors", lambda: 507)
    output = machines.run("first", code=2)
    assert f"error: {machines.url}/run is full: write 00000001/checkpoints/" in output
    door.rule = lambda request: None
    # All steps are done: only the copy is missing, which is made beside the end of the training
    assert "resumed from step-00000032" in machines.run("first")
    assert "is finished" in machines.run("second")


def test_store_that_denies_access_is_reported_before_the_training(machines: Machines, door: Door) -> None:
    door.rule = lambda request: 403 if request.method == "PUT" else None
    output = machines.run("first", code=2)
    assert f"error: {machines.url}/run denies access: create lease/00000001.json" in output
    assert "epoch 1" not in output
    assert "secret" not in output


def test_machine_that_fell_behind_takes_the_stores_run_and_keeps_its_own(
    machines: Machines, door: Door, undisturbed: Path
) -> None:
    machines.run("first", "--epochs", "1")
    machines.run("second", "--epochs", "2")
    door.rule = lambda request: 403 if request.method == "GET" and request.name.endswith("/config.yaml") else None
    assert "continued elsewhere: this machine's older files were moved to" in machines.run("first", code=2)
    door.rule = lambda request: None
    assert "resumed from step-00000016" in machines.run("first")
    (aside,) = machines.folder_of("first").glob("before-*")
    assert steps(aside / "checkpoints") == [8]
    assert outcome(machines.folder_of("first")) == outcome(undisturbed)


def test_fresh_starts_a_new_run_and_keeps_the_earlier_one_in_the_store(machines: Machines) -> None:
    machines.run("first", "--epochs", "1")
    earlier = json.loads(machines.stored("run.json"))["run"]
    assert "resumed" not in machines.run("second", "--epochs", "2", "--fresh", "--seed", "1")
    assert json.loads(machines.stored("run.json"))["run"] != earlier
    assert machines.stored("config.yaml").count(b"seed: 1")
    first = {name.partition("/00000001/")[2] for name in machines.names()}
    assert {"run.json", "metrics.jsonl", "config.yaml"} <= first
    assert "is finished" in machines.run("third", "--epochs", "2", "--seed", "1")


def test_commands_read_checkpoints_from_the_store(machines: Machines, tmp_path: Path) -> None:
    machines.run("first", "--epochs", "1")
    name = f"run/00000001/checkpoints/{json.loads(machines.stored('run.json'))['run']}"
    folder = next(key.split("/")[5] for key in machines.names() if key.endswith("manifest.json"))
    assert "accuracy" in machines.run("second", command="evaluate")
    exported, address = tmp_path / "model.pt", f"{machines.url}/{name}/{folder}"
    env = {**machines.door.env, "RANKUP_CACHE": str(tmp_path / "cache")}
    output = machines.forks.ends("export", address, exported, "--item", "model", env=env)
    assert exported.stat().st_size > 0
    output = machines.run("second", "--epochs", "1", "--name", "other", "--init-from", f"{machines.url}/run")
    assert f"started from {machines.url}/run: 4 of 4 tensors" in output


def test_shards_of_all_ranks_of_a_node_are_copied_and_restored(machines: Machines) -> None:
    split = ("--parallel", "fsdp", "--checkpoint-format", "sharded")
    machines.run("first", "--epochs", "1", *split, world_size=2)
    output = machines.run("second", "--epochs", "2", *split, world_size=2)
    assert "resumed from step-00000008" in output
