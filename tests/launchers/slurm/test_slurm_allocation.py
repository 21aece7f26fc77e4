"""`rankup launch` in an allocation of a scripted Slurm: what it runs, and what follows from ends and signals."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.rigs.jobs import wait_for
from tests.rigs.slurm_script import Scripted

ARRAY = {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "3"}
SRUN = "--nodes=3 --ntasks=3 --ntasks-per-node=1 --cpus-per-task=2 --kill-on-bad-exit=0 --export=ALL"
AGENT = "python -m rankup launch --nproc 1"

def test_slurm_allocation_mounts_the_folder_that_a_snapshot_links_to(tmp_path: Path) -> None:
    place = tmp_path / ".rankup" / "abc"
    place.mkdir(parents=True)
    (place / "me.sif").touch()
    job = Scripted(place, 0)
    code, said = job.launch("--image", "me.sif", "train.py")
    assert code == 0, said
    assert f"--bind {tmp_path},/tmp --pwd HERE me.sif" in job.steps()[0]


# What it runs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "env", "options", "agent"),
    [
        ("train.py --lr 1", {}, "--wait=30", f"{AGENT} train.py --lr 1"),
        ("train.py", {"SLURM_NTASKS": "6", "SLURM_TASKS_PER_NODE": "2(x3)"}, "--wait=30",
         "python -m rankup launch --nproc 2 train.py"),
        ("train.py", {"SLURM_NTASKS_PER_NODE": "4"}, "--wait=30", "python -m rankup launch --nproc 4 train.py"),
        ("train.py", {"SLURM_GPUS_ON_NODE": "8"}, "--gpus-per-node=8 --wait=30",
         "python -m rankup launch --nproc 8 train.py"),
        # With --gpus nodes may have different numbers of GPUs
        ("--nproc 4 train.py", {"SLURM_GPUS_ON_NODE": "4", "SLURM_GPUS": "9"}, "--wait=30",
         "python -m rankup launch --nproc 4 train.py"),
        ("--nproc 2 --max-restarts 1 -m pkg.job --nproc 9", {"SLURM_GPUS_ON_NODE": "8"}, "--gpus-per-node=8 --wait=30",
         "python -m rankup launch --nproc 2 --max-restarts 1 -m pkg.job --nproc 9"),
        ("--nnodes 2:3 train.py", {}, "--no-kill --wait=0", f"{AGENT} --nnodes 2:3 train.py"),
        ("--nnodes 2 --spares 1 train.py", {}, "--no-kill --wait=0", f"{AGENT} --nnodes 2 --spares 1 train.py"),
        ("--name mine train.py", ARRAY, "--wait=30", f"{AGENT} --name mine train.py"),
        ("--max-requeues=5 --first-step-s 9 --no-exclude train.py --doctor", {}, "--wait=30",
         f"{AGENT} train.py --doctor"),
        ("--srun-args=--mpi=none --image me.sif train.py", {"SLURM_GPUS_ON_NODE": "8"},
         "--gpus-per-node=8 --wait=30 --mpi=none",
         "apptainer exec --nv --bind HERE,/tmp --pwd HERE me.sif env --unset=RANK --unset=LOCAL_RANK "
         "--unset=WORLD_SIZE --unset=LOCAL_WORLD_SIZE --unset=GROUP_RANK --unset=GROUP_WORLD_SIZE "
         "python3 -m rankup launch --nproc 8 train.py"),
        ("--image registry.example.org#me/rankup:1 /app/train.py", {}, "--wait=30",
         "--container-image=registry.example.org#me/rankup:1 --container-mounts=HERE:HERE --container-workdir=HERE "
         "env --unset=RANK --unset=LOCAL_RANK --unset=WORLD_SIZE --unset=LOCAL_WORLD_SIZE --unset=GROUP_RANK "
         "--unset=GROUP_WORLD_SIZE python3 -m rankup launch --nproc 1 /app/train.py"),
    ],
    ids=["plain", "tasks", "tasks per node", "GPUs", "all GPUs", "own options", "elastic", "spares", "array", "for us",
         "apptainer", "pyxis"],
)
def test_slurm_allocation_runs_one_agent_on_each_node(
    words: str, env: dict[str, str], options: str, agent: str, tmp_path: Path
) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "job.py").touch()
    (tmp_path / "me.sif").touch()
    job = Scripted(tmp_path, 0, **env)
    code, said = job.launch(*words.split())
    assert (code, job.requeued()) == (0, []), said
    assert job.steps() == [f"{SRUN} {options} {agent}"]
    (line,) = [line for line in said.splitlines() if " on each: srun " in line]
    assert line.startswith("slurm: 3 nodes, ")
    assert "--lr" not in line  # an argument of the script may be secret
    assert not list(tmp_path.glob(".slurm-*"))


def test_slurm_step_gets_no_shape_and_no_rank_from_the_shell(tmp_path: Path) -> None:
    """These describe the whole job, or were left by an earlier command. What identifies the job stays."""
    shape = {
        "SLURM_NTASKS": "3", "SLURM_NPROCS": "3", "SLURM_NTASKS_PER_NODE": "1", "SLURM_CPUS_PER_TASK": "9",
        "SLURM_GPUS_PER_TASK": "1", "SLURM_TRES_PER_TASK": "gpu:1", "SLURM_CPU_BIND": "mask_cpu:0x1",
        "SLURM_CPU_BIND_LIST": "0x1", "SLURM_DISTRIBUTION": "arbitrary", "SLURM_HINT": "nomultithread",
        "SLURM_EXPORT_ENV": "NONE", "SLURM_WAIT": "1", "SLURM_NO_KILL": "0", "SLURM_KILL_BAD_EXIT": "1",
        "SLURM_GPU_BIND": "single:1", "SRUN_CPUS_PER_TASK": "7", "MASTER_ADDR": "old", "MASTER_PORT": "1",
        "WORLD_SIZE": "4", "LOCAL_RANK": "0", "SLURM_TASKS_PER_NODE": "1(x3)",
    }
    keep = {"SLURM_JOB_ID": "7", "SLURM_CONF": "/etc/x", "SLURM_MEM_PER_NODE": "4000", "MINE": "1"}
    job = Scripted(tmp_path, 0, **shape, **keep)
    code, said = job.launch()
    assert code == 0, said
    (step,) = job.lines("steps")
    assert not step["env"].keys() & (shape.keys() - {"SLURM_TASKS_PER_NODE"})
    assert step["env"].items() >= keep.items()
    assert step["env"]["OMP_NUM_THREADS"] == "2"


def test_slurm_own_number_of_threads_stays_and_too_few_cpus_are_said(tmp_path: Path) -> None:
    job = Scripted(tmp_path, 0, OMP_NUM_THREADS="5", SLURM_GPUS_ON_NODE="4")
    code, said = job.launch()
    assert (code, "slurm: 4 ranks share 2 CPUs on each node" in said) == (0, True), said
    assert job.lines("steps")[0]["env"]["OMP_NUM_THREADS"] == "5"


def test_slurm_salloc_shell_learns_the_gpus_of_its_nodes_in_the_first_step(tmp_path: Path) -> None:
    job = Scripted(tmp_path, 0, answers={"look": {"gpus": {"big7": 4, "big8": 4, "big9": 4}}})
    assert job.launch("--nproc", "gpu", "train.py")[0] == 0
    assert job.steps()[0].endswith("launch --nproc 4 train.py")


# How it ends ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "requeues"), [(0, 0), (1, 0), (2, 0), (75, 0), (137, 1), (170, 1), (171, 1), (143, 1)]
)
def test_slurm_job_ends_with_its_agents_code_and_requeues_codes_to_retry(
    code: int, requeues: int, tmp_path: Path
) -> None:
    """143 without a signal to the job means that somebody else stopped the agents. A requeue resumes the job."""
    job = Scripted(tmp_path, code)
    job.at(40)
    end, said = job.launch("--on-end", "cat >> told", "train.py")
    assert (end, len(job.requeued()), len(job.steps())) == (code, requeues, 1), said
    assert f"start 1 ended with {code} at step 40" in said
    told, = job.lines("told")
    assert (told["run"], told["code"], told["requeued"]) == ("slurm-7", code, bool(requeues))
    assert "--on-end" not in job.steps()[0]  # the agents may be restarted


def test_slurm_job_tells_its_end_to_the_command_of_the_script(tmp_path: Path) -> None:
    noted = "failed big8\non_end " + json.dumps(["cat >> told", str(tmp_path / "elsewhere/mine")]) + "\n"
    job = Scripted(tmp_path, 171, answers={"writes": {".slurm-7": noted}})
    job.at(40)
    assert job.launch()[0] == 171
    told, = job.lines("told")
    assert (told["run"], told["code"], told["requeued"]) == ("mine", 171, True)


@pytest.mark.parametrize(
    ("ended", "code", "requeues"), [("code 0\ncode 0\n", 0, 0), ("failed big8\ncode 1\n", 1, 0), ("", 137, 1)]
)
def test_slurm_elastic_job_ends_with_the_code_that_its_agents_wrote(
    ended: str, code: int, requeues: int, tmp_path: Path
) -> None:
    """srun's own code is that of a lost node. Agents write no code if the job is to be resumed."""
    job = Scripted(tmp_path, 137, answers={"writes": {".slurm-7": ended}})
    end, said = job.launch("--nnodes", "2:3", "train.py")
    assert (end, len(job.requeued())) == (code, requeues), said
    assert not list(tmp_path.glob(".slurm-*"))


