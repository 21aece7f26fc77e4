"""The files for Slurm, tested without a Slurm: the lines that sbatch reads, and the command lines that they build."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.rigs.jobs import ROOT

DDP, TASK = ROOT / "slurm" / "ddp.sbatch", ROOT / "slurm" / "task.sh"
SIMPLE = ROOT / "slurm" / "simple.sbatch"
COMMON = {"job-name", "nodes", "ntasks-per-node", "cpus-per-task", "time", "partition", "signal", "output"}


@pytest.mark.parametrize(
    ("file", "options"),
    [(DDP, {*COMMON, "account", "requeue", "open-mode"}), (SIMPLE, {*COMMON, "gpus-per-node"})],
    ids=["ddp", "simple"],
)
def test_slurm_sbatch_lines_have_options_that_sbatch_reads(file: Path, options: set[str]) -> None:
    """A line that is misspelled or after the first command would silently be a comment."""
    lines = file.read_text().splitlines()
    first = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    found = [(number, line) for number, line in enumerate(lines) if re.match(r"#+\s*SBATCH", line, re.IGNORECASE)]
    for number, line in found:
        match = re.fullmatch(r"##?SBATCH --([a-z-]+)(=[^\s#]+)?(\s+# EDIT( .*)?)?", line)
        assert match, line
        assert number < first, line
        assert match[1] in options, line
        assert line.startswith("#SBATCH") or "EDIT" in line
    named = [re.search(r"--([a-z-]+)", line)[1] for _, line in found]  # type: ignore[index]
    assert len(named) == len(set(named)) == len(options)


def task(
    folder: Path, script: str, *words: str, program: str = "python", **env: str
) -> subprocess.CompletedProcess[str]:
    """Run slurm/task.sh with this shell script in place of `program`."""
    (folder / program).write_text(f"#!/bin/bash\necho start >> {folder}/starts\n{script}\n")
    (folder / program).chmod(0o755)
    env = {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHON": str(folder / "python"), **env}
    return subprocess.run([TASK, *words], env=env, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("gpus", [True, False])
def test_slurm_apptainer_runs_the_agent_in_each_task(gpus: bool, tmp_path: Path) -> None:
    env = {"IMAGE": "rankup.sif", "PYTHON": "", **({"SLURM_GPUS_ON_NODE": "4"} if gpus else {})}
    done = task(tmp_path, 'echo "$@"', "train.py", "--epochs", "2", program="apptainer", **env)
    assert done.stdout.split() == [
        "exec", *(["--nv"] if gpus else []), "--bind", f"{ROOT},{tmp_path},/tmp", "--pwd", str(tmp_path), "rankup.sif",
        "python3", f"{ROOT}/train/main.py", "launch", "--max-restarts", "3", "train.py", "--epochs", "2",
    ]


def test_slurm_task_passes_slurms_variables_and_drops_other_launchers(tmp_path: Path) -> None:
    """A container's hook or an earlier launcher may have set the others. PYTHONPATH leads to rankup from any folder."""
    env = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "99", "GROUP_RANK": "1", "SLURM_PROCID": "5"}
    done = task(tmp_path, "env; exit 0", **env)
    seen = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    assert seen["SLURM_PROCID"] == "5"
    assert not {"RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_RANK"} & set(seen)
    assert seen["PYTHONPATH"] == str(ROOT)


@pytest.mark.parametrize(
    ("end", "code", "starts"),
    [
        ("exit 0", 0, 1), ("exit 2", 2, 1), ("exit 143", 143, 1), ("exit 171", 171, 3), ("kill -KILL $$", 137, 3),
        ("kill -TERM $PPID; sleep 0.2; exit 171", 171, 1),
    ],
    ids=["finished", "mistake", "stopped", "gave up", "killed", "a stop was on its way"],
)
def test_slurm_task_restarts_an_agent_after_codes_to_retry(
    end: str, code: int, starts: int, tmp_path: Path
) -> None:
    done = task(tmp_path, end, MAX_RESTARTS="2")
    assert done.returncode == code, done.stderr
    assert len((tmp_path / "starts").read_text().splitlines()) == starts
    assert done.stderr.count(", restarted (") == starts - 1
