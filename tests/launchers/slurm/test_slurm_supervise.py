"""slurm/supervise.py without a Slurm: what it does with each end of a step, each signal, and each answer of Slurm."""

import ast
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.rigs.jobs import ROOT

SUPERVISE = ROOT / "slurm" / "supervise.py"
COPY = re.compile("bash -c (.+) - /shared/photos /tmp/rankup-7")
# Writes down each call, and answers as the files in $STUB say. A training ends with the next line of `codes`
SRUN = r"""#!/bin/bash
echo "$RANKUP_ATTEMPT $MASTER_PORT $LAUNCHER $*" >> "$STUB/steps"
case "$*" in
  *"task.sh progress"*) cat "$STUB/progress" ;;
  *"task.sh "*)
    code=$(sed -n "$(grep -c 'task.sh [tdbr]' "$STUB/steps")p" "$STUB/codes")
    if [[ $code == waits ]]; then
      trap 'echo USR1 >> "$STUB/signals"; exit 143' USR1
      touch "$STUB/waiting"
      for ((tries = 0; tries < 2400; tries++)); do sleep 0.1; done
    fi
    exit "$code" ;;
  *"for path;"*) [[ ! -e $STUB/probe ]] || . "$STUB/probe" ;;
  *"cp -r"*) exit "$(cat "$STUB/copy")" ;;
esac
"""
SCONTROL = r"""#!/bin/bash
echo "$*" >> "$STUB/control"
case "$*" in
  "show hostnames big[7,9]") printf 'big7\nbig9\n' ;;
  "show hostnames"*) tr ',' '\n' <<< "$3" ;;
  "show job"*) echo "JobId=7 $(cat "$STUB/state") Command=x" | tr ' ' '\n' ;;
  requeue*) exit "$(cat "$STUB/requeue")" ;;
esac
"""
SINFO = '#!/bin/bash\ncat "$STUB/nodes"\n'
SETTINGS = {
    "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "big[7,9]", "SLURM_JOB_NUM_NODES": "2", "SLURM_CPUS_ON_NODE": "16",
    "PYTHON": "", "IMAGE": "", "LAUNCHER": "tasks", "COMMAND": "train", "DOCTOR": "", "DATA": "", "MAX_RESTARTS": "3",
    "KEEP_CODE": "", "MAX_REQUEUES": "100", "FIRST_STEP_S": "60",
}


class Supervised:
    """supervise.py in a folder of its own, with stubs of srun and scontrol on its PATH."""

    def __init__(self, folder: Path, codes: str, *, supervise: Path = SUPERVISE, **env: str) -> None:
        self.folder, self.supervise = folder, supervise
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("sinfo", SINFO)):
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        defaults = {
            "codes": "\n".join(codes.split()), "progress": "runs/job 40 0 -1", "copy": "0", "requeue": "0",
            "state": "Restarts=0 JobState=RUNNING Partition=main ExcNodeList=(null)", "nodes": "big7\nbig8\nbig9",
        }
        for name, text in defaults.items():
            if not (folder / name).exists():
                (folder / name).write_text(f"{text}\n")
        self.env = {**SETTINGS, "PATH": f"{folder}:{os.environ['PATH']}", "STUB": str(folder), **env}

    def start(self, *words: str) -> subprocess.Popen[str]:
        # Isolated, and without the packages of the environment: a node's Python has none
        return subprocess.Popen(
            [sys.executable, "-I", "-S", self.supervise, *words], env=self.env, cwd=self.folder, stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *words: str) -> tuple[int, str]:
        """Its exit code, and what it said."""
        process = self.start(*words)
        said = process.communicate(timeout=240)[1]
        return process.returncode, said

    def lines(self, name: str) -> list[str]:
        path = self.folder / name
        return path.read_text().splitlines() if path.exists() else []

    def trained(self) -> list[str]:
        """The steps that trained: attempt, port, launcher, and srun's words."""
        return [line for line in self.lines("steps") if "task.sh train" in line]

    def requeued(self) -> list[str]:
        return [line for line in self.lines("control") if line.startswith("requeue")]