@pytest.mark.parametrize(
    ("number", "requeues", "forwarded"),
    [(signal.SIGUSR1, 1, "SIGUSR1"), (signal.SIGUSR2, 1, "SIGUSR1"), (signal.SIGTERM, 0, "SIGUSR1")], ids=str,
)
def test_slurm_signals_reach_the_agents_and_only_warnings_requeue(
    number: signal.Signals, requeues: int, forwarded: str, tmp_path: Path
) -> None:
    """SIGTERM comes from scancel, a time limit or a requeue, and Slurm itself decides what follows."""
    job = Scripted(tmp_path, "waits")
    job.at(40)
    process = job.start()
    wait_for("a step", job.steps, process=process)
    end, said = job.end(process, number)
    assert (end, job.lines("signals"), len(job.requeued())) == (143, [forwarded], requeues), said
    assert ("requeued at step 40; start 1 is over" in said) == bool(requeues)


def test_slurm_ctrl_c_stops_the_tasks_and_not_srun(tmp_path: Path) -> None:
    job = Scripted(tmp_path, "waits", answers={"job": "Restarts=0 JobState=RUNNING BatchFlag=0"})
    process = job.start()
    wait_for("a step", job.steps, process=process)
    process.send_signal(signal.SIGINT)
    wait_for("scancel", lambda: job.asked("scancel"), process=process)
    process.send_signal(signal.SIGUSR1)  # in place of the tasks, which would end
    end, said = job.end(process)
    assert (end, job.asked("scancel"), job.requeued()) == (143, ["--signal=TERM 7"], []), said
    assert "SIGINT: saving, then stopping" in said


