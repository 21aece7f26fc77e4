"""slurm/ddp.sbatch, tested without a Slurm: its reactions to each end of a step, signal and answer of Slurm."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rigs.jobs import ROOT, wait_for

# The stub records each call, and answers from the files in $STUB. A step of agents ends with the next line of `codes`
SRUN = r"""#!/bin/bash
echo "$*" >> "$STUB/steps"
case "$*" in
  *"task.sh "*)
    [[ -z ${ENDED:-} || ! -e $STUB/ended ]] || cp "$STUB/ended" "$ENDED"
    code=$(sed -n "$(grep -c task.sh "$STUB/steps")p" "$STUB/codes")
    if [[ $code == waits ]]; then
      trap 'echo USR1 >> "$STUB/signals"; exit 143' USR1
      touch "$STUB/waiting"
      for ((tries = 0; tries < 2400; tries++)); do sleep 0.1; done
    fi
    exit "$code" ;;
  *"for path;"*) [[ ! -e $STUB/probe ]] || . "$STUB/probe" ;;
esac
"""
SCONTROL = r"""#!/bin/bash
echo "$*" >> "$STUB/control"
case "$*" in
  "show hostnames big[7,9]") printf 'big7\nbig9\n' ;;
  "show hostnames"*) tr ',' '\n' <<< "$3" ;;
  "show job"*) echo "JobId=7 $(cat "$STUB/state") Command=$DDP x" | tr ' ' '\n' ;;
  requeue*) exit "${REQUEUE:-0}" ;;
esac
"""
DDP = ROOT / "slurm" / "ddp.sbatch"
SETTINGS = {
    "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "big[7,9]", "SLURM_JOB_CPUS_PER_NODE": "16,2", "DDP": str(DDP),
    "PYTHON": sys.executable,
}
ARRAY = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}
TASK = f"{ROOT}/slurm/task.sh --nproc 1"
TRAIN = f"{TASK} {ROOT}/train/main.py train"


class Started:
    """ddp.sbatch in its own folder, with stubs of srun and scontrol in PATH."""

    def __init__(self, folder: Path, codes: str, **env: str) -> None:
        self.folder, self.run_dir = folder, folder / "runs" / "slurm-7"
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        for name, text in {"codes": "\n".join(codes.split()), "state": "Restarts=0 JobState=RUNNING"}.items():
            if not (folder / name).exists():
                (folder / name).write_text(f"{text}\n")
        self.env = {**SETTINGS, "PATH": f"{folder}:{os.environ['PATH']}", "STUB": str(folder), **env}

    def at(self, step: int) -> None:
        """Give the run a checkpoint of this step."""
        (self.run_dir / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)

    def start(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(["bash", DDP, *words], env=self.env, cwd=self.folder, stderr=subprocess.PIPE, text=True)

    def run(self, *words: str) -> tuple[int, str]:
        """Run the file. Return its exit code and what it printed to stderr."""
        process = self.start(*words)
        said = process.communicate(timeout=240)[1]
        return process.returncode, said

    def lines(self, name: str) -> list[str]:
        path = self.folder / name
        return path.read_text().splitlines() if path.exists() else []

    def trained(self) -> list[str]:
        """Return srun's arguments of each step of agents, except the doctor's."""
        return [line for line in self.lines("steps") if "task.sh" in line and "main.py doctor" not in line]

    def requeued(self) -> list[str]:
        return [line for line in self.lines("control") if line.startswith("requeue")]


@pytest.mark.parametrize(
    ("code", "requeues"), [(0, 0), (1, 0), (2, 0), (75, 0), (137, 1), (170, 1), (171, 1), (143, 1)]
)
def test_slurm_job_ends_with_its_agents_code_and_requeues_codes_to_retry(
    code: int, requeues: int, tmp_path: Path
) -> None:
    """143 without a signal to the job means that somebody else stopped the agents. A requeue resumes the job."""
    job = Started(tmp_path, str(code))
    job.at(40)
    end, said = job.run("--lr", "1")
    assert (end, len(job.requeued())) == (code, requeues), said
    (line,) = job.trained()
    assert line.endswith(f"{TRAIN} --lr 1")
    assert f"start 1 ended with {code} at step 40" in said


@pytest.mark.parametrize(("ended", "code", "requeues"), [("0", 0, 0), ("1", 1, 0), ("", 137, 1)])
def test_slurm_elastic_job_ends_with_the_code_that_its_agents_wrote(
    ended: str, code: int, requeues: int, tmp_path: Path
) -> None:
    """srun's own code is that of a lost node. Agents write no code if the job is to be resumed."""
    job = Started(tmp_path, "137", NNODES="3:4")
    if ended:
        (tmp_path / "ended").write_text(f"{ended}\n")
    end, said = job.run()
    assert (end, len(job.requeued())) == (code, requeues), said
    (line,) = job.trained()
    assert "--no-kill --wait=0" in line
    assert line.endswith(f"{TASK} --nnodes 3:4 {ROOT}/train/main.py train")


