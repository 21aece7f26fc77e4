"""What Slurm's variables say about an allocation, for a batch script or the shell of salloc. No torch here."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from rankup.env.launchers import by_mpi, count, task_number
from rankup.errors import UserError

# srun reads these as options of a step. They describe the whole job, or an earlier step; and an address, a port or a
# rank may be left from an earlier job in the same shell
SHAPES_A_STEP = re.compile(
    r"SLURM_(NTASKS.*|NPROCS|CPUS_PER_.*|GPUS_PER_.*|GPU_BIND|TRES_.*|GRES.*|CPU_BIND.*|MEM_BIND.*|DIST.*|HINT|"
    r"THREADS_PER_CORE|EXCLUSIVE|EXACT|OVERLAP|WAIT|KILL_BAD_EXIT|NO_KILL|EXPORT_ENV|LABELIO|STD\w+MODE|HOSTFILE)|"
    r"SRUN_(CPUS_PER_TASK|EXPORT_ENV)|MASTER_(ADDR|PORT)|((LOCAL|GROUP)_)?(RANK|WORLD_SIZE)"
)


@dataclass(frozen=True, slots=True)
class Allocation:
    """An allocation of Slurm, seen by a process that is no task of a step."""

    job_id: str  # each task of an array has an id of its own
    job: str  # as users and scontrol name the job: 7, or 7_3 in an array
    nodes: str  # the list of nodes, as Slurm writes it
    num_nodes: int
    cpus: int  # the fewest CPUs of any node, because srun asks for equally many on each
    gpus: int | None  # on each node; None if this shell does not know it, such as that of salloc
    tasks: int  # on each node
    restarts: int
    partition: str


def read_allocation(environ: Mapping[str, str]) -> Allocation | None:
    """Return the allocation if this process is in the batch script or the salloc shell of a Slurm job. Returns None
    elsewhere, in a task of a step, and if other variables already give this process a rank. Raises UserError for a
    heterogeneous job, and if Slurm spreads the tasks unevenly over the nodes."""
    job_id, num_nodes = environ.get("SLURM_JOB_ID"), count(environ, "SLURM_JOB_NUM_NODES", least=1)
    if not job_id or num_nodes is None or "RANK" in environ or task_number(environ) is not None or by_mpi(environ):
        return None
    if (count(environ, "SLURM_HET_SIZE") or 1) > 1:
        raise UserError(
            "slurm: the job must not be heterogeneous, got --het-group parts. Ask for nodes of one kind, or start one "
            "agent on each node yourself: srun --het-group=0,1 --ntasks-per-node=1 rankup launch ..."
        )
    tasks = environ.get("SLURM_TASKS_PER_NODE", "") if environ.get("SLURM_NTASKS") else ""
    if "," in tasks:  # such as "3,1" for --ntasks=4
        raise UserError(
            f"slurm: each node must have the same number of tasks, got {tasks} of {environ['SLURM_NTASKS']}. Give "
            "--ntasks-per-node to sbatch or salloc."
        )
    array = environ.get("SLURM_ARRAY_TASK_ID")
    return Allocation(
        job_id=job_id, job=f"{environ.get('SLURM_ARRAY_JOB_ID')}_{array}" if array else job_id,
        nodes=environ.get("SLURM_JOB_NODELIST", ""), num_nodes=num_nodes,
        # "8(x2),4" describes three nodes
        cpus=min(map(int, re.findall(r"(?<![0-9x])[0-9]+", environ.get("SLURM_JOB_CPUS_PER_NODE", "") or "1"))),
        gpus=count(environ, "SLURM_GPUS_ON_NODE"),
        tasks=int(tasks.partition("(")[0] or count(environ, "SLURM_NTASKS_PER_NODE") or 1),
        restarts=count(environ, "SLURM_RESTART_COUNT") or 0, partition=environ.get("SLURM_JOB_PARTITION", ""),
    )


def without_shape(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for srun: without variables that would shape the step or give its tasks a rank."""
    return {name: value for name, value in environ.items() if not SHAPES_A_STEP.fullmatch(name)}


def without_job(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process that takes no part in the allocation: of Slurm, it knows the job's id."""
    ids = ("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID")
    return {name: value for name, value in environ.items() if name in ids or not name.startswith("SLURM_")}
