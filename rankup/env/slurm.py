"""Slurm's variables: inside a step the number of a task is a rank; in a batch shell it is not."""

import itertools
import re
from collections.abc import Mapping

from rankup.env.addresses import port_for
from rankup.env.launchers import Variables, count, given
from rankup.errors import LaunchError

# Slurm numbers the batch shell, salloc's interactive shell and the like from here on: steps, but not tasks of ours.
FIRST_SPECIAL_STEP = 0xFFFFFFF0
MAX_HOSTS = 65536
STEP = "Slurm step"  # who set a variable
_RANGE = r"[0-9]{1,18}(?:-[0-9]{1,18})?"
_HOST = rf"(?:[^,\[\]\s]|\[{_RANGE}(?:,{_RANGE})*\])+"  # gpu-[1,3]-ib


def adopt(environ: Mapping[str, str]) -> Variables | None:
    """RANK is not set: the rank that this task of a step is, or None where Slurm did not start several tasks.

    Raises LaunchError in a batch shell of several tasks: it has SLURM_PROCID=0, yet is not rank 0.
    """
    tasks, nodes, step = _tasks(environ), _nodes(environ), _step(environ)
    if tasks is None:
        return None
    if tasks == 1:
        # A batch script may export MASTER_ADDR and MASTER_PORT whatever its size
        alone = not any(name in environ for name in ("LOCAL_RANK", "WORLD_SIZE"))
        return Variables("python") if alone else None
    if step is None:
        raise LaunchError(
            f"Slurm gave this job {tasks} tasks, but this process is not one of them (no SLURM_STEP_ID: a batch "
            "or salloc shell). Start with srun, as slurm/ddp.sbatch does through slurm/task.sh; for a single "
            "process: srun -n 1."
        )
    found = given(environ, "slurm")
    found.hint = (
        "squeue -s and scontrol show job say which tasks of the step run; srun has to start all of them at once."
    )
    total = "SLURM_STEP_NUM_TASKS" if environ.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    found.adopt(environ, {"RANK": "SLURM_PROCID", "LOCAL_RANK": "SLURM_LOCALID", "WORLD_SIZE": total}, STEP)
    _add_place(environ, found)
    lists = [name for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST") if environ.get(name)]
    if nodes == 1:
        # A container may not resolve its host's name
        found.add("MASTER_ADDR", "127.0.0.1", "Slurm step (one node)")
    elif lists and "MASTER_ADDR" not in found.values:
        found.add("MASTER_ADDR", expand_nodelist(environ[lists[0]])[0], f"derived from {lists[0]}")
    # From the job's own id, not the array's: the last task of an array has the array's id as its own
    if (job_id := count(environ, "SLURM_JOB_ID", "SLURM_JOBID")) is not None:
        restart = count(environ, "SLURM_RESTART_COUNT") or 0
        found.add("MASTER_PORT", port_for(job_id, restart=restart, step=step), "derived from SLURM_JOB_ID")
    return found


def complete(environ: Mapping[str, str], found: Variables) -> None:
    """An explicit RANK beats Slurm's. If both are the same task, Slurm may add what it knows about this node."""
    tasks, nodes = _tasks(environ), _nodes(environ)
    if _step(environ) is None or tasks is None:
        return
    if found.launcher != "environment":
        # torchrun or `launch` started this process. In each of several tasks of a node it starts n times n processes,
        # and ranks share devices
        if nodes is not None and tasks > nodes:
            way_out = "Use --ntasks-per-node=1 with torchrun or launch, or srun without them (slurm/task.sh)."
            if environ.get("GROUP_WORLD_SIZE") != str(tasks):
                where = f"{found.launcher} runs in each of {tasks} Slurm tasks on {nodes} nodes"
                raise LaunchError(f"{where}: that multiplies the processes. {way_out}")
            # One group in which each task is an agent: somebody simulates nodes by tasks
            found.warnings.append(f"{found.launcher} runs in {tasks} Slurm tasks on {nodes} nodes. {way_out}")
    elif (environ.get("SLURM_PROCID"), str(tasks)) == (environ["RANK"], environ.get("WORLD_SIZE")):
        found.add("LOCAL_RANK", environ.get("SLURM_LOCALID"), STEP)
        _add_place(environ, found)
    elif tasks > 1:
        found.warnings.append(
            f"RANK={environ['RANK']} WORLD_SIZE={environ.get('WORLD_SIZE', '')} from the environment beat Slurm's "
            f"task {environ.get('SLURM_PROCID', '?')} of {tasks}. If this is not meant, unset RANK before srun."
        )


def run_name(environ: Mapping[str, str]) -> str | None:
    """The job's number, which a requeue keeps; in an array the array's number and the task's."""
    array, index = count(environ, "SLURM_ARRAY_JOB_ID"), count(environ, "SLURM_ARRAY_TASK_ID")
    job_id = count(environ, "SLURM_JOB_ID", "SLURM_JOBID")
    if array is not None and index is not None:
        return f"slurm-{array}_{index}"
    return None if job_id is None else f"slurm-{job_id}"


def _step(environ: Mapping[str, str]) -> int | None:
    step = count(environ, "SLURM_STEP_ID", "SLURM_STEPID")
    return None if step is None or step >= FIRST_SPECIAL_STEP else step


def _nodes(environ: Mapping[str, str]) -> int | None:
    return count(environ, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")


def _tasks(environ: Mapping[str, str]) -> int | None:
    """How many processes are meant: inside a step its count, otherwise the job's, or one on each node without one."""
    if _step(environ) is not None:
        return count(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
    tasks = count(environ, "SLURM_NTASKS", "SLURM_NPROCS")
    nodes = count(environ, "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
    if tasks is None and nodes is not None:
        return nodes * (count(environ, "SLURM_NTASKS_PER_NODE") or 1)
    return tasks


def _add_place(environ: Mapping[str, str], found: Variables) -> None:
    """Add what Slurm says about this node. Its share of the step's tasks: "2(x2),1" is 2, 2 and 1."""
    node, nodes, tasks = count(environ, "SLURM_NODEID"), _nodes(environ), _tasks(environ)
    found.add("GROUP_RANK", node, STEP)
    found.add("GROUP_WORLD_SIZE", nodes, STEP)
    if nodes == 1:
        found.add("LOCAL_WORLD_SIZE", tasks, STEP)
    text = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE", "")
    shares = re.findall(r"([0-9]+)(?:\(x([0-9]{1,5})\))?", text)
    counts = [int(share) for share, times in shares for _ in range(int(times or 1))]
    if node is not None and node < len(counts) == nodes and sum(counts) == tasks:
        found.add("LOCAL_WORLD_SIZE", counts[node], STEP)


def expand_nodelist(nodelist: str) -> list[str]:
    """The hosts of a compressed list, in order: "n[1-3,7],m05" -> n1 n2 n3 n7 m05. Leading zeros are kept.

    Raises LaunchError if the list is malformed or names more than 65536 hosts. In Python, because Slurm's own command
    for it does not exist inside containers.
    """
    bad = LaunchError(f"a host list must look like n[1-3,7],m05, got {nodelist!r}. Set MASTER_ADDR to rank 0's host.")
    if not re.fullmatch(rf",*{_HOST}(,+{_HOST})*,*", nodelist.strip()):
        raise bad
    hosts: list[str] = []
    for item in re.findall(_HOST, nodelist):
        choices: list[list[str]] = []
        for text, ranges in re.findall(r"([^\[\]]+)|\[([^\[\]]+)\]", item):
            choices.append([text] if text else [])
            for first, last in re.findall(r"([0-9]+)(?:-([0-9]+))?", ranges):
                span = range(int(first), int(last or first) + 1)
                if not 0 < len(span) <= MAX_HOSTS:
                    raise bad
                choices[-1] += [str(number).zfill(len(first)) for number in span]
        hosts += ["".join(names) for names in itertools.islice(itertools.product(*choices), MAX_HOSTS + 1)]
        if len(hosts) > MAX_HOSTS:
            raise bad
    return hosts
