"""Secrets in the environment never leave it: no file, output or command line of a run contains them."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.rigs import jobs
from tests.rigs.fork_server import Forks

SECRETS = {
    "AWS_SECRET_ACCESS_KEY": "aws-9f1c-secret", "AWS_SESSION_TOKEN": "session-9f1c-secret",
    "HF_TOKEN": "hf-9f1c-secret", "WANDB_API_KEY": "wandb-9f1c-secret",
    "MLFLOW_TRACKING_PASSWORD": "mlflow-9f1c-secret", "MY_SECRET": "own-9f1c-secret",
}
MARK = "9f1c-secret"
TRAIN = ("--dataset", "digits", "--max-steps", "12", "--save-every-steps", "4")


def watch(*arguments: str | Path, cwd: Path) -> tuple[int, str, list[str]]:
    """Run the program, or `rankup launch`, with the secrets in its environment. Return its exit code, output, and the
    command lines of all its processes."""
    lines: set[str] = set()
    module = "rankup" if arguments[0] == "launch" else "train.main"
    job = jobs.start(sys.executable, "-m", module, *arguments, env=SECRETS, cwd=cwd)
    with jobs.ended(job):
        (process,) = job.processes
        while process.poll() is None:
            with contextlib.suppress(psutil.Error):
                root = psutil.Process(process.pid)
                for one in (root, *root.children(recursive=True)):
                    with contextlib.suppress(psutil.Error):
                        lines.add(" ".join(one.cmdline()))
            time.sleep(0.02)
        (code,) = job.wait()
    return code, job.output, sorted(lines)


def holders(folder: Path) -> list[str]:
    """Return the files below a folder whose name or content contains a secret."""
    found = [path for path in folder.rglob("*") if path.is_file()]
    assert found
    return [str(path) for path in found if MARK in str(path) or MARK.encode() in path.read_bytes()]


@pytest.mark.parametrize("fails", [False, True])
def test_run_leaves_no_secret_in_files_output_or_command_lines(tmp_path: Path, fails: bool) -> None:
    script, words = tmp_path / "script.py", [str(jobs.MAIN), "train", "--run-dir", str(tmp_path / "runs"), *TRAIN]
    if fails:
        text = "import os\nprint('has it:', bool(os.environ['HF_TOKEN']))\nraise ValueError('it fails')\n"
        script.write_text(text)
        words = [str(script)]
    code, output, lines = watch("launch", "--nproc=2", "--run-dir", tmp_path / "runs", *words, cwd=tmp_path)
    assert (code != 0, "has it: True" in output) == (fails, fails), output
    assert len(lines) >= 2
    assert MARK not in output
    assert not [line for line in lines if MARK in line]
    assert holders(tmp_path) == []


def test_doctor_prints_no_secret(tmp_path: Path) -> None:
    where = ("--run-dir", str(tmp_path / "runs"), "--dataset", "digits")
    _, output, lines = watch("doctor", "--json", *where, cwd=tmp_path)
    assert "digits" in output or "torch" in output
    assert MARK not in output
    assert not [line for line in lines if MARK in line]
    (tmp_path / "something").touch()
    assert holders(tmp_path) == []


def careful() -> None:
    """Preloaded. Set the umask of a user who lets nobody else read files."""
    os.umask(0o077)


def test_files_of_a_run_keep_to_a_strict_umask(forks: Forks, tmp_path: Path) -> None:
    env = {"RANKUP_CACHE": str(tmp_path / "c")}
    forks.ends("train", *TRAIN, "--run-dir", tmp_path / "runs", env=env, preload=f"{__name__}:careful")
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "runs").rglob("*")}
    assert len(modes) > 10
    assert not {str(path): oct(mode) for path, mode in modes.items() if mode & 0o077}
