"""The files for Slurm without a Slurm: the lines that sbatch reads, and the command lines that follow from them."""

import json
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rigs.jobs import ROOT, environment
from train.process.status import write_json

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
        "PATH": f"{folder}:{os.environ['PATH']}", "RECORD": str(folder / "record"), "DDP": str(DDP), "KEEP_CODE": "",
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
    for file in (DDP, SIMPLE, ROOT / "slurm" / "supervise.py", ROOT / "slurm" / "job.py"):
        assert "SLURM_NODEID" not in file.read_text()
        assert "SLURM_PROCID" not in file.read_text()


def test_slurm_files_to_copy_are_short() -> None:
    assert len(DDP.read_text().splitlines()) <= 50
    assert len(SIMPLE.read_text().splitlines()) <= 25


def test_slurm_simple_file_is_one_srun(tmp_path: Path) -> None:
    (call,) = render(tmp_path, SIMPLE, "--epochs", "9", SLURM_CPUS_PER_TASK="4")
    assert call == ["srun", "--kill-on-bad-exit=1", "python3", "-m", "train.main", "supervise", "--epochs", "9"]


def test_slurm_counts_come_from_the_allocation(tmp_path: Path) -> None:
    calls = render(tmp_path, DDP, "--epochs", "9", **JOB, SLURM_GPUS_ON_NODE="4", SLURM_NTASKS_PER_NODE="1")
    step = calls[-1]
    assert {"--nodes=2", "--ntasks=8", "--ntasks-per-node=4", "--kill-on-bad-exit=1", "--wait=60"} <= set(step)
    assert step[-4:] == [str(TASK), "train", "--epochs", "9"]
    assert "--overcommit" not in step


def test_slurm_more_processes_than_cpus_share_them(tmp_path: Path) -> None:
    job = {**JOB, "SLURM_CPUS_ON_NODE": "1"}
    assert "--overcommit" in render(tmp_path, DDP, **job, SLURM_GPUS_ON_NODE="4")[-1]


def test_slurm_array_sets_the_seed_before_what_the_user_says(tmp_path: Path) -> None:
    step = render(tmp_path, DDP, "--lr", "1", **JOB, SLURM_ARRAY_JOB_ID="6", SLURM_ARRAY_TASK_ID="12")[-1]
    assert step[-4:] == ["--seed", "12", "--lr", "1"]


def test_slurm_pyxis_gets_image_and_mounts_from_srun(tmp_path: Path) -> None:
    step = render(tmp_path, DDP, **JOB, IMAGE="registry.example.org#me/rankup:1")[-1]
    assert "--container-image=registry.example.org#me/rankup:1" in step
    assert f"--container-mounts={ROOT}:{ROOT},{tmp_path}:{tmp_path}" in step
    assert f"--container-workdir={tmp_path}" in step


@pytest.mark.parametrize("gpus", [True, False])
def test_slurm_apptainer_runs_the_program_in_each_task(gpus: bool, tmp_path: Path) -> None:
    task = {
        "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NTASKS": "8", "MASTER_ADDR": "big7", "MASTER_PORT": "17007",
    }
    more = {"SLURM_GPUS_ON_NODE": "4"} if gpus else {}
    (call,) = render(tmp_path, TASK, "train", "--epochs", "2", **task, **more, IMAGE="rankup.sif", PYTHON="")
    assert call == [
        "apptainer", "exec", *(["--nv"] if gpus else []), "--bind", f"{ROOT},{tmp_path},/tmp", "--pwd", str(tmp_path),
        "rankup.sif", "python3", f"{ROOT}/train/main.py", "supervise", "--command", "train", "--epochs", "2",
    ]