@pytest.mark.parametrize(
    ("codes", "end", "steps", "requeues"),
    [
        ("0", 0, 1, 0),
        ("171 0", 0, 2, 0),
        ("137 171 0", 0, 3, 0),
        ("171 171 170 137", 137, 4, 1),  # the restarts are used up
        ("202", 2, 1, 0),  # task.sh lifts a mistake above the codes of those that lost this rank
        ("171 201", 1, 2, 0),
        ("187 0", 0, 2, 0),  # as well the 137 of a killed supervisor: the others end with 143 then
        ("187 171 171 189", 139, 4, 1),
        ("143", 143, 1, 1),  # the ranks were stopped without us: to go on later is what a requeue does
    ],
)
def test_slurm_step_is_started_again_where_that_may_help(
    codes: str, end: int, steps: int, requeues: int, tmp_path: Path
) -> None:
    job = Supervised(tmp_path, codes)
    code, said = job.run("--lr", "1")
    assert (code, len(job.trained()), len(job.requeued())) == (end, steps, requeues), said
    attempts = [line.split()[0] for line in job.trained()]
    assert attempts == [f"slurm-7-{n}" for n in range(steps)]
    assert len({line.split()[1] for line in job.trained()}) == steps, "each attempt has a port of its own"
    assert all(line.endswith("task.sh train --lr 1") for line in job.trained())
    if end in (2, 139):
        assert f"attempt {steps - 1} ended with {end} at step 40" in said


def test_slurm_attempt_after_a_node_is_gone_runs_on_those_that_are_left(tmp_path: Path) -> None:
    """Slurm has taken it out of a job with --no-kill."""
    (tmp_path / "state").write_text("Restarts=0 JobState=RUNNING ReqNodeList=big7 NodeList=big9\n")
    job = Supervised(tmp_path, "137 0")
    code, said = job.run()
    assert code == 0, said
    assert ["--nodes=2 --ntasks=2" in job.trained()[0], "--nodes=1 --ntasks=1" in job.trained()[1]] == [True, True]
    assert "of big[7,9] this job has big9 left: going on there" in said


@pytest.mark.parametrize(("codes", "end", "steps"), [("137 0", 0, 2), ("201", 1, 1)])
def test_slurm_script_of_ones_own_is_started_again_where_that_may_help(
    codes: str, end: int, steps: int, tmp_path: Path
) -> None:
    """Its arguments reach it as they are, in an array too: it reads the number of its task itself."""
    job = Supervised(tmp_path, codes, COMMAND="run", SLURM_ARRAY_JOB_ID="7", SLURM_ARRAY_TASK_ID="3")
    code, said = job.run("job.py", "--lr", "1")
    ran = [line for line in job.lines("steps") if "task.sh run" in line]
    assert (code, len(ran)) == (end, steps), said
    assert all(line.endswith("task.sh run job.py --lr 1") for line in ran)
    assert any(line.endswith("task.sh progress run job.py --lr 1") for line in job.lines("steps"))


@pytest.mark.parametrize("name", ["DATA", "DOCTOR"])
def test_slurm_script_of_ones_own_gets_no_help_that_is_for_train(name: str, tmp_path: Path) -> None:
    code, said = Supervised(tmp_path, "0", COMMAND="run", **{name: "1"}).run("job.py")
    assert (code, "DATA and DOCTOR go with COMMAND=train" in said) == (2, True)


def test_slurm_start_after_a_requeue_counts_attempts_on(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("Restarts=2 JobState=RUNNING\n")
    job = Supervised(tmp_path, "171 0", SLURM_RESTART_COUNT="2", MAX_RESTARTS="1")
    assert job.run()[0] == 0
    assert [line.split()[0] for line in job.trained()] == ["slurm-7-4", "slurm-7-5"]


@pytest.mark.parametrize(
    ("written", "end", "steps"), [("171", 171, 2), ("2", 2, 1), ("0", 1, 1)], ids=["lost", "mistake", "nothing"]
)
def test_slurm_codes_that_torchrun_hides_are_those_that_ranks_wrote_down(
    written: str, end: int, steps: int, tmp_path: Path
) -> None:
    (tmp_path / "progress").write_text(f"a container says hello\nruns/my job 40 {written} -1\n")
    job = Supervised(tmp_path, "201 201", LAUNCHER="torchrun", MAX_RESTARTS="1")
    code, said = job.run()
    assert (code, len(job.trained())) == (end, steps), said
    assert "--ntasks=2 --ntasks-per-node=1" in job.trained()[0]


@pytest.mark.parametrize(("written", "end", "steps"), [("171", 0, 2), ("143", 143, 1)], ids=["lost", "stopped"])
def test_slurm_step_that_srun_ends_for_a_lost_task_was_not_stopped(
    written: str, end: int, steps: int, tmp_path: Path
) -> None:
    (tmp_path / "progress").write_text(f"runs/job 40 {written} -1\n")
    job = Supervised(tmp_path, "143 0")
    code, said = job.run()
    assert (code, len(job.trained())) == (end, steps), said


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    until_s = time.monotonic() + 240
    while not path.exists():
        assert time.monotonic() < until_s
        assert process.poll() is None
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("number", "requeues"), [(signal.SIGUSR1, 1), (signal.SIGUSR2, 1), (signal.SIGTERM, 0)], ids=str
)
def test_slurm_signal_reaches_the_ranks_and_only_a_warning_requeues(number: int, requeues: int, tmp_path: Path) -> None:
    """TERM comes from scancel, a time limit or a requeue: Slurm itself decides what follows."""
    job = Supervised(tmp_path, "waits")
    process = job.start()
    wait_for(tmp_path / "waiting", process)
    process.send_signal(number)
    said = process.communicate(timeout=240)[1]
    assert (process.returncode, job.lines("signals"), len(job.requeued())) == (143, ["USR1"], requeues), said
    assert len(job.trained()) == 1
    assert ("requeued at step 40; start 1 is over" in said) == bool(requeues)


