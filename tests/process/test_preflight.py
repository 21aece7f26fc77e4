"""`--preflight`: the doctor looks at the machine before a rank starts, and its verdict ends the job."""

from pathlib import Path

import pytest

from tests.rigs.fork_server import Forks
from tests.rigs.jobs import free_port, rank_env

TINY = ("--dataset", "digits", "--model", "mlp", "--max-steps", "2", "--tensorboard=false", "--name", "run")
# As a pod: the rank's place stands in the environment, but its peer is nowhere
LOST = rank_env(1, 2, free_port()) | {"MASTER_ADDR": "127.0.0.1"}


@pytest.mark.parametrize("command", ["supervise", "launch"])
def test_preflight_that_says_no_starts_no_rank(forks: Forks, tmp_path: Path, command: str) -> None:
    word = tmp_path / "termination-log"
    word.touch()
    (tmp_path / "file").touch()
    env = {"RANKUP_LAST_WORD": str(word), **(LOST if command == "supervise" else {})}
    line = (command, "--preflight", *TINY, "--run-dir", tmp_path / "file" / "runs")
    (code,), output = forks.run(*line, env=env)
    assert code == 20, output
    assert "NOT FIT  storage" in output
    assert ": not fit to train. No rank was started (exit code 20)" in output
    assert "ended with" not in output
    assert "not fit to train. No rank was started (exit code 20)" in word.read_text()


def test_preflight_that_says_yes_is_followed_by_the_training(forks: Forks, tmp_path: Path) -> None:
    (code,), output = forks.run("launch", "--preflight", *TINY, "--run-dir", tmp_path)
    assert code == 0, output
    assert output.index("doctor: fit to train") < output.index("ready after")
    assert (tmp_path / "run" / "result.json").exists()


def test_doctor_alone_asks_no_other_rank(forks: Forks, tmp_path: Path) -> None:
    preload = "tests.rigs.injected_faults:healthy"
    (code,), output = forks.run("doctor", "--alone", "--run-dir", tmp_path, env=LOST, preload=preload)
    assert code == 0, output
    assert "a single process" in output