@pytest.mark.parametrize(("number", "requeues"), [(signal.SIGUSR1, 1), (signal.SIGTERM, 0), (signal.SIGINT, 0)])
def test_slurm_signal_before_the_agents_start_prevents_the_start(
    number: signal.Signals, requeues: int, tmp_path: Path
) -> None:
    job = Scripted(tmp_path, 0, answers={"look": {"hangs": True, "up": []}})
    process = job.start()
    wait_for("the first step", (tmp_path / "looking").exists, process=process)
    process.send_signal(number)
    (tmp_path / "go").touch()
    end, said = job.end(process)
    assert (end, job.steps(), len(job.requeued())) == (143, [], requeues), said
    assert "not every node" not in said  # scancel ends the first step too


@pytest.mark.parametrize(("before", "requeues"), [("40", 0), ("20", 1)])
def test_slurm_job_that_fails_again_at_the_same_step_is_not_requeued(
    before: str, requeues: int, tmp_path: Path
) -> None:
    job = Scripted(tmp_path, 171)
    job.at(9)
    job.at(40)
    mark = job.run_dir / ".slurm-failed"
    mark.write_text(f"{before}\n")
    code, said = job.launch()
    assert (code, len(job.requeued())) == (171, requeues)
    assert ("failed again without a new checkpoint since step 40: not requeued" in said) == (not requeues)
    assert mark.read_text() == "40\n"


