"""Every environment a launcher may give: adopted, or refused in one line per mistake that says the way out."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from train.errors import LaunchError
from train.process.addresses import ephemeral_range, port_for
from train.process.env import describe, how_to_start, outside_pod, read_env
from train.process.launchers import LAUNCHERS
from train.process.launchers.launcher import Launcher, adopt_names, count, given
from train.process.placement import Found

Env = dict[str, str]

FULL = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
# What torch's agent gives each worker: node 1 of 2, its second process of two.
AGENT = {
    **FULL, "RANK": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2",
    "ROLE_RANK": "3", "ROLE_WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "False",
}
# What `srun -n 4 -N 2` gives task 3, on the last two of the job's three nodes.
STEP = {
    "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
    "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2", "SLURM_NNODES": "2",
    "SLURM_STEP_NODELIST": "rn[2-3]", "SLURM_JOB_NODELIST": "rn[1-3]", "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}
# The batch shell of a job of two tasks: a task number, but no step.
BATCH = {"SLURM_JOB_ID": "77", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "2", "SLURM_NNODES": "2"}
MPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "prterun-node0-1234@1",
}


def without(env: Env, *names: str) -> Env:
    return {name: value for name, value in env.items() if name not in names}


def refusal(env: Env) -> str:
    with pytest.raises(LaunchError) as refused:
        read_env(env)
    return str(refused.value)


def warning(env: Env) -> str:
    return "\n".join(read_env(env).warnings)


# --- torchrun and launch ----------------------------------------------------------------------------------------------


def test_torchrun_tells_nodes_and_node_rank():
    launch = read_env(AGENT)
    assert (launch.rank, launch.local_rank, launch.world_size, launch.local_world_size) == (3, 1, 4, 2)
    assert (launch.num_nodes, launch.node_rank, launch.launcher, launch.warnings) == (2, 1, "torchrun", ())
    assert set(launch.origins.values()) == {"torchrun"}


def test_launch_is_known_by_its_mark_whatever_is_left_of_a_torchrun():
    left = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "3"}
    launch = read_env({**AGENT, **left, "RANKUP_LAUNCH": "1", "RANKUP_RESTART": "1", "RANKUP_ATTEMPT": "a-1"})
    assert (launch.launcher, launch.origins["RANK"], launch.num_nodes) == ("launch", "launch", 2)
    assert (launch.agent_store, launch.restart_count) == (False, 1)
    assert (launch.numbers_attempts, launch.attempt) == (True, "a-1")


def test_torchrun_counts_its_own_restarts():
    launch = read_env({**AGENT, "TORCHELASTIC_RESTART_COUNT": "3", "RANKUP_RESTART": "1"})
    assert (launch.restart_count, launch.numbers_attempts) == (3, False)


def test_parent_is_who_would_leave_the_rank_behind():
    """torchrun and mpirun leave their processes running when they are killed; our own launchers name themselves."""
    assert read_env(AGENT).parent_pid == read_env(MPI).parent_pid == os.getppid()
    assert read_env({**AGENT, "RANKUP_PARENT": "4711"}).parent_pid == 4711
    assert read_env({"RANKUP_PARENT": "4711"}).parent_pid == 4711
    assert read_env(FULL).parent_pid is read_env(STEP).parent_pid is None


def test_hint_for_missing_ranks_is_the_launchers_own():
    for env, said in (
        (AGENT, "torchrun on every node"), ({**AGENT, "RANKUP_LAUNCH": "1"}, "`launch` on every node"),
        (STEP, "squeue -s"), (MPI, "mpirun has to start all ranks at once"), (FULL, "each RANK from 0 to 3"),
    ):
        assert said in how_to_start(read_env(env))
    job = pod(1, 3, "mw", "auto", "3")
    assert "kubectl get pods" in how_to_start(read_env(job))


@pytest.mark.parametrize(("value", "expected"), [("True", True), ("False", False)])
def test_agent_store_is_torchs_own_word(value: str, expected: bool):
    agent = {**AGENT, "TORCHELASTIC_USE_AGENT_STORE": value}
    assert read_env(agent).agent_store is expected


def test_agent_store_of_another_torchrun_is_not_believed():
    assert read_env({**FULL, "TORCHELASTIC_USE_AGENT_STORE": "True"}).agent_store is False


def test_left_over_torchelastic_is_warned_of():
    assert "left over" in warning({"TORCHELASTIC_RUN_ID": "none"})
    assert "left over" in warning({**FULL, "TORCHELASTIC_RUN_ID": "none"})


def test_torchrun_in_a_real_process_is_read_as_torchrun(tmp_path: Path):
    script = tmp_path / "who.py"
    script.write_text(
        "import os, pathlib, train.process.env as env\n"
        "launch = env.read_env(os.environ)\n"
        f"pathlib.Path({str(tmp_path)!r}, f'rank-{{launch.rank}}').write_text(env.describe(launch))\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONWARNINGS": "error"}
    subprocess.run(command, check=True, env=environment, capture_output=True, timeout=240)
    for rank in (0, 1):
        line = (tmp_path / f"rank-{rank}").read_text()
        assert line.startswith(f"rank {rank} of 2 (local {rank} of 2, node 0 of 1), master ")
        assert line.endswith("; RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT from torchrun")


# --- Slurm ------------------------------------------------------------------------------------------------------------


def test_slurm_step_is_adopted():
    launch = read_env(STEP)
    assert (launch.rank, launch.local_rank, launch.world_size, launch.local_world_size) == (3, 1, 4, 2)
    assert (launch.num_nodes, launch.node_rank, launch.launcher) == (2, 1, "slurm")
    assert launch.master_addr == "rn2"  # the step's first host, which need not be the job's
    assert launch.master_port == port_for(77, ephemeral=ephemeral_range())
    assert launch.origins["RANK"] == "Slurm step"
    assert launch.origins["MASTER_ADDR"] == "derived from SLURM_STEP_NODELIST"
    assert launch.origins["MASTER_PORT"] == "derived from SLURM_JOB_ID"


def test_slurm_step_is_adopted_under_its_older_names():
    older = without(STEP, "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES", "SLURM_STEP_NODELIST")
    launch = read_env({**older, "SLURM_STEPID": "0"})
    assert (launch.rank, launch.world_size, launch.num_nodes, launch.master_addr) == (3, 4, 2, "rn1")


def test_slurm_ranks_of_a_step_agree_on_the_master():
    tasks = [read_env({**STEP, "SLURM_PROCID": str(r), "SLURM_LOCALID": str(r % 2), "SLURM_NODEID": str(r // 2)})
             for r in range(4)]
    assert [launch.rank for launch in tasks] == [0, 1, 2, 3]
    assert len({(launch.master_addr, launch.master_port, launch.run_name) for launch in tasks}) == 1


def test_slurm_step_on_one_node_needs_no_host_name():
    launch = read_env({**STEP, "SLURM_STEP_NUM_NODES": "1", "SLURM_NODEID": "0", "SLURM_LOCALID": "3"})
    assert (launch.master_addr, launch.local_world_size, launch.num_nodes) == ("127.0.0.1", 4, 1)


def test_slurm_address_and_port_of_the_user_are_kept():
    launch = read_env({**STEP, "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "12345", "SLURM_STEP_NODELIST": "broken["})
    assert (launch.master_addr, launch.master_port, launch.rank) == ("10.0.0.7", 12345, 3)
    assert (launch.origins["MASTER_PORT"], launch.origins["RANK"]) == ("environment", "Slurm step")


@pytest.mark.parametrize(
    "env",
    [
        BATCH,
        without(BATCH, "SLURM_NTASKS"),  # sbatch -N 2 says no number of tasks: one a node
        {**without(BATCH, "SLURM_NTASKS"), "SLURM_NNODES": "1", "SLURM_NTASKS_PER_NODE": "2"},
        {**BATCH, "SLURM_STEP_ID": "4294967290"},  # salloc's interactive step
        {**BATCH, "MASTER_ADDR": "rn0", "MASTER_PORT": "12345"},
    ],
    ids=["batch", "nodes-only", "per-node", "salloc", "with-master"],
)
def test_slurm_shell_that_is_no_task_is_refused(env: Env):
    message = refusal(env)
    assert message.startswith("Slurm gave this job 2 tasks, but this process is not one of them")
    assert "srun" in message
    assert "slurm/task.sh" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    "env",
    [
        {**BATCH, "SLURM_NTASKS": "1", "SLURM_NNODES": "1"},
        {**STEP, "SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
        {**BATCH, "SLURM_NTASKS": "1", "MASTER_ADDR": "rn0", "MASTER_PORT": "12345"},
        {"SLURM_JOB_ID": "77", "SLURM_NNODES": "1"},
    ],
    ids=["batch", "step", "with-master", "no-count"],
)
def test_slurm_with_one_task_is_a_single_process_named_by_its_job(env: Env):
    launch = read_env(env)
    assert (launch.launcher, launch.world_size, launch.run_name) == ("python", 1, "slurm-77")


def test_slurm_with_one_task_still_refuses_half_a_set():
    assert "RANK MASTER_ADDR MASTER_PORT are not set" in refusal({**BATCH, "SLURM_NTASKS": "1", "WORLD_SIZE": "4"})


def test_explicit_rank_beats_slurm_and_is_warned_of():
    env = {**STEP, **FULL, "RANK": "0", "WORLD_SIZE": "2"}
    launch = read_env(env)
    assert (launch.rank, launch.world_size, launch.local_rank, launch.num_nodes) == (0, 2, 0, None)
    assert "RANK=0 WORLD_SIZE=2 from the environment beat Slurm's task 3 of 4" in warning(env)


def test_explicit_rank_that_is_the_task_learns_its_place_from_slurm():
    launch = read_env({**STEP, **FULL, "RANK": "3"})
    assert (launch.local_rank, launch.local_world_size, launch.num_nodes, launch.node_rank) == (1, 2, 2, 1)
    assert (launch.master_addr, launch.launcher, launch.warnings) == ("node0", "environment", ())
    assert (launch.origins["RANK"], launch.origins["LOCAL_RANK"]) == ("environment", "Slurm step")


def test_slurm_origins_are_described_in_one_line():
    assert describe(read_env({**STEP, "MASTER_PORT": "12345"})) == (
        "rank 3 of 4 (local 1 of 2, node 1 of 2), master rn2:12345; RANK LOCAL_RANK WORLD_SIZE from Slurm step, "
        "MASTER_ADDR derived from SLURM_STEP_NODELIST, MASTER_PORT from environment"
    )


def test_explicit_rank_works_in_the_batch_shell():
    assert read_env({**BATCH, **FULL}).rank == 1


@pytest.mark.parametrize("change", [{"WORLD_SIZE": "8"}, {"LOCAL_RANK": "0"}], ids=lambda change: next(iter(change)))
def test_injected_variable_is_not_mixed_with_slurms(change: Env):
    message = refusal({**STEP, **change})
    assert message.startswith(f"{next(iter(change))}={next(iter(change.values()))} but SLURM_")
    assert "two launchers are mixed. Unset" in message


def test_injected_rank_alone_is_not_completed_from_slurm():
    assert "WORLD_SIZE MASTER_ADDR MASTER_PORT are not set" in refusal({**STEP, "RANK": "3"})


@pytest.mark.parametrize("mark", [{}, {"RANKUP_LAUNCH": "1"}], ids=["torchrun", "launch"])
def test_torchrun_multiplied_by_srun_is_refused(mark: Env):
    message = refusal({**STEP, **AGENT, **mark})
    assert "runs in each of 4 Slurm tasks on 2 nodes" in message
    assert "--ntasks-per-node=1" in message


def test_torchrun_once_a_node_under_srun_is_taken():
    launch = read_env({**STEP, **AGENT, "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2"})
    assert (launch.launcher, launch.rank, launch.num_nodes, launch.warnings) == ("torchrun", 3, 2, ())


def test_torchrun_in_the_batch_shell_is_taken():
    assert read_env({**BATCH, **AGENT, "SLURM_NTASKS": "4", "SLURM_NNODES": "1"}).launcher == "torchrun"


def test_torchrun_nodes_simulated_by_tasks_are_only_warned_of():
    env = {**STEP, **AGENT, "GROUP_WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "GROUP_RANK": "3"}
    assert read_env(env).num_nodes == 4
    assert "--ntasks-per-node=1" in warning(env)


def test_slurm_variable_that_is_no_number_is_refused():
    assert refusal({**STEP, "SLURM_STEP_NUM_TASKS": "x"}).startswith("SLURM_STEP_NUM_TASKS must be a whole number")


@pytest.mark.parametrize(
    ("env", "name"),
    [
        ({"SLURM_JOB_ID": "77"}, "slurm-77"),
        ({"SLURM_JOBID": "77"}, "slurm-77"),
        ({"SLURM_JOB_ID": "77", "SLURM_RESTART_COUNT": "2"}, "slurm-77"),
        ({"SLURM_JOB_ID": "78", "SLURM_ARRAY_JOB_ID": "77", "SLURM_ARRAY_TASK_ID": "0"}, "slurm-77_0"),
        ({"SLURM_JOB_ID": "77", "SLURM_ARRAY_JOB_ID": "77", "SLURM_ARRAY_TASK_ID": "1"}, "slurm-77_1"),
        ({**STEP, **FULL}, "slurm-77"),
        ({"SLURM_JOB_ID": "77", **AGENT}, "slurm-77"),
        (FULL, None),
    ],
)
def test_run_is_named_by_its_job_whoever_set_rank(env: Env, name: str | None):
    assert read_env(env).run_name == name


def test_port_changes_with_the_restart_and_comes_from_the_job_not_the_array():
    array = {**STEP, "SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": "1"}
    assert read_env(array).master_port == read_env(STEP).master_port
    assert read_env({**array, "SLURM_JOB_ID": "78"}).master_port != read_env(array).master_port
    assert read_env({**STEP, "SLURM_RESTART_COUNT": "1"}).master_port != read_env(STEP).master_port


def test_port_in_the_ephemeral_range_is_warned_of_unless_torchrun_chose_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("train.process.env.ephemeral_range", lambda: range(32768, 61000))
    assert "MASTER_PORT=40000 is one of this machine's ports" in warning({**FULL, "MASTER_PORT": "40000"})
    assert "MASTER_PORT=40000" in warning({**STEP, "MASTER_PORT": "40000"})
    assert warning({**FULL, "MASTER_PORT": "29500"}) == ""
    assert warning({**AGENT, "MASTER_PORT": "40000"}) == ""


# --- Open MPI and others ----------------------------------------------------------------------------------------------


def test_open_mpi_on_one_node_is_adopted():
    launch = read_env(MPI)
    assert (launch.rank, launch.local_rank, launch.world_size, launch.local_world_size) == (1, 1, 2, 2)
    assert (launch.num_nodes, launch.master_addr, launch.launcher) == (1, "127.0.0.1", "open mpi")
    assert launch.origins["MASTER_PORT"] == "derived from PMIX_NAMESPACE"


def test_open_mpi_jobs_on_one_node_get_different_ports():
    other = {**without(MPI, "PMIX_NAMESPACE"), "OMPI_MCA_ess_base_jobid": "98765"}
    assert read_env(other).master_port != read_env(MPI).master_port
    assert "MASTER_PORT is not set" in refusal(without(MPI, "PMIX_NAMESPACE"))


def test_open_mpi_on_several_nodes_wants_the_address():
    spread = {**MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    assert "mpirun -x MASTER_ADDR=<rank 0's host> -x MASTER_PORT=" in refusal(spread)
    launch = read_env({**spread, "MASTER_ADDR": "node0", "MASTER_PORT": "12345"})
    assert (launch.master_addr, launch.num_nodes, launch.rank) == ("node0", 2, 1)


def test_open_mpi_beats_the_slurm_task_that_its_daemon_is():
    assert read_env({**STEP, **MPI}).launcher == "open mpi"


def test_open_mpi_with_one_process_is_single():
    assert not read_env({"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}).distributed


def test_open_mpi_with_an_injected_world_size_is_refused():
    assert "WORLD_SIZE=8 but OMPI_COMM_WORLD_SIZE=2" in refusal({**MPI, "WORLD_SIZE": "8"})


# --- Horovod: what horovodrun 0.28.1 was seen to set ------------------------------------------------------------------

HOROVOD = {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2", "HOROVOD_LOCAL_RANK": "1", "HOROVOD_LOCAL_SIZE": "2",
           "HOROVOD_CROSS_RANK": "0", "HOROVOD_CROSS_SIZE": "1", "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
           "HOROVOD_GLOO_RENDEZVOUS_PORT": "45123"}


def test_horovodrun_is_adopted():
    launch = read_env(HOROVOD)
    assert (launch.rank, launch.local_rank, launch.world_size, launch.local_world_size) == (1, 1, 2, 2)
    assert (launch.num_nodes, launch.master_addr, launch.launcher) == (1, "127.0.0.1", "horovodrun")
    assert launch.origins["MASTER_PORT"] == "derived from HOROVOD_GLOO_RENDEZVOUS_PORT"
    assert read_env({**HOROVOD, "HOROVOD_GLOO_RENDEZVOUS_PORT": "45124"}).master_port != launch.master_port
    assert launch.has_horovod_rendezvous
    assert not read_env(MPI).has_horovod_rendezvous
    assert not read_env({"HOROVOD_SIZE": "1", "HOROVOD_RANK": "0"}).distributed


def test_horovodrun_on_several_nodes_wants_the_address():
    spread = {**HOROVOD, "HOROVOD_LOCAL_SIZE": "1", "HOROVOD_LOCAL_RANK": "0"}
    assert "horovodrun does not say where rank 0 is. Set MASTER_ADDR=<rank 0's host>" in refusal(spread)
    launch = read_env({**spread, "MASTER_ADDR": "node0", "MASTER_PORT": "12345"})
    assert (launch.master_addr, launch.num_nodes, launch.rank) == ("node0", 2, 1)


def test_horovodrun_without_a_rank_is_never_a_silent_world_of_one():
    assert "HOROVOD_SIZE=2 on several nodes" in refusal({"HOROVOD_SIZE": "2"})


@pytest.mark.parametrize("name", ["PMI_SIZE", "MV2_COMM_WORLD_SIZE", "JSM_NAMESPACE_SIZE"])
def test_foreign_launcher_is_never_a_silent_world_of_one(name: str):
    assert "Start with torchrun" in refusal({name: "2"})
    assert not read_env({name: "1"}).distributed
    assert read_env({**FULL, name: "4"}).rank == 1


# --- Kubeflow: what training-operator 1.9.3 was seen to set -----------------------------------------------------------


def pod(rank: int, world: int, job: str, nproc: str, nodes: str, port: str = "23456") -> Env:
    """A replica of a PyTorchJob that has a Master."""
    master = f"{job}-master-0"
    return {
        "PYTHONUNBUFFERED": "1", "MASTER_PORT": port, "PET_MASTER_PORT": port, "MASTER_ADDR": master,
        "PET_MASTER_ADDR": master, "WORLD_SIZE": str(world), "RANK": str(rank), "PET_NODE_RANK": str(rank),
        "PET_NPROC_PER_NODE": nproc, "PET_NNODES": nodes,
    }


def elastic(endpoint: str, nproc: str, nodes: str) -> Env:
    return {"PET_NPROC_PER_NODE": nproc, "PET_RDZV_ENDPOINT": endpoint, "PET_RDZV_BACKEND": "c10d", "PET_NNODES": nodes}


@pytest.mark.parametrize(
    ("env", "rank", "world"),
    [
        (pod(0, 3, "mw", "auto", "3"), 0, 3),
        (pod(1, 3, "mw", "auto", "3"), 1, 3),
        (pod(2, 3, "mw", "auto", "3"), 2, 3),
        (pod(1, 2, "gpu", "gpu", "2"), 1, 2),
        (pod(1, 2, "one", "1", "2"), 1, 2),  # this and the next were not seen, but follow from what was
        ({**pod(1, 2, "elastic-master", "1", "1:1"), "PET_RDZV_ENDPOINT": "elastic-master-worker-0:23456"}, 1, 2),
    ],
)
def test_pytorchjob_with_one_process_a_pod_is_adopted(env: Env, rank: int, world: int):
    launch = read_env(env)
    assert (launch.rank, launch.local_rank, launch.world_size) == (rank, 0, world)
    assert (launch.num_nodes, launch.node_rank, launch.local_world_size) == (world, rank, 1)
    assert (launch.master_addr, launch.master_port, launch.warnings) == (env["MASTER_ADDR"], 23456, ())
    assert launch.origins["RANK"] == "PyTorchJob operator (PET_*)"
    assert launch.origins["LOCAL_RANK"] == "default"


@pytest.mark.parametrize(
    "env",
    [
        pod(0, 8, "master-only", "8", "1"),
        pod(1, 4, "user-port", "2", "2", port="29500"),
        {**pod(1, 4, "elastic-master", "2", "1:1"), "PET_RDZV_ENDPOINT": "elastic-master-worker-0:23456"},
    ],
    ids=["master-only", "master-worker", "elastic-master"],
)
def test_pytorchjob_rank_that_counts_pods_is_refused(env: Env):
    message = refusal(env)
    assert f"RANK={env['RANK']} counts pods but WORLD_SIZE={env['WORLD_SIZE']} counts processes" in message
    assert "torchrun -m train.main" in message
    assert 'nprocPerNode: "1"' in message


def test_torchrun_inside_a_pod_is_torchrun():
    assert read_env({**pod(1, 4, "mw", "2", "2"), **AGENT}).launcher == "torchrun"
    assert read_env({**elastic("worker-0:23456", "2", "2:2"), **AGENT}).rank == 3


def test_explicit_local_rank_in_a_pod_is_believed():
    launch = read_env({**pod(1, 4, "mw", "2", "2"), "LOCAL_RANK": "1"})
    assert (launch.rank, launch.local_rank, launch.origins["RANK"]) == (1, 1, "environment")


@pytest.mark.parametrize(
    "env",
    [
        elastic("elastic-worker-0:23456", "4", "2:2"),
        elastic("range-worker-0:29400", "auto", "1:3"),
        elastic("deprecated-worker-0:23456", "2", "2:2"),
        {**elastic("standalone-worker-0:23456", "2", "1:1"), "PET_STANDALONE": ""},
        {"PET_NPROC_PER_NODE": "auto", "PET_NNODES": "2"},  # Workers without a Master
        {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": "1", "PET_MASTER_PORT": "29500",
         "PET_MASTER_ADDR": "job-node-0-0.job", "JOB_COMPLETION_INDEX": "1"},  # Trainer v2
    ],
    ids=["elastic", "elastic-range", "elastic-deprecated", "standalone", "workers-only", "trainer-v2"],
)
def test_kubeflow_without_rank_is_never_a_silent_world_of_one(env: Env):
    message = refusal(env)
    assert f"PET_NNODES={env['PET_NNODES']}" in message
    assert "RANK is not set" in message
    assert "torchrun -m train.main" in message
    assert "\n" not in message


TRAINER = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "4", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "job-node-0-0.job"}


@pytest.mark.parametrize("env", [pod(1, 8, "mw", "4", "2"), TRAINER])
def test_launch_in_a_pod_leaves_kubeflows_variables_out(env: Env):
    left = outside_pod({**env, "HOME": "/tmp"}, num_nodes=2, nproc=4)
    assert left == {name: value for name, value in env.items() if name == "PYTHONUNBUFFERED"} | {"HOME": "/tmp"}
    assert read_env(left).launcher == "python"


@pytest.mark.parametrize(
    ("num_nodes", "nproc", "said"),
    [(1, 4, "--nnodes must be what Kubeflow gives, PET_NNODES=2, got 1"), (2, 1, "--nproc must")],
)
def test_launch_in_a_pod_is_refused_what_would_train_alone(num_nodes: int, nproc: int, said: str):
    with pytest.raises(LaunchError, match=said):
        outside_pod(TRAINER, num_nodes=num_nodes, nproc=nproc)


def test_launch_in_an_elastic_pod_is_refused():
    with pytest.raises(LaunchError, match="PET_NNODES=2:4 may change"):
        outside_pod(elastic("e-worker-0:23456", "1", "2:4"), num_nodes=2, nproc=1)


def test_launch_below_a_launcher_in_a_pod_sees_it():
    env = {**pod(1, 4, "mw", "2", "2"), **AGENT}
    assert outside_pod(env, num_nodes=1, nproc=1) == env


def test_kubeflow_with_one_pod_is_single_and_says_what_torchrun_would_do():
    env = {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "auto"}
    assert not read_env(env).distributed
    assert "one process a device" in warning(env)


def test_kubeflow_count_that_cannot_be_read_is_refused():
    assert refusal({"PET_NNODES": "two"}).startswith("PET_NNODES must be a count or least:most, got 'two'")


def test_indexed_job_without_rank_is_single_with_a_warning():
    launch = read_env({"JOB_COMPLETION_INDEX": "1"})
    assert not launch.distributed
    assert "k8s/job.yaml" in "\n".join(launch.warnings)
    assert warning({"JOB_COMPLETION_INDEX": "1", **FULL}) == ""


# --- a new launcher ---------------------------------------------------------------------------------------------------


class Flux(Launcher):
    """What a file in process/launchers/ may be like."""

    def adopt(self, environ: Mapping[str, str]) -> Found | None:
        if (size := count(environ, "FLUX_JOB_SIZE")) is None or size == 1:
            return None
        found = given(environ, "flux")
        adopt_names(environ, found, {"RANK": "FLUX_TASK_RANK", "WORLD_SIZE": "FLUX_JOB_SIZE"}, "Flux")
        return found

    def run_name(self, environ: Mapping[str, str]) -> str | None:
        return f"flux-{environ['FLUX_JOB_ID']}" if "FLUX_JOB_ID" in environ else None


def test_new_launcher_is_one_class_in_the_table(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("train.process.env.LAUNCHERS", (*LAUNCHERS, Flux()))
    task = {"FLUX_JOB_ID": "f7", "FLUX_JOB_SIZE": "4", "FLUX_TASK_RANK": "3"}
    launch = read_env({**task, "MASTER_ADDR": "node0", "MASTER_PORT": "12345"})
    assert (launch.rank, launch.world_size, launch.run_name, launch.launcher) == (3, 4, "flux-f7", "flux")
    assert launch.origins["RANK"] == "Flux"
    assert "MASTER_ADDR MASTER_PORT are not set" in refusal(task)
    assert not read_env({"FLUX_JOB_SIZE": "1"}).distributed


# --- imports ----------------------------------------------------------------------------------------------------------


def test_import_of_env_imports_no_torch():
    code = "import sys, train.process.env; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2], timeout=240)
