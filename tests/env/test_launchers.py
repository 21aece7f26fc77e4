"""Every environment that Slurm, Open MPI, horovodrun and Kubeflow set: adopted, or refused with the way out."""

import zlib

import pytest

from rankup.env.launchers import as_scheduled_task, port_for
from rankup.env.rank_env import RankEnv, read_rank_env, with_options
from tests.env.test_rank_env import AGENT, FULL, LAUNCH, Env, refusal

# `srun -n 4 -N 2` sets this for task 3, on the last two of the job's three nodes
STEP = {
    "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
    "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2", "SLURM_NNODES": "2",
    "SLURM_STEP_NODELIST": "rn[2-3]", "SLURM_JOB_NODELIST": "rn[1-3]", "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}
# The batch shell of a job with two tasks. It has a task number, but no step
BATCH = {"SLURM_JOB_ID": "77", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "2", "SLURM_NNODES": "2"}
MPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "prterun-node0-1234@1",
}
# Recorded from horovodrun 0.28.1
HOROVOD = {
    "HOROVOD_RANK": "1", "HOROVOD_SIZE": "2", "HOROVOD_LOCAL_RANK": "1", "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_CROSS_RANK": "0", "HOROVOD_CROSS_SIZE": "1", "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
    "HOROVOD_GLOO_RENDEZVOUS_PORT": "45123",
}


def without(env: Env, *names: str) -> Env:
    return {name: value for name, value in env.items() if name not in names}


def place(env: RankEnv) -> tuple[int | None, ...]:
    """Return rank, local rank, world size and local world size."""
    return env.rank, env.local_rank, env.world_size, env.local_world_size


# Slurm ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("change", "where", "address"), [
    ({}, (3, 1, 4, 2), f"rn2:{port_for(77)}"),  # the step's first host, which may differ from the job's
    *(({"SLURM_STEP_NODELIST": nodes}, (3, 1, 4, 2), f"{first}:") for nodes, first in
      (("a.example,b", "a.example"), ("n[08-11]", "n08"), ("gpu-[3,1]-ib", "gpu-3-ib"), ("r[1-2]n[0-1]", "r1n0"))),
    ({"SLURM_STEP_NUM_TASKS": "5", "SLURM_STEP_TASKS_PER_NODE": "2(x2),1"}, (3, 1, 5, None), "rn2:"),
    # One node needs no host name
    ({"SLURM_STEP_NUM_NODES": "1", "SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": "4"}, (3, 1, 4, 4), "127.0.0.1:"),
    ({"MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "12345", "SLURM_STEP_NODELIST": "broken["}, (3, 1, 4, 2),
     "10.0.0.7:12345"),
])
def test_slurm_step_is_adopted(change: Env, where: tuple[int | None, ...], address: str):
    env = read_rank_env({**STEP, **change})
    assert (place(env), env.launcher) == (where, "slurm")
    assert f"{env.master_addr}:{env.master_port}".startswith(address)


def test_ranks_of_an_agent_get_variables_of_slurm_that_describe_them() -> None:
    env = {**STEP, **as_scheduled_task(STEP, rank=3, local=1, size=4, local_size=2)}
    assert env == {**STEP, "SLURM_NPROCS": "4", "SLURM_NTASKS_PER_NODE": "2", "SLURM_TASKS_PER_NODE": "2(x2)"}
    alone = as_scheduled_task({"SLURM_JOB_ID": "77"}, rank=1, local=1, size=2, local_size=2)
    assert alone["SLURM_TASKS_PER_NODE"] == alone["SLURM_STEP_TASKS_PER_NODE"] == "2"
    assert as_scheduled_task({}, rank=3, local=1, size=4, local_size=2) == {}


@pytest.mark.parametrize("env", [
    BATCH,
    without(BATCH, "SLURM_NTASKS"),  # sbatch -N 2 sets no number of tasks, which means one per node
    {**without(BATCH, "SLURM_NTASKS"), "SLURM_NNODES": "1", "SLURM_NTASKS_PER_NODE": "2"},
    {**BATCH, "SLURM_STEP_ID": "4294967290"},  # salloc's interactive step
    {**BATCH, "MASTER_ADDR": "rn0", "MASTER_PORT": "12345"},
], ids=["batch", "nodes-only", "per-node", "salloc", "with-master"])
def test_slurm_shell_outside_a_task_is_refused(env: Env):
    message = refusal(env)
    assert message.startswith("Slurm gave this job 2 tasks, but this process is not one of them")
    assert "srun" in message
    assert "`rankup launch`" in message
    assert "\n" not in message