@pytest.mark.parametrize(("words", "env", "folder"), [
    ("train.py", {}, "runs/slurm-7"), ("train.py", ARRAY, "runs/slurm-5_3"),
    ("--name mine train.py", ARRAY, "runs/mine_3"), ("--run-dir r --name n train.py", {}, "r/n"),
    ("train.py --name=n --run_dir r", {}, "r/n"), ("train.py --run-dir s3://b/r --name n", {}, "runs/n"),
])
def test_slurm_job_finds_its_run_on_the_command_line(
    words: str, env: dict[str, str], folder: str, tmp_path: Path
) -> None:
    job = Scripted(tmp_path, 1, **env)
    (tmp_path / folder / "checkpoints" / "step-00000012").mkdir(parents=True)
    assert "ended with 1 at step 12" in job.launch(*words.split())[1]


def test_slurm_first_step_is_understood_whatever_srun_does_with_output(tmp_path: Path) -> None:
    """--label numbers the lines, and --output=x would write them into a file."""
    job = Scripted(tmp_path, 0, answers={"look": {"label": True}})
    code, said = job.launch("--srun-args=--label --output=x", "train.py")
    assert (code, len(job.steps())) == (0, 1), said
    assert job.lines("look")[0][-2:] == ["-oall", "-eall"]


def test_slurm_job_goes_on_if_somebody_cleans_its_folder(tmp_path: Path) -> None:
    job = Scripted(tmp_path, "waits")
    job.at(40)
    (job.run_dir / "checkpoints" / "step-best1").mkdir()
    process = job.start()
    wait_for("a step", job.steps, process=process)
    (tmp_path / ".slurm-7").unlink()
    end, said = job.end(process, signal.SIGUSR1)
    assert (end, len(job.requeued())) == (143, 1), said
    assert "requeued at step 40" in said


def test_slurm_signals_may_come_again(tmp_path: Path) -> None:
    job = Scripted(tmp_path, "waits")
    process = job.start()
    wait_for("a step", job.steps, process=process)
    process.send_signal(signal.SIGUSR1)
    end, said = job.end(process, signal.SIGUSR1)
    assert (end, len(job.requeued())) == (143, 1), said


@pytest.mark.parametrize(("words", "checkpoint", "says"), [
    ("", "slurm-7", "to resume, in another job with --name slurm-7\n"), ("--name mine", "mine", "to resume\n"),
    ("", "", "to resume\n"),
], ids=["its job names the run", "named", "the script keeps its own state"])
def test_slurm_salloc_says_how_to_resume(words: str, checkpoint: str, says: str, tmp_path: Path) -> None:
    job = Scripted(tmp_path, 143, answers={"job": "Restarts=0 JobState=RUNNING BatchFlag=0"})
    if checkpoint:
        (tmp_path / "runs" / checkpoint / "checkpoints" / "step-00000012").mkdir(parents=True)
    assert f"run the same line again {says}" in job.launch(*words.split(), "train.py")[1]