@pytest.mark.parametrize("launcher", ["tasks", "torchrun"])
def test_slurm_task_hands_slurms_numbers_on(launcher: str, tmp_path: Path) -> None:
    """In place of those that a container's hook or an earlier launcher left."""
    stub(tmp_path, "python", '#!/bin/bash\nenv > "$ENV"\n' + RECORD.split("\n", 1)[1])
    task = {
        "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NTASKS": "8", "SLURM_NNODES": "4", "SLURM_NODEID": "2",
        "NPROC": "2", "MASTER_ADDR": "big7", "MASTER_PORT": "17007", "RANK": "0", "WORLD_SIZE": "99",
        "ENV": str(tmp_path / "env"), "PYTHON": str(tmp_path / "python"), "LAUNCHER": launcher, "SLURM_JOB_ID": "7",
    }
    (call,) = render(tmp_path, TASK, "train", **task)
    env = dict(line.split("=", 1) for line in (tmp_path / "env").read_text().splitlines() if "=" in line)
    if launcher == "tasks":
        assert (env["RANK"], env["LOCAL_RANK"], env["WORLD_SIZE"]) == ("5", "1", "8")
        assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("big7", "17007")
    else:
        assert "RANK" not in env
        words = " ".join(call)
        assert "--nnodes 4 --node-rank 2 --nproc-per-node 2 --master-addr big7 --master-port 17007" in words
        assert "--max-restarts 0" in words


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("exit 0", 0), ("exit 2", 202), ("exit 143", 143), ("exit 171", 171),
        # More than the 143 of the tasks that srun stops then: the job was not asked to stop, it lost a rank
        ("kill -KILL $$", 137 + 50), ("kill -SEGV $$", 139 + 50),
    ],
)
def test_slurm_task_ends_with_a_code_that_the_codes_of_its_peers_do_not_hide(
    end: str, code: int, tmp_path: Path
) -> None:
    stub(tmp_path, "python", f"#!/bin/bash\n{end}\n")
    env = {"PATH": os.environ["PATH"], "PYTHON": str(tmp_path / "python"), "RANKUP_ATTEMPT": "slurm-7-0"}
    assert subprocess.run([TASK, "train"], env=env, capture_output=True, check=False).returncode == code


def test_slurm_batch_file_outside_a_job_says_how_it_is_run(tmp_path: Path) -> None:
    done = subprocess.run(["bash", DDP], capture_output=True, text=True, check=False, env={"PATH": os.environ["PATH"]})
    assert done.returncode == 2
    assert done.stderr == "slurm: this is a batch file: sbatch slurm/ddp.sbatch\n"


def test_slurm_sif_converts_the_image(tmp_path: Path) -> None:
    calls = render(tmp_path, ROOT / "slurm" / "sif.sh")
    assert calls[1][:3] == ["docker", "save", "--output"]
    assert calls[2] == ["apptainer", "build", "--force", "rankup.sif", f"docker-archive:{calls[1][3]}"]


@pytest.mark.parametrize(
    ("codes", "cause", "suspect"), [([], 0, 3), ([143], 143, 3), ([143, 171], 171, 3), ([171, 2], 2, 3)]
)
def test_slurm_progress_says_where_the_run_stands(
    codes: list[int], cause: int, suspect: int, tmp_path: Path
) -> None:
    run = tmp_path / "my runs" / "job"
    for step in (40, 120):
        (run / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    # Of the attempts of this step, which the ranks' supervisors number, the newest counts
    attempts = {"slurm-7-0-0": [1], "slurm-7-1-0": [171, 1], "slurm-7-1-1": codes, "slurm-7-10-0": [1]}
    for when_s, (attempt, ends) in enumerate(attempts.items()):
        folder = run / "status" / attempt
        folder.mkdir(parents=True)
        for rank, code in enumerate(ends):
            lost = 3 if code == 171 else rank or None  # a rank that suspects itself says nothing of others
            write_json(folder / f"rank-{rank}.json", {"rank": rank, "code": code, "suspect": lost})
        os.utime(folder, (when_s, when_s))
    words = ["train", "--run-dir", "my runs", "--name", "job", "--dataset", "digits"]
    done = subprocess.run(
        [sys.executable, ROOT / "slurm" / "progress.py", *words], cwd=tmp_path, capture_output=True, text=True,
        check=True, env=environment({"RANKUP_ATTEMPT": "slurm-7-1"}),
    )
    assert done.stdout == f"my runs/job 120 {cause} {suspect}\n"
