"""The files for Slurm without a Slurm: the lines that sbatch reads, and the command lines that follow from them."""

import json
import os
import re
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from tests.rigs.jobs import ROOT

DDP, TASK = ROOT / "slurm" / "ddp.sbatch", ROOT / "slurm" / "task.sh"
SIMPLE = ROOT / "slurm" / "simple.sbatch"
COMMON = {"job-name", "nodes", "ntasks-per-node", "cpus-per-task", "time", "partition", "signal", "output"}
SCRIPTS = sorted([*ROOT.glob("slurm/*.sh"), *ROOT.glob("slurm/*.sbatch")])
# Prints its name and words as JSON; as srun and apptainer it runs what stands behind its own options
RECORD = """#!/bin/bash
python3 -c 'import json, sys; print(json.dumps(sys.argv[1:]))' "$(basename "$0")" "$@" >> "$RECORD"
"""
SCONTROL = r"""#!/bin/bash
case "$*" in
  "show hostnames"*) printf 'big7\nbig9\n' ;;
  "show job"*) echo "JobId=7 Restarts=0 JobState=RUNNING Command=$DDP x" | tr ' ' '\n' ;;
esac
"""


def stub(folder: Path, name: str, text: str = RECORD) -> None:
    path = folder / name
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def recorded(folder: Path) -> list[list[str]]:
    return [json.loads(line) for line in (folder / "record").read_text().splitlines()]


def render(folder: Path, script: Path, *words: str, **env: str) -> list[list[str]]:
    """Run a script with stubs only, and give what it called."""
    for name in ("srun", "apptainer", "docker"):
        stub(folder, name)
    stub(folder, "scontrol", SCONTROL)
    clean = {
        "PATH": f"{folder}:{os.environ['PATH']}", "RECORD": str(folder / "record"), "DDP": str(DDP),
    }
    done = subprocess.run(
        ["bash", script, *words], env={**clean, **env}, cwd=folder, capture_output=True, text=True, timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return recorded(folder)


JOB = {
    "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "big[7,9]", "SLURM_JOB_NUM_NODES": "2", "SLURM_CPUS_ON_NODE": "16",
    "SLURM_SUBMIT_DIR": str(ROOT),
}


@pytest.mark.parametrize(
    ("file", "options"),
    [(DDP, {*COMMON, "account", "requeue", "open-mode"}), (SIMPLE, {*COMMON, "gpus-per-node"})],
    ids=["ddp", "simple"],
)
def test_slurm_every_sbatch_line_is_one_that_sbatch_reads(file: Path, options: set[str]) -> None:
    """Misspelled, or behind the first command, it is a comment, and nobody says so."""
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


def test_slurm_scripts_pass_shellcheck() -> None:
    if not shutil.which("shellcheck"):
        pytest.skip("no shellcheck here: apt install shellcheck")
    assert len(SCRIPTS) >= 4
    done = subprocess.run(["shellcheck", *SCRIPTS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_slurm_node_number_is_read_in_the_task_and_not_in_the_batch_shell() -> None:
    for file in (DDP, SIMPLE, ROOT / "slurm" / "job.sh"):
        assert "SLURM_NODEID" not in file.read_text()
        assert "SLURM_PROCID" not in file.read_text()


def test_slurm_files_to_copy_are_short() -> None:
    assert len(DDP.read_text().splitlines()) <= 50
    assert len(SIMPLE.read_text().splitlines()) <= 25


def test_slurm_simple_file_is_one_srun(tmp_path: Path) -> None:
    (call,) = render(tmp_path, SIMPLE, "--epochs", "9", SLURM_CPUS_PER_TASK="4")
    assert " ".join(call) == "srun --wait=30 python3 -m train.main launch -m train.main train --epochs 9"


def test_slurm_counts_come_from_the_allocation(tmp_path: Path) -> None:
    calls = render(tmp_path, DDP, "--epochs", "9", **JOB, SLURM_GPUS_ON_NODE="4", SLURM_NTASKS_PER_NODE="1")
    step = calls[-1]
    assert {"--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--wait=30"} <= set(step)
    assert step[-7:] == [str(TASK), "--nproc", "4", f"{ROOT}/train/main.py", "train", "--epochs", "9"]


def test_slurm_array_sets_the_seed_before_what_the_user_says(tmp_path: Path) -> None:
    step = render(tmp_path, DDP, "--lr", "1", **JOB, SLURM_ARRAY_JOB_ID="6", SLURM_ARRAY_TASK_ID="12")[-1]
    assert step[-4:] == ["--seed", "12", "--lr", "1"]


def test_slurm_pyxis_gets_image_and_mounts_from_srun(tmp_path: Path) -> None:
    step = render(tmp_path, DDP, **JOB, IMAGE="registry.example.org#me/rankup:1")[-1]
    assert "--container-image=registry.example.org#me/rankup:1" in step
    assert f"--container-mounts={ROOT}:{ROOT},{tmp_path}:{tmp_path}" in step
    assert f"--container-workdir={tmp_path}" in step


@pytest.mark.parametrize("gpus", [True, False])
def test_slurm_apptainer_runs_the_agent_in_each_task(gpus: bool, tmp_path: Path) -> None:
    more = {"SLURM_GPUS_ON_NODE": "4"} if gpus else {}
    (call,) = render(tmp_path, TASK, "train.py", "--epochs", "2", **more, IMAGE="rankup.sif", PYTHON="")
    assert call == [
        "apptainer", "exec", *(["--nv"] if gpus else []), "--bind", f"{ROOT},{tmp_path},/tmp", "--pwd", str(tmp_path),
        "rankup.sif", "python3", f"{ROOT}/train/main.py", "launch", "--max-restarts", "3", "train.py", "--epochs", "2",
    ]


def task(folder: Path, end: str, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """slurm/task.sh where `end` is the script that stands for Python."""
    stub(folder, "python", f"#!/bin/bash\necho start >> {folder}/starts\n{end}\n")
    env = {"PATH": os.environ["PATH"], "PYTHON": str(folder / "python"), **env}
    return subprocess.run([TASK, *words], env=env, capture_output=True, text=True, check=False)


def test_slurm_task_leaves_slurms_numbers_to_the_agent(tmp_path: Path) -> None:
    """Those that a container's hook or an earlier launcher left go; the package is found in any folder."""
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
def test_slurm_task_starts_an_agent_again_where_that_may_help(
    end: str, code: int, starts: int, tmp_path: Path
) -> None:
    done = task(tmp_path, end, MAX_RESTARTS="2")
    assert done.returncode == code, done.stderr
    assert len((tmp_path / "starts").read_text().splitlines()) == starts
    assert done.stderr.count("started again") == starts - 1


def test_slurm_batch_file_outside_a_job_says_how_it_is_run(tmp_path: Path) -> None:
    done = subprocess.run(["bash", DDP], capture_output=True, text=True, check=False, env={"PATH": os.environ["PATH"]})
    assert done.returncode == 2
    assert done.stderr == "slurm: this is a batch file: sbatch slurm/ddp.sbatch\n"