@pytest.mark.parametrize(("silent", "code", "requeued"), [(2, 143, ["7"]), (99, 143, [])])
def test_slurm_that_does_not_answer_is_asked_again(
    silent: int, code: int, requeued: list[str], tmp_path: Path
) -> None:
    """slurmctld may be restarting."""
    job = Scripted(tmp_path, 143, answers={"silent": silent})
    (tmp_path / "sitecustomize.py").write_text("import time\ntime.sleep = lambda seconds: None\n")
    job.env["PYTHONPATH"] += f":{tmp_path}"
    job.at(40)
    found, said = job.launch()
    assert (found, job.requeued()) == (code, requeued), said
    assert ("scontrol can't read job 7: submit it again with --name slurm-7" in said) == (not requeued)


GONE = "this process ends"  # on a node that Slurm thought lost: the job runs elsewhere, or is over


@pytest.mark.parametrize(
    ("answers", "env", "words", "code", "requeued", "says"),
    [
        ({"job": "Restarts=1 JobState=RUNNING"}, {}, "", 2, [], GONE),
        ({"job": "Restarts=0 JobState=PENDING"}, {}, "", 2, [], GONE),
        ({"job": "Restarts=0 JobState=FAILED"}, {}, "", 2, [], GONE),
        ({"job": "Restarts=2 JobState=RUNNING"}, {"SLURM_RESTART_COUNT": "2"}, "--max-requeues 2", 143, [],
         "not requeued: the limit is --max-requeues 2"),
        ({"job": "Restarts=0 JobState=RUNNING BatchFlag=0"}, {}, "", 143, [], "run the same line again to resume"),
        ({"requeue": 1}, {}, "--name mine", 143, ["7"], "Slurm refused to requeue the job: submit it again"),
        ({}, ARRAY, "", 143, ["5_3"], "requeued at step 0"),
    ],
    ids=["elsewhere", "pending", "over", "limit", "salloc", "refused", "array"],
)
def test_slurm_start_requeues_only_its_own_job_and_within_its_limit(
    answers: dict[str, Any], env: dict[str, str], words: str, code: int, requeued: list[str], says: str, tmp_path: Path
) -> None:
    job = Scripted(tmp_path, 143, answers=answers, **env)
    found, said = job.launch(*words.split(), "train.py")
    assert (found, job.requeued(), says in said) == (code, requeued, True), said
    assert ("slurm: requeued at step" in said) == ("requeued at step" in says)  # not if Slurm refused


# Failed nodes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("look", [
    {"up": ["big7", "big9"], "hangs": True}, {"up": ["big7", "big9"], "code": 1, "says": "srun: error: no node"},
])
def test_slurm_job_whose_nodes_run_no_first_step_is_requeued_without_them(look: dict[str, Any], tmp_path: Path) -> None:
    job = Scripted(tmp_path, 0, answers={"look": look})
    if look.get("hangs"):
        (tmp_path / "bin" / "srun").write_text(  # its nodes answer, and it never ends
            (tmp_path / "bin" / "srun").read_text().replace('    if "says"', "    time.sleep(600)\n    if \"says\"")
        )
        (tmp_path / "go").touch()
    code, said = job.launch("--first-step-s", "1", "train.py")
    assert (code, job.requeued(), job.steps()) == (143, ["7"], []), said
    assert "not every node of big[7-9] ran a first step within 1 s (srun ended with" in said
    assert look.get("says", "") in said
    assert job.asked("scontrol", "update") == ["JobId=7 ExcNodeList=big8"]
    assert "the next start leaves out big8: scontrol update" in said
    assert not list(tmp_path.glob(".slurm-*"))