@pytest.mark.parametrize("env", [
    {**STEP, "SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
    {**BATCH, "SLURM_NTASKS": "1", "MASTER_ADDR": "rn0", "MASTER_PORT": "12345"},
    {"SLURM_JOB_ID": "77", "SLURM_NNODES": "1"},
], ids=["step", "with-master", "no-count"])
def test_slurm_job_with_one_task_is_a_single_process_with_its_name(env: Env):
    read = read_rank_env(env)
    assert (read.launcher, read.world_size, read.run_name) == ("python", 1, "slurm-77")
    assert " not set. " in refusal({**env, "WORLD_SIZE": "4"})


def test_slurm_gives_the_rank_if_only_an_address_is_given():
    env = read_rank_env(with_options(STEP, init_method="tcp://node0:29400"))
    assert (place(env), env.master_addr) == ((3, 1, 4, 2), "node0")


def test_explicit_rank_beats_slurm():
    env = read_rank_env({**STEP, **FULL, "RANK": "0", "WORLD_SIZE": "2"})
    assert (place(env), env.master_addr, env.launcher) == ((0, 0, 2, None), "node0", "environment")


@pytest.mark.parametrize("left", [{"WORLD_SIZE": "1"}, {"WORLD_SIZE": "8", "LOCAL_RANK": "0"}])
def test_counts_left_in_the_shell_do_not_beat_the_launchers(left: Env):
    """With a world size of one, rank 0 would train alone."""
    assert place(read_rank_env({**STEP, **left})) == (3, 1, 4, 2)
    assert place(read_rank_env({**MPI, **left})) == (1, 1, 2, 2)


@pytest.mark.parametrize("left", [3, 1])
def test_rank_beside_lost_agents_keeps_its_gpu(left: int):
    """Slurm's variables still count four agents, two on each machine."""
    fewer = {"GROUP_WORLD_SIZE": f"{left}", "WORLD_SIZE": f"{left}", "RANK": "0", "LOCAL_RANK": "1"}
    env = read_rank_env({**STEP, **LAUNCH, **fewer})
    assert (env.rank, env.local_rank, env.world_size) == (0, 1, left)


def test_run_has_its_jobs_name_whatever_set_rank():
    task = {"SLURM_JOB_ID": "78", "SLURM_ARRAY_JOB_ID": "77", "SLURM_ARRAY_TASK_ID": "1"}
    assert read_rank_env(task).run_name == "slurm-77_1"
    assert read_rank_env({"SLURM_JOB_ID": "77", **AGENT}).run_name == "slurm-77"


def test_port_depends_on_the_restart_and_the_job_id_not_the_array_id():
    array = {**STEP, "SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": "1"}
    same, array_port = read_rank_env(STEP).master_port, read_rank_env(array).master_port
    assert array_port == same
    for change in ({"SLURM_JOB_ID": "78"}, {"SLURM_RESTART_COUNT": "1"}, {"SLURM_STEP_ID": "1"}):
        assert read_rank_env({**array, **change}).master_port != same


# Open MPI, horovodrun and others --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("env", "launcher", "job"), [
    (MPI, "mpirun", "PMIX_NAMESPACE"), (HOROVOD, "horovodrun", "HOROVOD_GLOO_RENDEZVOUS_PORT"),
    ({**without(MPI, "PMIX_NAMESPACE"), "OMPI_MCA_ess_base_jobid": "98765"}, "mpirun", "OMPI_MCA_ess_base_jobid"),
], ids=["mpi", "horovod", "older-mpi"])
def test_mpi_on_one_node_is_adopted(env: Env, launcher: str, job: str):
    read = read_rank_env(env)
    assert (place(read), read.master_addr, read.launcher) == ((1, 1, 2, 2), "127.0.0.1", launcher)
    assert read_rank_env({**env, job: "another"}).master_port != read.master_port
    assert read.master_port == port_for(zlib.crc32(env[job].encode()))  # the same port on every node
    assert "MASTER_PORT is not set" in refusal(without(env, job))


@pytest.mark.parametrize(("env", "prefix", "way_out"), [
    (MPI, "OMPI_COMM_WORLD_", "mpirun -x MASTER_ADDR=<rank 0's host> -x MASTER_PORT="),
    (HOROVOD, "HOROVOD_", "horovodrun does not say where rank 0 is. Set MASTER_ADDR=<rank 0's host>"),
])
def test_mpi_on_several_nodes_needs_the_address(env: Env, prefix: str, way_out: str):
    spread = {**env, f"{prefix}LOCAL_SIZE": "1", f"{prefix}LOCAL_RANK": "0"}
    assert way_out in refusal(spread)
    read = read_rank_env({**spread, "MASTER_ADDR": "node0", "MASTER_PORT": "12345"})
    assert (read.master_addr, read.rank) == ("node0", 1)
    assert read_rank_env({**spread, "RANKUP_FILE": "/shared/meeting"}).file == "/shared/meeting"
    assert f"{prefix}SIZE=2 on several nodes" in refusal({f"{prefix}SIZE": "2"})