@pytest.mark.parametrize(("number", "requeues"), [(signal.SIGUSR1, 1), (signal.SIGTERM, 0)])
def test_slurm_signal_before_the_ranks_start_keeps_them_from_it(number: int, requeues: int, tmp_path: Path) -> None:
    (tmp_path / "probe").write_text('touch "$STUB/probing"; until [[ -e $STUB/go ]]; do sleep 0.02; done\n')
    job = Supervised(tmp_path, "0")
    process = job.start()
    wait_for(tmp_path / "probing", process)
    process.send_signal(number)
    (tmp_path / "go").touch()
    said = process.communicate(timeout=240)[1]
    assert (process.returncode, job.trained(), len(job.requeued())) == (143, [], requeues), said


@pytest.mark.parametrize(("before", "requeues"), [("40", 0), ("20", 1)])
def test_slurm_job_that_fails_again_at_the_same_step_is_not_requeued(
    before: str, requeues: int, tmp_path: Path
) -> None:
    mark = tmp_path / "runs" / "job" / ".slurm-failed"
    mark.parent.mkdir(parents=True)
    mark.write_text(f"{before}\n")
    job = Supervised(tmp_path, "171", MAX_RESTARTS="0")
    code, said = job.run()
    assert (code, len(job.requeued())) == (171, requeues)
    assert ("failed again without a new checkpoint since step 40: not requeued" in said) == (not requeues)
    assert mark.read_text() == "40\n"