@pytest.mark.parametrize(("answers", "words", "updates", "says"), [
    ({}, "", ["JobId=7 ExcNodeList=big8"], "the next start leaves out big8: scontrol update JobId=7"),
    ({"update": 1}, "", ["JobId=7 ExcNodeList=big8"], "the next start can't leave out big8"),
    ({"nodes": 4}, "", ["JobId=7 ExcNodeList=big8"], "leaves out big8"),
    ({"nodes": 3}, "", [], "too few other nodes would be left"),  # the job needs three
    ({"nodes": 5, "job": "Restarts=0 JobState=RUNNING ExcNodeList=big1"}, "", [], "too few other nodes"),  # a third
    ({"nodes": 6, "job": "Restarts=0 JobState=RUNNING ExcNodeList=big1"}, "",
     ["JobId=7 ExcNodeList=big1,big8"], "leaves out big8"),
    ({}, "--no-exclude", [], "requeued at step 0"),
    ({"requeue": 1}, "", [], "Slurm refused to requeue"),
])
def test_slurm_requeued_job_leaves_out_the_node_that_failed(
    answers: dict[str, Any], words: str, updates: list[str], says: str, tmp_path: Path
) -> None:
    """The agents gave up after rank 1 had failed on big8 again and again."""
    job = Scripted(tmp_path, 137, answers={"writes": {".slurm-7": "failed big7\nfailed big8\n"}, **answers})
    code, said = job.launch(*words.split(), "train.py")
    assert (code, job.asked("scontrol", "update"), says in said) == (137, updates, True), said


# The doctor -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("codes", "end", "trainings"), [((0, 0), 0, 1), ((10, 0), 0, 1), ((20,), 20, 0)])
def test_slurm_doctor_decides_whether_the_job_trains(
    codes: tuple[int, ...], end: int, trainings: int, tmp_path: Path
) -> None:
    job = Scripted(tmp_path, *codes)
    code, said = job.launch("--doctor", "--run-dir", "r", "train.py", "--lr", "1")
    doctor, *trained = job.steps()
    assert (code, len(trained), job.requeued()) == (end, trainings, []), said
    assert doctor.endswith(f"{AGENT} --max-restarts 0 --run-dir r -m rankup doctor --run-dir r")
    assert ("the doctor ended with 20 (20: nodes not fit" in said) == (end == 20)


# Mistakes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "env", "answers", "says"),
    [
        ("train.py", {"SLURM_NTASKS": "4", "SLURM_TASKS_PER_NODE": "2,1(x2)"}, {},
         "slurm: each node must have the same number of tasks, got 2,1(x2) of 4. Give --ntasks-per-node"),
        ("train.py", {"SLURM_HET_SIZE": "2"}, {}, "slurm: the job must not be heterogeneous"),
        ("train.py", {"SLURM_JOB_NODELIST": ""}, {}, "slurm: scontrol must be able to read the list of nodes, got ''"),
        ("train.py", {"PATH": "/nonexistent"}, {}, "slurm: srun must be on PATH in job 7, got none. In a container"),
        ("--image me.sif train.py", {}, {}, "--image must be an existing file, got me.sif. slurm/README.md says"),
        ("--first-step-s 0 train.py", {}, {}, "--first-step-s must be a whole number >= 1, got 0"),
        ("--srun-args=--nosuch train.py", {},
         {"look": {"up": [], "code": 255, "says": "srun: unrecognized option '--nosuch'\nTry \"srun --help\""}},
         "--srun-args must be options of srun, got --nosuch: unrecognized option '--nosuch'"),
        ("--srun-args=--mem=x train.py", {},
         {"look": {"up": [], "code": 255, "says": "srun: error: Invalid --mem specification"}},
         "--srun-args must be options of srun, got --mem=x: error: Invalid --mem specification"),
        ("--nnodes 2 train.py", {}, {}, "--nnodes must be 3, as in this allocation, got 2. Leave it out"),
        ("--nnodes 4:5 train.py", {}, {}, "--nnodes must be 3, as in this allocation, got 4:5. Leave it out"),
        ("missing.py", {}, {}, "SCRIPT must be an existing file, got missing.py."),
        ("--nproc gpu train.py", {}, {}, "--nproc gpu must have GPUs in the allocation, got none."),
        ("train.py", {}, {"look": {"gpus": {"big7": 4, "big9": 2}}},
         "slurm: all nodes must have the same number of GPUs, got 4 on big7, 0 on big8, 2 on big9. Give"),
        ("train.py", {}, {"look": {"blind": ["big8", "big9"]}}, "must exist on all nodes, got none on big8 big9."),
    ],
    ids=["uneven", "het", "nodelist", "no srun", "no image", "no time", "srun option", "srun value", "nnodes",
         "range", "script", "no GPU", "GPUs differ", "disk"],
)
def test_slurm_mistake_is_one_line_before_any_agent_starts(
    words: str, env: dict[str, str], answers: dict[str, Any], says: str, tmp_path: Path
) -> None:
    job = Scripted(tmp_path, 0, answers=answers, **env)
    code, said = job.launch(*words.split())
    assert (code, job.steps(), job.requeued(), len(said.splitlines())) == (2, [], [], 1), said
    assert says in said
    assert not list(tmp_path.glob(".slurm-*"))