@pytest.mark.parametrize(
    ("code", "nodes", "requeues"),
    [(0, "big8,big9", 1), (0, "big7,big8", 0), (1, "big8,big9", 1), (171, "big8,big9", 0)],
)
def test_slurm_finished_agents_requeue_a_job_without_its_first_node(
    code: int, nodes: str, requeues: int, tmp_path: Path
) -> None:
    """Without its batch script, Slurm would let the job hold the other nodes to the end of its time."""
    (tmp_path / "state").write_text(f"ExcNodeList=(null) NodeList={nodes} BatchHost=big7")
    agent = tmp_path / "agent"
    agent.write_text(f"#!/bin/sh\nexit {code}\n")
    agent.chmod(0o755)
    ended = tmp_path / "ended"
    job = Started(tmp_path, "0", PYTHON=str(agent), MAX_RESTARTS="0", ENDED=str(ended))
    assert subprocess.run(["bash", ROOT / "slurm" / "task.sh"], env=job.env, check=False).returncode == code
    assert len(job.requeued()) == requeues
    assert ended.exists() == (code < 128)


def test_slurm_own_script_gets_its_arguments_unchanged(tmp_path: Path) -> None:
    """So it does in an array: the script reads the number of its array task itself."""
    job = Started(tmp_path, "0", SCRIPT="--max-restarts 1 --name x job.py", **ARRAY)
    assert job.run("--lr", "1", "a b")[0] == 0
    assert job.trained()[0].endswith(f"{TASK} --max-restarts 1 --name x job.py --lr 1 a b")


def test_slurm_step_gets_counts_of_the_allocation_and_the_image_for_pyxis(tmp_path: Path) -> None:
    image = "registry.example.org#me/rankup:1"
    tasks = {"SLURM_NTASKS": "8", "SLURM_TASKS_PER_NODE": "4(x2)"}
    job = Started(tmp_path, "0", SLURM_GPUS_ON_NODE="4", IMAGE=image, **tasks)
    code, said = job.run("--epochs", "9")
    assert (code, "4 processes share 2 CPUs" in said) == (0, True), said
    (line,) = job.trained()
    assert {
        "--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--wait=30", "--gpus-per-node=4", "--export=ALL",
        f"--container-image={image}", f"--container-mounts={ROOT}:{ROOT},{tmp_path}:{tmp_path}",
        f"--container-workdir={tmp_path}",
    } <= set(line.split())
    assert line.endswith(f"{ROOT}/slurm/task.sh --nproc 4 {ROOT}/train/main.py train --epochs 9")


def test_slurm_job_with_a_total_of_gpus_asks_for_no_number_per_node(tmp_path: Path) -> None:
    """Slurm may have given the nodes different numbers of GPUs."""
    job = Started(tmp_path, "0", SLURM_GPUS_ON_NODE="4", SLURM_GPUS="6")
    assert job.run()[0] == 0
    assert "--gpus" not in job.trained()[0]


@pytest.mark.parametrize("tasks", [
    {"SLURM_NTASKS": "4", "SLURM_TASKS_PER_NODE": "2(x2)"}, {"SLURM_NTASKS_PER_NODE": "2"},
], ids=["all", "per-node"])
def test_slurm_node_without_gpus_has_one_rank_for_each_task(tasks: dict[str, str], tmp_path: Path) -> None:
    job = Started(tmp_path, "0", **tasks)
    assert job.run()[0] == 0
    assert job.trained()[0].endswith(f"{ROOT}/slurm/task.sh --nproc 2 {ROOT}/train/main.py train")


@pytest.mark.parametrize(
    ("number", "requeues"), [(signal.SIGUSR1, 1), (signal.SIGUSR2, 1), (signal.SIGTERM, 0)], ids=str
)
def test_slurm_signals_reach_the_ranks_and_only_warnings_requeue(number: int, requeues: int, tmp_path: Path) -> None:
    """SIGTERM comes from scancel, a time limit or a requeue, and Slurm itself decides what follows."""
    job = Started(tmp_path, "waits")
    job.at(40)
    process = job.start()
    wait_for("a step", (tmp_path / "waiting").exists, process=process)
    process.send_signal(number)
    said = process.communicate(timeout=240)[1]
    assert (process.returncode, job.lines("signals"), len(job.requeued())) == (143, ["USR1"], requeues), said
    assert len(job.trained()) == 1
    assert ("requeued at step 40; start 1 is over" in said) == bool(requeues)


@pytest.mark.parametrize(("number", "requeues"), [(signal.SIGUSR1, 1), (signal.SIGTERM, 0)])
def test_slurm_signal_before_the_ranks_start_prevents_the_start(number: int, requeues: int, tmp_path: Path) -> None:
    (tmp_path / "probe").write_text('touch "$STUB/probing"; until [[ -e $STUB/go ]]; do sleep 0.02; done\n')
    job = Started(tmp_path, "0")
    process = job.start()
    wait_for("the first step", (tmp_path / "probing").exists, process=process)
    process.send_signal(number)
    (tmp_path / "go").touch()
    said = process.communicate(timeout=240)[1]
    assert (process.returncode, job.trained(), len(job.requeued())) == (143, [], requeues), said


