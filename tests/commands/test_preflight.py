"""`launch --preflight`: the doctor looks at the machine before a rank starts, and its verdict ends the job."""

from pathlib import Path

from tests.rigs.fork_server import Forks
from tests.rigs.jobs import free_port, rank_env

# As a pod: its place stands in the environment, but its peer is nowhere
LOST = rank_env(1, 2, free_port())
SCRIPT = "print('started')"


def test_preflight_that_says_no_starts_no_rank(forks: Forks, tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(SCRIPT)
    (tmp_path / "runs").touch()  # no folder: nothing can be written there
    output = forks.ends("launch", "--preflight", script, env=LOST, cwds=[tmp_path], code=20)
    assert "NOT FIT  storage" in output
    assert ": not fit to train. No rank was started (exit code 20)" in output
    assert "started" not in output.splitlines()


def test_preflight_that_says_yes_is_followed_by_the_script(forks: Forks, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(SCRIPT)
    output = forks.ends("launch", "--preflight", "job.py", cwds=[tmp_path])
    assert output.index("doctor: fit to train") < output.index("started")


def test_doctor_alone_asks_no_other_rank(forks: Forks, tmp_path: Path) -> None:
    preload = "tests.rigs.injected_faults:healthy"
    output = forks.ends("doctor", "--alone", "--run-dir", tmp_path, env=LOST, preload=preload)
    assert "a single process" in output