@pytest.mark.parametrize("tool", ["scontrol", "scancel"])
def test_slurm_tool_that_is_not_on_path_is_named(tool: str, tmp_path: Path) -> None:
    job = Scripted(tmp_path, 0, PATH=str(tmp_path / "bin"))
    (tmp_path / "bin" / tool).unlink()
    code, said = job.launch()
    assert (code, job.steps(), len(said.splitlines())) == (2, [], 1), said
    assert f"slurm: {tool} must be on PATH in job 7, got none." in said


def test_slurm_folder_that_can_not_be_written_is_named(tmp_path: Path) -> None:
    job = Scripted(tmp_path, 0)
    (tmp_path / ".slurm-7").mkdir()
    code, said = job.launch()
    assert (code, job.steps()) == (2, [])
    assert f"slurm: the current folder must be writable, got {tmp_path} on " in said


@pytest.mark.parametrize(("words", "env"), [
    ("--first-step-s 5", {"SLURM_JOB_ID": ""}), ("--max-requeues 1", {"SLURM_JOB_ID": ""}),
    ("--doctor", {"SLURM_JOB_ID": ""}), ("--image x.sif", {"SLURM_JOB_ID": ""}), ("--image x.sif --here", {}),
    ("--max-requeues 0", {"SLURM_JOB_ID": ""}),
    ("--srun-args=-v", {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1"}),
    ("--no-exclude --node-rank 0", {}),
])
def test_slurm_option_of_an_allocation_is_refused_elsewhere(words: str, env: dict[str, str], tmp_path: Path) -> None:
    job = Scripted(tmp_path, 0, **env)
    code, said = job.launch(*words.split(), "train.py")
    assert (code, job.steps()) == (2, []), said
    assert f"{words.split()[0].partition('=')[0]} must be given where `rankup launch` uses a whole allocation" in said


@pytest.mark.parametrize("env", [
    {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
    {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x",
     "GROUP_WORLD_SIZE": "1", "LOCAL_RANK": "0"},
])
def test_slurm_launch_inside_another_launcher_is_refused(env: dict[str, str], tmp_path: Path) -> None:
    job = Scripted(tmp_path, 0, **env)
    code, said = job.launch()
    assert (code, job.steps()) == (2, []), said
    assert "launch must be started once per node, got the environment of a rank of" in said


def test_slurm_here_starts_ranks_on_this_node_alone(tmp_path: Path) -> None:
    job = Scripted(tmp_path, 0)
    code, said = job.launch("--here", "--nproc", "2", "train.py")
    assert (code, job.steps(), said.count("] trained")) == (0, [], 2), said