@pytest.mark.parametrize(("before", "requeues"), [("40", 0), ("20", 1)])
def test_slurm_job_that_fails_again_at_the_same_step_is_not_requeued(
    before: str, requeues: int, tmp_path: Path
) -> None:
    job = Started(tmp_path, "171")
    job.at(9)
    job.at(40)
    mark = job.run_dir / ".slurm-failed"
    mark.write_text(f"{before}\n")
    code, said = job.run()
    assert (code, len(job.requeued())) == (171, requeues)
    assert ("failed again without a new checkpoint since step 40: not requeued" in said) == (not requeues)
    assert mark.read_text() == "40\n"


GONE = "this process ends"  # on a node that Slurm thought lost: the job runs elsewhere, or is over


@pytest.mark.parametrize(
    ("state", "env", "code", "requeued", "says"),
    [
        ("Restarts=1 JobState=RUNNING", {}, 2, [], GONE),
        ("Restarts=0 JobState=PENDING", {}, 2, [], GONE),
        ("Restarts=0 JobState=FAILED", {}, 2, [], GONE),
        ("Restarts=2 JobState=RUNNING", {"MAX_REQUEUES": "2", "SLURM_RESTART_COUNT": "2"}, 143, [], "MAX_REQUEUES=2"),
        ("Restarts=0 JobState=RUNNING", {"REQUEUE": "1"}, 143, ["requeue 7"], "resubmit it with --name job"),
        ("Restarts=0 JobState=RUNNING", ARRAY, 143, ["requeue 7_3"], "requeued at step 0"),
    ],
)
def test_slurm_start_requeues_only_its_own_job_and_within_its_limit(
    state: str, env: dict[str, str], code: int, requeued: list[str], says: str, tmp_path: Path
) -> None:
    (tmp_path / "state").write_text(f"{state}\n")
    job = Started(tmp_path, "143", **env)
    found, said = job.run("--name=job", "--lr", "1")
    assert (found, job.requeued(), says in said) == (code, requeued, True), said
    (line,) = job.trained()
    assert line.endswith(f"{TRAIN} {'--seed 3 ' if env == ARRAY else ''}--name=job --lr 1")


@pytest.mark.parametrize("probe", ["sleep 60", "exit 1"])
def test_slurm_job_whose_nodes_run_no_first_step_is_requeued(probe: str, tmp_path: Path) -> None:
    (tmp_path / "probe").write_text(f"{probe}\n")
    job = Started(tmp_path, "0", FIRST_STEP_S="1")
    code, said = job.run()
    assert (code, job.requeued(), job.trained()) == (143, ["requeue 7"], [])
    assert "not every node of big[7,9] ran a first step within 1 s" in said
    assert not list(tmp_path.glob(".slurm-*"))


def test_slurm_nodes_without_the_shared_disk_are_named(tmp_path: Path) -> None:
    (tmp_path / "probe").write_text("printf 'big7\\nbig9\\n'\n")
    code, said = Started(tmp_path, "0").run()
    assert code == 2
    assert f"{tmp_path} or {ROOT} does not exist on big7 big9: put the checkout and runs/ on a disk" in said
    assert not list(tmp_path.glob(".slurm-*"))


@pytest.mark.parametrize(
    ("doctor", "codes", "end", "trainings"),
    [("1", "0 0", 0, 1), ("1", "10 0", 0, 1), ("1", "20", 20, 0), ("only", "10", 10, 0)],
)
def test_slurm_doctor_decides_whether_the_job_trains(
    doctor: str, codes: str, end: int, trainings: int, tmp_path: Path
) -> None:
    job = Started(tmp_path, codes, DOCTOR=doctor)
    code, said = job.run("--lr", "1")
    assert (code, len(job.trained()), job.requeued()) == (end, trainings, []), said
    assert ("the doctor ended with 20 (20: nodes not fit" in said) == (end == 20)
    assert [line for line in job.lines("steps") if line.endswith(f"{TASK} {ROOT}/train/main.py doctor --lr 1")]


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ({"DOCTOR": "yes"}, "DOCTOR must be 1, only or empty, got yes"),
        ({"MAX_RESTARTS": "-1"}, "MAX_RESTARTS must be a whole number, got '-1'"),
        ({"SCRIPT": "job.py", "DOCTOR": "1"}, "DOCTOR works only with train/main.py train, got SCRIPT=job.py"),
        (
            {"SLURM_NTASKS": "4", "SLURM_TASKS_PER_NODE": "3,1"},
            "the 4 tasks are spread unevenly over the nodes: give --ntasks-per-node",
        ),
        ({"SLURM_JOB_ID": ""}, "this is a batch file: sbatch slurm/ddp.sbatch"),
    ],
)
def test_slurm_setting_with_an_impossible_value_is_refused(env: dict[str, str], says: str, tmp_path: Path) -> None:
    assert Started(tmp_path, "0", **env).run() == (2, f"slurm: {says}\n")
