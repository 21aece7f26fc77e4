"""--profile: a trace a rank of the chosen steps. It changes nothing else."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.rigs.fork_server import Forks
from tests.rigs.jobs import result
from train.config import Config

# 8 steps an epoch
LINE = (
    "train", "--workload", "tests.rigs.faulting_workload:build", "--batch-size", "8", "--tensorboard=false",
    "--progress=none", "--name", "run",
)


def train(forks: Forks, folder: Path, world_size: int, *more: str, code: int = 0, **others: Any) -> str:
    codes, output = forks.run(*LINE, *more, "--run-dir", folder, world_size=world_size, **others)
    assert codes == [code] * world_size, output
    return output


def events(folder: Path, rank: int) -> list[dict[str, Any]]:
    trace = json.loads((folder / "run" / "profile" / f"rank-{rank}.pt.trace.json").read_text())
    return [event for event in trace["traceEvents"] if event.get("ph") == "X"]


@pytest.mark.parametrize("method", ["ddp", "fsdp"])
def test_profile_traces_the_steps_of_every_rank_and_changes_no_bit(forks: Forks, tmp_path: Path, method: str) -> None:
    line = ("--parallel", method, "--max-steps", "10")
    train(forks, tmp_path / "plain", 2, *line)
    output = train(forks, tmp_path / "traced", 2, *line, "--profile", "3:7")
    assert result(tmp_path / "traced" / "run")["digest"] == result(tmp_path / "plain" / "run")["digest"]
    files = sorted(path.name for path in (tmp_path / "traced" / "run" / "profile").iterdir())
    assert files == ["rank-0.pt.trace.json", "rank-1.pt.trace.json"]
    for rank in range(2):
        found = events(tmp_path / "traced", rank)
        names = [event["name"] for event in found if event.get("cat") == "user_annotation"]
        assert (names.count("step"), names.count("data")) == (4, 4)
        assert any(event["name"].startswith(("gloo:", "c10d::")) for event in found)
        assert any(event["name"].startswith("aten::") for event in found)
    assert "gpuGetDeviceCount" not in output


def test_profile_of_a_run_that_stops_within_is_what_there_is_so_far(forks: Forks, tmp_path: Path) -> None:
    stop = {"PROBE": json.dumps({"where": "loss", "call": 7, "rank": 1, "signal": "SIGTERM"})}
    line = ("--max-steps", "12", "--profile", "2:10")
    train(forks, tmp_path, 2, *line, code=143, env=stop)
    traced = sum(event["name"] == "step" for event in events(tmp_path, 0))
    assert 2 <= traced <= 6
    output = train(forks, tmp_path, 2, *line)
    assert "profile  the run goes on at step " in output
    assert 0 < sum(event["name"] == "step" for event in events(tmp_path, 0)) <= 8
    more = train(forks, tmp_path, 2, "--max-steps", "14", "--profile", "2:10")
    assert "profile  the run goes on at step 12: traces nothing of 2:10" in more


@pytest.mark.parametrize("span", ["7:3", "5:5", "0:101"])
def test_profile_of_no_steps_or_too_many_is_refused(span: str) -> None:
    with pytest.raises(ValueError, match="profile must be FIRST:LAST with FIRST before LAST, at most 100 steps, got"):
        Config(profile=span)


@pytest.mark.parametrize("span", ["10", "a:b", "-1:5", "3:"])
def test_profile_that_is_no_range_is_refused(forks: Forks, tmp_path: Path, span: str) -> None:
    output = train(forks, tmp_path, 1, f"--profile={span}", code=2)
    rule = "--profile must be FIRST:LAST, such as 10:20, got"
    assert f'{rule} "{span}".' in output or f"{rule} {span}." in output


def test_profile_past_the_end_of_the_run_is_refused(forks: Forks, tmp_path: Path) -> None:
    output = train(forks, tmp_path, 2, "--max-steps", "9", "--profile", "5:10", code=2)
    assert output.count("profile must end by step 9, the last of the run, got 5:10.") == 1
    assert "Traceback" not in output
