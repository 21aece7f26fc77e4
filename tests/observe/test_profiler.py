"""--profile: a trace a rank of the chosen steps, and where their time went. It changes nothing else."""

import json
from pathlib import Path
from typing import Any

import pytest

from rankup.observe.profiler import COMMUNICATION, shares_of
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
        assert any(event["name"].startswith(COMMUNICATION) for event in found)
        assert any(event["name"].startswith("aten::") for event in found)
    traced = result(tmp_path / "traced" / "run")["profile"]
    assert traced["steps"] == [3, 7]
    for shares in traced["ranks"]:
        assert sum(shares[name] for name in ("data", "compute", "communication")) == pytest.approx(1, abs=1e-3)
        assert min(shares["compute"], shares["communication"]) > 0
    own = {name: f"{share:.0%}" for name, share in traced["ranks"][0].items()}
    row = f"data {own['data']}, compute {own['compute']}, communication {own['communication']} of the time (rank 0)"
    assert f"steps 3 to 7    {row}" in output
    assert "gpuGetDeviceCount" not in output
    assert "profile" not in result(tmp_path / "plain" / "run")


def test_profile_of_one_process_has_no_communication(forks: Forks, tmp_path: Path) -> None:
    train(forks, tmp_path, 1, "--max-steps", "4", "--profile", "0:4")
    (own,) = result(tmp_path / "run")["profile"]["ranks"]
    assert own["communication"] == own["overlapped"] == 0


def test_profile_of_a_run_that_stops_within_is_what_there_is_so_far(forks: Forks, tmp_path: Path) -> None:
    stop = {"PROBE": json.dumps({"where": "loss", "call": 7, "rank": 1, "signal": "SIGTERM"})}
    line = ("--max-steps", "12", "--profile", "2:10")
    train(forks, tmp_path, 2, *line, code=143, env=stop)
    traced = sum(event["name"] == "step" for event in events(tmp_path, 0))
    assert 2 <= traced <= 6
    output = train(forks, tmp_path, 2, *line)
    assert "profile  the run goes on at step " in output
    assert result(tmp_path / "run")["profile"]["steps"][1] == 10
    more = train(forks, tmp_path, 2, "--max-steps", "14", "--profile", "2:10")
    assert "profile  the run goes on at step 12: traces nothing of 2:10" in more
    assert "profile" not in result(tmp_path / "run")


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


def event(name: str, first: float, last: float, cat: str = "cpu_op") -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": cat, "ts": first, "dur": last - first}


def test_shares_count_what_is_hidden_once() -> None:
    """Two steps of 10. Waiting for the batch takes 2; half of an all-reduce of 3 is hidden behind a matrix product;
    time between the steps does not count."""
    found = [
        event("step", 0, 10, "user_annotation"), event("data", 0, 2, "user_annotation"), event("aten::copy_", 1, 2),
        event("aten::mm", 2, 6), event("aten::mul", 3, 4), event("gloo:all_reduce", 4, 7, "user_annotation"),
        event("c10d::allreduce_", 6, 7), event("gloo:all_reduce", 10, 19, "user_annotation"),
        event("step", 20, 30, "user_annotation"), {"ph": "M", "name": "process_name"},
    ]
    assert shares_of(found) == {"data": 0.1, "compute": 0.85, "communication": 0.05, "overlapped": 0.1}


def test_shares_of_a_gpu_are_those_of_its_kernels() -> None:
    found = [
        event("step", 0, 10, "user_annotation"), event("data", 0, 4, "user_annotation"), event("aten::mm", 4, 10),
        event("gemm", 2, 6, "kernel"), event("ncclDevKernel_AllReduce_Sum", 5, 8, "kernel"),
    ]
    assert shares_of(found) == {"data": 0.2, "compute": 0.6, "communication": 0.2, "overlapped": 0.1}
