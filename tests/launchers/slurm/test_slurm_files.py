"""slurm/ddp.sbatch, tested without a Slurm: the lines that sbatch reads, and the command that it runs."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.rigs.slurm_cluster import DDP

OPTIONS = {
    "job-name", "nodes", "gpus-per-node", "ntasks-per-node", "cpus-per-task", "time", "partition", "account", "signal",
    "requeue", "requeue=expedite", "open-mode", "output",
}


def test_slurm_sbatch_lines_have_options_that_sbatch_reads() -> None:
    """A line that is misspelled or after the first command would silently be a comment."""
    lines = DDP.read_text().splitlines()
    first = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    found = [(number, line) for number, line in enumerate(lines) if re.match(r"#+\s*SBATCH", line, re.IGNORECASE)]
    named = []
    for number, line in found:
        match = re.fullmatch(r"##?SBATCH --([a-z-]+(?:=expedite)?)(=[^\s#]+)?(\s+# EDIT( .*)?)?", line)
        assert match, line
        assert number < first, line
        assert line.startswith("#SBATCH") or "EDIT" in line
        named.append(match[1])
    assert sorted(named) == sorted(OPTIONS)


@pytest.mark.parametrize(("env", "seed"), [({}, []), ({"SLURM_ARRAY_TASK_ID": "3"}, ["--seed", "3"])])
def test_slurm_file_starts_the_command_of_its_environment(env: dict[str, str], seed: list[str], tmp_path: Path) -> None:
    """Each task of an array has a seed, which words after the file's name override."""
    command = tmp_path / ".venv" / "bin" / "rankup"
    command.parent.mkdir(parents=True)
    command.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\nexit 171\n")
    command.chmod(0o755)
    env = {"PATH": os.environ["PATH"], **env}
    done = subprocess.run(
        ["bash", DDP, "--epochs", "5 6"], env=env, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 171
    assert done.stdout.splitlines() == ["launch", "train/main.py", "train", *seed, "--epochs", "5 6"]