def test_slurm_job_is_not_requeued_more_often_than_it_may(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("Restarts=2 JobState=RUNNING\n")
    job = Supervised(tmp_path, "143", MAX_REQUEUES="2", SLURM_RESTART_COUNT="2")
    code, said = job.run()
    assert (code, job.requeued()) == (143, [])
    assert "not requeued: MAX_REQUEUES=2" in said


def test_slurm_job_that_may_not_be_requeued_names_the_run_to_go_on_with(tmp_path: Path) -> None:
    (tmp_path / "requeue").write_text("1\n")
    code, said = Supervised(tmp_path, "143").run()
    assert code == 143
    assert "could not be requeued: sbatch the same with --name job goes on" in said


@pytest.mark.parametrize(
    "state", ["Restarts=1 JobState=RUNNING", "Restarts=0 JobState=PENDING", "Restarts=0 JobState=FAILED"]
)
def test_slurm_supervisor_whose_job_is_no_longer_its_own_ends_and_requeues_nothing(state: str, tmp_path: Path) -> None:
    """As on a node that Slurm took for lost: the job has begun anew elsewhere, or is over."""
    (tmp_path / "state").write_text(f"{state}\n")
    job = Supervised(tmp_path, "137 137")
    code, said = job.run()
    assert (code, job.requeued(), len(job.trained())) == (2, [], 1)
    assert "this process ends" in said


def test_slurm_array_requeues_its_own_task_alone(tmp_path: Path) -> None:
    job = Supervised(tmp_path, "143", SLURM_ARRAY_JOB_ID="7", SLURM_ARRAY_TASK_ID="3")
    assert job.run("--lr", "1")[0] == 143
    assert job.requeued() == ["requeue 7_3"]
    assert job.trained()[0].endswith("train --seed 3 --lr 1")


# Before the training -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("probe", ["sleep 60", "exit 1"])
def test_slurm_job_whose_nodes_give_no_step_is_requeued(probe: str, tmp_path: Path) -> None:
    (tmp_path / "probe").write_text(f"{probe}\n")
    job = Supervised(tmp_path, "0", FIRST_STEP_S="1")
    code, said = job.run()
    assert (code, job.requeued(), job.trained()) == (143, ["requeue 7"], [])
    assert "not every node of big[7,9] runs a step within 1 s" in said
    assert not list(tmp_path.glob(".slurm-*"))


def test_slurm_nodes_without_the_shared_disk_are_named(tmp_path: Path) -> None:
    (tmp_path / "probe").write_text("printf 'big7\\nbig9\\n'\n")
    code, said = Supervised(tmp_path, "0").run()
    assert code == 2
    assert f"{tmp_path} or {ROOT} is not there on big7 big9: put the checkout and runs/ on a disk" in said
    assert not list(tmp_path.glob(".slurm-*"))


@pytest.mark.parametrize(
    ("codes", "end", "trainings"), [("0 0", 0, 1), ("10 0", 0, 1), ("220", 20, 0), ("30", 30, 0)]
)
def test_slurm_doctor_decides_whether_the_job_trains(codes: str, end: int, trainings: int, tmp_path: Path) -> None:
    job = Supervised(tmp_path, codes, DOCTOR="1")
    code, said = job.run()
    assert (code, len(job.trained()), job.requeued()) == (end, trainings, []), said
    assert ("the doctor says no, exit code" in said) == bool(end)
    doctor = next(line for line in job.lines("steps") if "task.sh doctor" in line)
    assert doctor.split()[1] not in [line.split()[1] for line in job.trained()], "a port of its own"


def test_slurm_doctor_runs_once_and_nothing_is_trained(tmp_path: Path) -> None:
    job = Supervised(tmp_path, "171", COMMAND="doctor", LAUNCHER="torchrun")
    assert job.run()[0] == 171
    assert job.trained() == []
    assert sum("tasks" in line and "task.sh doctor" in line for line in job.lines("steps")) == 1


@pytest.mark.parametrize(("copied", "end"), [("0", 143), ("1", 2)])
def test_slurm_data_are_on_each_node_until_the_end(copied: str, end: int, tmp_path: Path) -> None:
    (tmp_path / "copy").write_text(copied)
    job = Supervised(tmp_path, "143", DATA="/shared/photos")
    code, said = job.run("--lr", "1")
    assert code == end
    steps = [re.sub(r"^.*--wait=60 ", "", line) for line in job.lines("steps")]
    assert any(COPY.fullmatch(step) for step in steps), steps
    assert steps[-1] == "rm -rf /tmp/rankup-7"
    if end == 2:
        assert "DATA=/shared/photos can't be copied to /tmp/rankup-7 of every node" in said
        assert job.trained() == []
    else:
        assert job.trained()[0].endswith("train --lr 1 --data-dir /tmp/rankup-7")
        assert job.requeued() == ["requeue 7"]


def test_slurm_nodes_that_share_their_own_disk_copy_the_data_in_turns(tmp_path: Path) -> None:
    """As those of local.sh do, which have one /tmp: whatever one of them makes, the other must not stumble over."""
    (tmp_path / "copy").write_text("0")
    job = Supervised(tmp_path, "0", DATA="/shared/photos")
    assert job.run()[0] == 0
    (script,) = [found[1] for line in job.lines("steps") if (found := COPY.search(line))]
    for number in range(300):
        file = tmp_path / "photos" / f"class{number % 60}" / f"{number}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{number}")
    copy = tmp_path / "own disk" / "rankup-7"
    copy.parent.mkdir()
    nodes = [subprocess.Popen(["bash", "-c", script, "-", tmp_path / "photos", copy]) for _ in range(8)]
    assert [node.wait() for node in nodes] == [0] * 8
    assert sorted(path.read_text() for path in copy.rglob("*.txt")) == sorted(map(str, range(300)))


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("COMMAND", "explain", "COMMAND must be train, run or doctor, got explain"),
        ("LAUNCHER", "mpirun", "LAUNCHER must be tasks or torchrun, got mpirun"),
        ("MAX_RESTARTS", "-1", "MAX_RESTARTS must be a whole number, got '-1'"),
    ],
)
def test_slurm_setting_that_can_not_be_is_refused(name: str, value: str, says: str, tmp_path: Path) -> None:
    code, said = Supervised(tmp_path, "0", **{name: value}).run()
    assert (code, said) == (2, f"slurm: {says}\n")