def test_mpi_ranks_beat_the_slurm_task_of_their_daemon():
    assert read_rank_env({**STEP, **MPI}).launcher == "mpirun"
    assert read_rank_env({**STEP, **MPI, **HOROVOD}).launcher == "horovodrun"


@pytest.mark.parametrize("name", ["PMI_SIZE", "MV2_COMM_WORLD_SIZE", "JSM_NAMESPACE_SIZE"])
def test_unknown_launcher_never_gives_a_world_of_one(name: str):
    assert "Start with torchrun" in refusal({name: "2"})
    assert read_rank_env({**FULL, name: "4"}).rank == 1
    assert read_rank_env({**STEP, name: "4"}).launcher == "slurm"  # srun also sets PMI_SIZE


@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_SIZE", "HOROVOD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE"])
def test_unknown_launcher_of_one_process_is_ignored(name: str):
    assert read_rank_env({name: "1"}) == RankEnv()


# Kubeflow: recorded from training-operator 1.9.3 ----------------------------------------------------------------------


def pod(rank: int, world: int, job: str, nproc: str, nodes: str, port: str = "23456") -> Env:
    """Return the environment of a replica of a PyTorchJob that has a Master."""
    master = f"{job}-master-0"
    return {
        "PYTHONUNBUFFERED": "1", "MASTER_PORT": port, "PET_MASTER_PORT": port, "MASTER_ADDR": master,
        "PET_MASTER_ADDR": master, "WORLD_SIZE": str(world), "RANK": str(rank), "PET_NODE_RANK": str(rank),
        "PET_NPROC_PER_NODE": nproc, "PET_NNODES": nodes,
    }


def elastic(endpoint: str, nproc: str, nodes: str) -> Env:
    return {"PET_NPROC_PER_NODE": nproc, "PET_RDZV_ENDPOINT": endpoint, "PET_RDZV_BACKEND": "c10d", "PET_NNODES": nodes}


@pytest.mark.parametrize(("env", "rank", "world"), [
    (pod(2, 3, "mw", "auto", "3"), 2, 3),
    (pod(1, 2, "gpu", "gpu", "2"), 1, 2),
    (pod(1, 2, "one", "1", "2"), 1, 2),  # this one and the next were not recorded, but follow from the recorded ones
    ({**pod(1, 2, "elastic-master", "1", "1:1"), "PET_RDZV_ENDPOINT": "elastic-master-worker-0:23456"}, 1, 2),
])
def test_pytorchjob_with_one_process_per_pod_is_adopted(env: Env, rank: int, world: int):
    read = read_rank_env(env)
    assert place(read) == (rank, 0, world, None)
    assert (read.master_addr, read.master_port) == (env["MASTER_ADDR"], 23456)


TRAINER = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "4", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "job-node-0-0.job"}


@pytest.mark.parametrize("env", [
    elastic("elastic-worker-0:23456", "4", "2:2"),
    elastic("range-worker-0:29400", "auto", "1:3"),
    {"PET_NPROC_PER_NODE": "auto", "PET_NNODES": "2"},  # Workers without a Master
    {**TRAINER, "PET_NPROC_PER_NODE": "1", "PET_MASTER_PORT": "29500", "JOB_COMPLETION_INDEX": "1"},  # Trainer v2
], ids=["elastic", "elastic-range", "workers-only", "trainer-v2"])
def test_kubeflow_without_rank_never_gives_a_world_of_one(env: Env):
    message = refusal(env)
    assert f"PET_NNODES={env['PET_NNODES']}" in message
    assert "RANK is not set" in message
    assert "torchrun -m train.main" in message
    assert "\n" not in message


def test_indexed_job_pod_uses_its_index_as_rank_and_never_trains_alone_by_accident():
    for index in ("0", "1"):
        message = refusal({"JOB_COMPLETION_INDEX": index})
        assert message.startswith(f"JOB_COMPLETION_INDEX={index} but WORLD_SIZE is not set: each pod would train alone")
        assert "k8s/job.yaml" in message
    assert not read_rank_env({"JOB_COMPLETION_INDEX": "0", "PET_NNODES": "1"}).distributed  # a TrainJob with one pod
    assert place(read_rank_env({**without(FULL, "RANK"), "JOB_COMPLETION_INDEX": "2"})) == (2, 0, 4, None)
    assert read_rank_env({**FULL, "JOB_COMPLETION_INDEX": "2"}).rank == 1


def test_port_is_unprivileged_and_differs_between_neighbouring_jobs():
    ports = {port_for(job) for job in range(40000)}
    assert 16443 < min(ports) <= max(ports) < 23456  # not root's ports, known services or outgoing connections
    assert len({port_for(job) for job in range(123456, 123456 + 6900)}) == 6900
