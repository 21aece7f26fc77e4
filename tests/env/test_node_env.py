"""Which agent `launch` becomes: from options, from what launch files and schedulers set, or refused with the way
out."""

from pathlib import Path
from typing import Any

import pytest

from rankup.env.node_env import Limits, read_node_env
from rankup.errors import UserError
from tests.env.test_launchers import BATCH, HOROVOD, MPI, STEP, TRAINER, elastic, pod
from tests.env.test_rank_env import AGENT, FULL, LAUNCH, Env

ONE_EACH = {  # `srun --ntasks-per-node=1 -N 2` sets this for the second task
    **STEP, "SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
}
COMPOSE = {"LOCAL_RANK": "0", "RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node0", "MASTER_PORT": "29400"}
POD = {**TRAINER, "PET_MASTER_PORT": "29500"}
INDEX = {"JOB_COMPLETION_INDEX": "1"}
NODE = {"nnodes": 3, "node_rank": 2, "master_addr": "a"}


@pytest.mark.parametrize(("env", "options", "node", "meets"), [
    # (node rank, nodes, ranks of each), (first rank, world size), address and port
    ({}, {}, (0, 1, 1), "127.0.0.1:0"),
    ({}, {**NODE, "nproc": 2}, (2, 3, 2), "a:29400"),
    ({"MASTER_ADDR": "b", "MASTER_PORT": "6000"}, {"nnodes": 2}, (0, 2, 1), "b:6000"),
    ({"TORCHELASTIC_RUN_ID": "none"}, NODE, (2, 3, 1), "a:29400"),  # left in the shell
    (FULL, {"nnodes": 4, "node_rank": 1, "master_addr": "b", "master_port": 5000}, (1, 4, 1), "b:5000"),
    (FULL, {"master_addr": "", "master_port": 0}, (1, 4, 1), "node0:29500"),
    (COMPOSE, {}, (1, 2, 1), "node0:29400"),
    (STEP, {"nproc": 2}, (3, 4, 2), "rn2:"),  # two agents on each machine
    (ONE_EACH, {"nproc": 4}, (1, 2, 4), "rn2:"),
    ({**BATCH, "SLURM_NTASKS": "1"}, {"nproc": 4}, (0, 1, 4), "127.0.0.1:0"),
    (pod(1, 8, "mw", "4", "2"), {}, (1, 2, 4), "mw-master-0:23456"),
    (POD, {}, (1, 2, 4), "job-node-0-0.job:29500"),
    ({"PET_NNODES": "1", "PET_NPROC_PER_NODE": "2"}, {}, (0, 1, 2), "127.0.0.1:0"),
    # Workers without a Master: options give the node
    ({"PET_NNODES": "3", "PET_NPROC_PER_NODE": "auto"}, NODE, (2, 3, 1), "a:29400"),
    ({"PET_NNODES": "4", "PET_NPROC_PER_NODE": "auto", **FULL}, {}, (1, 4, 1), "node0:29500"),  # or variables give it
    ({"OMPI_COMM_WORLD_SIZE": "1", "HOROVOD_SIZE": "1"}, {}, (0, 1, 1), "127.0.0.1:0"),
    # Indexed Jobs
    (INDEX, {"nnodes": 2, "master_addr": "a"}, (1, 2, 1), "a:29400"),
    ({**INDEX, "WORLD_SIZE": "3", "MASTER_ADDR": "a", "MASTER_PORT": "29400"}, {}, (1, 3, 1), "a:29400"),
    (INDEX, {"nnodes": 1}, (0, 1, 1), "127.0.0.1:0"),
    (INDEX, NODE, (2, 3, 1), "a:29400"),  # the index of another Job of the same JobSet
])
def test_agent_follows_options_and_environment(
    env: Env, options: dict[str, Any], node: tuple[int, int, int], meets: str
):
    read = read_node_env(env, **options)
    assert (read.node_rank, read.num_nodes, read.nproc) == node
    assert (read.first_rank, read.world_size) == (node[0] * node[2], node[1] * node[2])
    assert f"{read.master_addr}:{read.master_port}".startswith(meets)
    assert (read.master_port == 0) == (read.num_nodes == 1)
    assert read.run_name == ("slurm-77" if "SLURM_JOB_ID" in env else None)


@pytest.mark.parametrize(("given", "nproc", "wanted"), [
    ({**COMPOSE, "LOCAL_RANK": "1"}, 1, (1, 2)), ({**COMPOSE, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "3"}, 1, (1, 3)),
    (STEP, 2, (2, 4)), (FULL, 4, (0, 4)),
])
def test_agent_counts_the_ranks_of_all_agents_on_its_machine(given: Env, nproc: int, wanted: tuple[int, int]) -> None:
    read = read_node_env(given, nproc=nproc)
    assert (read.local_rank, read.local_world_size) == wanted


