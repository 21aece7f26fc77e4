"""process/last_word.py: Kubernetes is told in one line why a container ended; no line hides the cause."""

from pathlib import Path

import pytest

from rankup.errors import FAULT, FINISHED, PEER_LOST, STOPPED, USER_MISTAKE
from tests.rigs.jobs import run
from train.process.last_word import LONGEST, tell_platform


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "termination-log"
    path.touch()  # the kubelet makes it
    monkeypatch.setenv("RANKUP_LAST_WORD", str(path))
    return path


def test_last_word_is_one_line_with_the_code(file: Path) -> None:
    tell_platform("RuntimeError:\n  shapes differ", FAULT)
    assert file.read_text() == "RuntimeError: shapes differ (exit code 1)\n"
    tell_platform("ä" * LONGEST, FAULT)
    assert len(file.read_bytes()) <= LONGEST + 1


def test_last_word_of_a_rank_that_lost_another_hides_nothing(file: Path) -> None:
    tell_platform("rank 0 lost rank 1", PEER_LOST)
    assert "lost rank 1" in file.read_text()
    tell_platform("rank 1: out of memory", 137)
    tell_platform("rank 0 lost rank 1", PEER_LOST)
    assert file.read_text() == "rank 1: out of memory (exit code 137)\n"


def test_last_word_is_taken_back_by_success(file: Path) -> None:
    tell_platform("stopped", STOPPED)
    tell_platform("finished", FINISHED)
    assert file.read_text() == ""


def test_last_word_goes_nowhere_without_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANKUP_LAST_WORD", raising=False)
    tell_platform("nobody asks", FAULT)
    monkeypatch.setenv("RANKUP_LAST_WORD", str(tmp_path / "no" / "folder"))
    tell_platform("nor here", FAULT)
    assert not list(tmp_path.iterdir())


def test_last_word_of_the_program_is_its_error(file: Path) -> None:
    job = run("train", "--lr", "-1", env={"RANKUP_LAST_WORD": str(file)})
    assert job.codes == [USER_MISTAKE]
    said = file.read_text()
    assert "lr must be" in said
    assert "exit code 2" in said
    assert said.count("\n") == 1