def test_slurm_ports_differ_between_jobs_and_attempts(tmp_path: Path) -> None:
    ports = set()
    for job_id in (7, 8, 1007):
        folder = tmp_path / str(job_id)
        folder.mkdir()
        job = Supervised(folder, "171 171 171 0", SLURM_JOB_ID=str(job_id))
        assert job.run()[0] == 0
        ports |= {int(line.split()[1]) for line in job.trained()}
    assert len(ports) == 12
    assert all(1024 < port < 32768 and port not in (27017, 29400, 29500) for port in ports)


def test_slurm_supervisor_is_python_3_8() -> None:
    """A cluster's nodes have an older Python than the container or the environment."""
    ours_alone = [f"slurm/{name}.py" for name in ("supervise", "job", "suspects", "kept_code")]
    library = ("rankup/__init__.py", "rankup/errors.py", "rankup/env/__init__.py", "rankup/env/addresses.py")
    for path in (ROOT / name for name in (*ours_alone, *library)):
        tree = ast.parse(path.read_text(), feature_version=(3, 8))
        imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert "__future__" in imported or not tree.body[1:], f"{path}: int | None is evaluated otherwise"
        known = {*sys.stdlib_module_names, "rankup", "job"}
        assert {str(name).split(".")[0] for name in imported} <= known, path
        ours = {name for name in imported if str(name).startswith("rankup")}
        assert ours <= {"rankup.errors", "rankup.env.addresses"}, path


# Hosts that are suspected ---------------------------------------------------------------------------------------------


def excluded(job: Supervised) -> list[str]:
    """What Slurm was told about the job's nodes, each after a requeue: before it, Slurm would not take it."""
    calls = [line for line in job.lines("control") if line.startswith(("requeue", "update"))]
    assert all(calls[at - 1].startswith("requeue") for at, call in enumerate(calls) if call.startswith("update"))
    return [call.partition("JobId=7 ExcNodeList=")[2] for call in calls if call.startswith("update")]


def test_slurm_host_that_is_suspected_twice_is_left_out_of_the_requeue(tmp_path: Path) -> None:
    (tmp_path / "progress").write_text("runs/job 40 171 1\n")  # rank 1 of big7 and big9
    job = Supervised(tmp_path, "171 171", MAX_RESTARTS="1")
    code, said = job.run()
    assert (code, excluded(job)) == (171, ["big9"]), said
    assert "rank 1 was lost on big9, suspected 1 times by now" in said
    assert "the next start excludes big9, suspected twice" in said


def test_slurm_host_that_is_suspected_in_two_starts_is_left_out_and_what_the_user_excludes_stays(
    tmp_path: Path
) -> None:
    (tmp_path / "progress").write_text("runs/job 40 171 0\n")
    first = Supervised(tmp_path, "171 171", MAX_RESTARTS="0")
    assert first.run()[0] == 171
    assert excluded(first) == []
    (tmp_path / "progress").write_text("runs/job 80 171 0\n")
    (tmp_path / "nodes").write_text("big6\nbig7\nbig8\nbig9\n")
    (tmp_path / "state").write_text("Restarts=1 JobState=RUNNING Partition=main ExcNodeList=big5,big6\n")
    _, said = Supervised(tmp_path, "171 171", MAX_RESTARTS="0", SLURM_RESTART_COUNT="1").run()
    assert excluded(first) == ["big5,big6,big7"], said


def test_slurm_exclusion_is_given_up_when_nodes_run_short(tmp_path: Path) -> None:
    (tmp_path / "progress").write_text("runs/job 40 171 1\n")
    job = Supervised(tmp_path, "171 171 143", MAX_RESTARTS="1")
    job.run()
    assert excluded(job) == ["big9"]
    # The next start: another node is gone, so that two are left only with big9
    (tmp_path / "nodes").write_text("big7\nbig9\n")
    (tmp_path / "state").write_text("Restarts=1 JobState=RUNNING Partition=main ExcNodeList=big9\n")
    (tmp_path / "progress").write_text("runs/job 80 143 -1\n")
    said = Supervised(tmp_path, "", SLURM_RESTART_COUNT="1").run()[1]
    assert excluded(job) == ["big9", ""], said
    assert "big9: suspected twice, but not excluded: fewer than 2 other nodes are there" in said


@pytest.mark.parametrize("told", ["40 171 -1", "40 171 7"], ids=["nobody", "no rank of ours"])
def test_slurm_no_host_is_left_out_where_none_is_suspected(told: str, tmp_path: Path) -> None:
    (tmp_path / "progress").write_text(f"runs/job {told}\n")
    job = Supervised(tmp_path, "171 171", MAX_RESTARTS="1")
    assert job.run()[0] == 171
    assert excluded(job) == []