@pytest.mark.parametrize(("env", "options", "said"), [
    ({}, {"nnodes": 2, "node_rank": 2, "master_addr": "a"}, "RANK must be a whole number from 0 to 1, got '2'"),
    ({}, {"node_rank": 1}, r"--node-rank must be 0 to match .* got 1\. .* give --nnodes too\."),
    ({}, {"nnodes": 2}, r"--master-addr must name node 0's machine when .*, got nothing\. .* --node-rank 0"),
    ({}, {**NODE, "master_addr": "a b"}, "MASTER_ADDR must be a host name or an address"),
    # Half a set, and sets that contradict each other
    ({"MASTER_ADDR": "a"}, {"nproc": 2}, "MASTER_ADDR='a' but RANK WORLD_SIZE MASTER_PORT are not set"),
    (FULL, {"node_rank": 0}, r"--node-rank must be 1 to match RANK=1 and .* \(from environment\), got 0"),
    (FULL, {"nnodes": 1}, r"--nnodes must be 4 to match .* WORLD_SIZE=4 \(from environment\), got 1\. Leave --nnodes"),
    (STEP, {"nnodes": 2}, r"--nnodes must be 4 to match .* \(from slurm\), got 2"),
    (BATCH, {"nproc": 2}, "Slurm gave this job 2 tasks, but this process is not one of them"),
    # Kubeflow
    (POD, {"nnodes": 1}, "--nnodes must be 2 to match .*, got 1"),
    (elastic("e-worker-0:23456", "1", "2:4"), {"nnodes": 2}, "PET_NNODES=2:4 .* but RANK is not set"),
    ({"PET_NPROC_PER_NODE": "auto", "PET_NNODES": "2"}, {}, "PET_NNODES=2 PET_NPROC_PER_NODE=auto but RANK is not"),
    # Launchers that start the ranks themselves
    (AGENT, {}, "a rank of torchrun, which starts the processes already. Start the script directly there"),
    (LAUNCH, {}, "a rank of launch"),
    (MPI, {}, "a rank of mpirun"),
    ({**STEP, **MPI}, {"nproc": 2}, "a rank of mpirun"),
    (HOROVOD, {}, "a rank of horovodrun"),
    ({"PMI_SIZE": "2"}, {}, "PMI_SIZE=2 but RANK is not set"),
    ({"JOB_COMPLETION_INDEX": "0"}, {}, "JOB_COMPLETION_INDEX=0 but WORLD_SIZE is not set"),
    ({"JOB_COMPLETION_INDEX": "2", "RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, {},
     "RANK must be a whole number from 0 to 1, got '2'. The manifest has the number of pods twice"),
])
def test_agent_that_would_train_alone_or_twice_is_refused(env: Env, options: dict[str, Any], said: str):
    with pytest.raises(UserError, match=said) as refused:
        read_node_env(env, **options)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("rank", [1, 7])
def test_job_that_is_scaled_up_beyond_its_limit_has_spares(rank: int) -> None:
    """FULL has WORLD_SIZE=4: pods from before and after the change count differently."""
    node = read_node_env({**FULL, "RANK": str(rank)}, nnodes=3, limits=Limits(2, 3))
    assert (node.node_rank, node.num_nodes) == (rank, 3)


ONE_AGENT = {**ONE_EACH, "SLURM_GPUS_ON_NODE": "8"}


@pytest.mark.parametrize(("env", "nproc", "gpus"), [
    ({"CUDA_VISIBLE_DEVICES": "0,1,3"}, None, 3), ({"CUDA_VISIBLE_DEVICES": "GPU-ab,GPU-cd"}, "gpu", 2),
    ({"CUDA_VISIBLE_DEVICES": "0,1,-1,2"}, None, 2),  # CUDA reads the list up to a wrong entry
    ({"CUDA_VISIBLE_DEVICES": ""}, None, 1), ({"CUDA_VISIBLE_DEVICES": "-1"}, None, 1),  # both hide all
    ({"HIP_VISIBLE_DEVICES": "0,1"}, "gpu", 2), ({"CUDA_VISIBLE_DEVICES": "0,1"}, 5, 5), ({}, None, 1),
    (ONE_AGENT, None, 8), ({**ONE_AGENT, "CUDA_VISIBLE_DEVICES": "0,1,2,3"}, "gpu", 4),
    ({**STEP, "CUDA_VISIBLE_DEVICES": "0,1,2,3"}, None, 2),  # two agents on each machine
    ({**STEP, "CUDA_VISIBLE_DEVICES": "0"}, "gpu", 1),  # each agent sees only its own
    ({"PET_NNODES": "1", "PET_NPROC_PER_NODE": "2", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}, None, 2),
    ({"PET_NNODES": "1", "PET_NPROC_PER_NODE": "auto", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}, None, 4),
    ({"PET_NNODES": "1", "PET_NPROC_PER_NODE": "2", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}, "gpu", 4),
])
def test_agent_starts_a_rank_for_each_gpu_that_it_sees(env: Env, nproc: int | str | None, gpus: int) -> None:
    assert read_node_env(env, nproc=nproc).nproc == gpus


def test_agent_counts_gpus_by_nvidia_smi_where_no_variable_names_them(tmp_path: Path) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'GPU 0: H100 (UUID: GPU-ab)'\necho '  MIG 1g.10gb'\necho 'GPU 1: H100'\n")
    tool.chmod(0o755)
    assert read_node_env({"PATH": str(tmp_path)}).nproc == 2
    assert read_node_env({"PATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}).nproc == 1
    tool.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed' >&2\nexit 9\n")
    assert read_node_env({"PATH": str(tmp_path)}).nproc == 1


@pytest.mark.parametrize("env", [{}, {"CUDA_VISIBLE_DEVICES": ""}])
def test_agent_that_sees_no_gpu_refuses_to_count_them(env: Env) -> None:
    with pytest.raises(UserError, match=r"^--nproc gpu must find GPUs, got none\. Give a number"):
        read_node_env(env, nproc="gpu")
