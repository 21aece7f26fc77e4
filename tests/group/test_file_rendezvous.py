"""--init-method: ranks that meet through a file, and files that earlier runs left."""

import json
import re
from pathlib import Path

import pytest

from rankup.agent.rank_agent import read_address
from tests.rigs.fork_server import Forks, Job

LINE = ("train", "--dataset", "digits", "--model", "mlp", "--max-steps", "3", "--tensorboard=false", "--name", "run")


def start(forks: Forks, file: Path, rank: int, *more: str) -> Job:
    where = ("--init-method", file.as_uri(), "--rank", str(rank), "--world-size", "2", "--run-dir", str(file.parent))
    return forks.start(*LINE, *where, *more)


def finish(forks: Forks, file: Path) -> str:
    """Run both ranks, first the one that must find the other. Return their output."""
    jobs = [start(forks, file, rank) for rank in (1, 0)]
    codes = [job.wait() for job in jobs]
    output = "\n".join(job.output for job in jobs)
    assert codes == [[0], [0]], output
    assert json.loads((file.parent / "run" / "result.json").read_text())["world_size"] == 2
    return output


def test_file_is_removed_once_the_ranks_have_met(forks: Forks, tmp_path: Path) -> None:
    output = finish(forks, tmp_path / "meeting")
    assert f"rank 0 of 2 (local 0), meeting through {tmp_path}/meeting; from environment" in output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_file_of_a_killed_run_is_replaced(forks: Forks, tmp_path: Path) -> None:
    file = tmp_path / "meeting"
    killed = start(forks, file, 0)
    killed.wait_until(file.exists, "its file")
    killed.kill()
    assert read_address(file) is not None
    finish(forks, file)


@pytest.mark.parametrize(("content", "why"), [
    ('{"rankup": ["127.0.0.1", 1]}', "127.0.0.1:1 refuses the connection"),  # from an earlier run
    ("", "rank 0 has not left its address in "),  # an empty file, as mktemp makes it
])
def test_file_without_a_live_rank_0_is_no_endless_wait(forks: Forks, tmp_path: Path, content: str, why: str) -> None:
    (tmp_path / "meeting").write_text(content)
    job = start(forks, tmp_path / "meeting", 1, "--join-timeout-s", "2")
    assert job.wait() == [170]
    assert re.search(rf"rank 1 of 2 on \S+ could not join within 2 s: {why}", job.output), job.output
    assert "or the file, must be those of rank 0" in job.output


@pytest.mark.parametrize("content", ["my thesis", "[]", '{"rankup": 1}'])
@pytest.mark.parametrize("rank", [0, 1])
def test_file_with_other_content_is_left_alone(forks: Forks, tmp_path: Path, content: str, rank: int) -> None:
    file = tmp_path / "precious"
    file.write_text(content)
    job = start(forks, file, rank)
    assert job.wait() == [2]
    assert f"error: --init-method: {file} must be a new file, got one that holds something else." in job.output
    assert "Traceback" not in job.output
    assert file.read_text() == content
