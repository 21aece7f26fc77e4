"""A cloud's notice that it takes a machine away is treated as SIGTERM, against a server that speaks for the clouds."""

import json
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.rigs.clouds import NAME, TOKEN, Clouds
from tests.rigs.fork_server import Forks
from tests.rigs.jobs import free_port
from train.process.preemption import Metadata

TIME = "2026-11-22T14:00:00Z"
AZURE = {"EventId": "1", "EventType": "Preempt", "ResourceType": "VirtualMachine", "EventStatus": "Scheduled",
         "NotBefore": "Sun, 22 Nov 2026 14:00:00 GMT", "Resources": ["node-0", NAME]}


@pytest.fixture
def clouds() -> Iterator[Clouds]:
    server = Clouds()
    yield server
    server.close()


@pytest.mark.parametrize(
    ("cloud", "told", "notice"),
    [
        ("aws", {"action": "terminate", "time": TIME}, f"terminate at {TIME}"),
        ("aws", {"action": "stop", "time": TIME}, f"stop at {TIME}"),
        ("gcp", {"preempted": "TRUE"}, "preempted"),
        ("gcp", {"maintenance-event": "TERMINATE_ON_HOST_MAINTENANCE"}, "TERMINATE_ON_HOST_MAINTENANCE"),
        ("gcp", {"maintenance-event": "MIGRATE_ON_HOST_MAINTENANCE"}, ""),
        ("azure", [AZURE], "Preempt at Sun, 22 Nov 2026 14:00:00 GMT"),
        ("azure", [{**AZURE, "EventType": "Terminate", "NotBefore": ""}], "Terminate at once"),
        ("azure", [{**AZURE, "Resources": ["node-0"]}], ""),  # another machine of the group
        ("azure", [{**AZURE, "EventType": "Freeze"}], ""),  # a pause of some seconds
    ],
)
def test_notice_of_each_cloud_is_understood(clouds: Clouds, cloud: str, told: Any, notice: str) -> None:
    metadata = Metadata(cloud, clouds.address)
    assert metadata.notice() == ""
    clouds.notice = told
    assert metadata.notice() == notice


def test_token_of_aws_is_asked_for_once_and_again_when_it_is_refused(
    clouds: Clouds, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata = Metadata("aws", clouds.address)
    for _ in range(3):
        assert metadata.notice() == ""
    assert clouds.asked.count("PUT /latest/api/token") == 1
    clouds.notice = {"action": "terminate", "time": TIME}
    monkeypatch.setattr("tests.rigs.clouds.TOKEN", TOKEN[::-1])  # the old one is no longer good
    assert metadata.notice() == ""
    assert metadata.notice() == f"terminate at {TIME}"


def test_cloud_is_asked_past_the_proxy_of_the_environment(clouds: Clouds, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
    assert Metadata("gcp", clouds.address).notice() == ""


def test_service_that_is_another_clouds_is_no_notice(clouds: Clouds) -> None:
    clouds.answer = lambda *a: (404, "")  # type: ignore[method-assign]
    for cloud in ("gcp", "azure"):
        with pytest.raises(urllib.error.HTTPError):
            Metadata(cloud, clouds.address).notice()


LINE = ("train", "--workload", "tests.rigs.faulting_workload:build", "--batch-size", "8", "--schedule", "constant",
        "--log-every-steps", "1", "--tensorboard=false", "--progress=none", "--name", "run",
        "--save-every-steps", "100000")


def test_training_saves_and_leaves_with_143_when_its_cloud_says_so(
    forks: Forks, clouds: Clouds, tmp_path: Path
) -> None:
    env = {"RANKUP_METADATA_URL": clouds.address, "RANKUP_METADATA_EVERY_S": "0.05"}
    line = (*LINE, "--max-steps", "1000000", "--preemption-notices", "aws", "--run-dir", tmp_path)
    with forks.running(*line, world_size=2, env=env) as job:
        job.wait_until(lambda: len(clouds.asked) > 3, "the cloud was asked")
        clouds.notice = {"action": "terminate", "time": TIME}
        assert job.wait() == [143, 143], job.output
    assert f"aws is about to take this machine away (terminate at {TIME}): treated as SIGTERM" in job.output
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "stopped"
    assert list((tmp_path / "run" / "checkpoints").glob("step-*"))


def test_training_goes_on_where_its_cloud_does_not_answer(forks: Forks, tmp_path: Path) -> None:
    env = {"RANKUP_METADATA_URL": f"http://127.0.0.1:{free_port()}", "RANKUP_METADATA_EVERY_S": "0.01"}
    line = (*LINE, "--max-steps", "1000000", "--preemption-notices", "gcp", "--run-dir", tmp_path)
    metrics = tmp_path / "run" / "metrics.jsonl"
    with forks.running(*line, env=env) as job:
        job.wait_for("gcp could not be asked for notices of preemption")
        job.wait_until(metrics.exists, "the first step")
        steps = len(metrics.read_text().splitlines())
        job.wait_until(lambda: len(metrics.read_text().splitlines()) > steps + 30, "more steps")
        job.processes[0].signal("SIGTERM")
        assert job.wait() == [143], job.output
    assert job.output.count("gcp could not be asked for notices of preemption") == 1
