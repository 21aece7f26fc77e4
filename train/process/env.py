"""The environment variables of whichever launcher started us, read into a Launch or refused. No torch here.

A complete set (RANK WORLD_SIZE MASTER_ADDR MASTER_PORT, and LOCAL_RANK, 0 by default) starts that rank; nothing set
starts one process. Without RANK, what Slurm and Open MPI set is adopted where it certainly means a rank. Anything
between is refused: the alternative is a job that trains alone on every node and reports success.
"""

import re
import zlib
from collections.abc import Mapping
from dataclasses import replace

from train.errors import LaunchError
from train.process.addresses import ephemeral_range, expand_counts, expand_nodelist, port_for
from train.process.cpus import cpu_quota
from train.process.placement import FIVE, NAMES, Found, Launch, check, check_loopback, describe, single

__all__ = ["Launch", "check_loopback", "cpu_quota", "describe", "expand_nodelist", "port_for", "read_env"]

_TORCHRUN = "torchrun -m train.main train ..."
_WHO_SETS_THEM = (
    "torchrun, `python -m train.main launch` and PyTorchJob set them; on Slurm start with srun and slurm/task.sh."
)
# Variables that count the processes of launchers whose ranks we do not adopt.
_FOREIGN = {
    "PMI_SIZE": "mpiexec (MPICH, Intel MPI)",
    "MV2_COMM_WORLD_SIZE": "mpirun (MVAPICH2)",
    "JSM_NAMESPACE_SIZE": "jsrun",
}
# Slurm numbers the batch shell, salloc's interactive shell and the like from here on: steps, but no tasks of ours.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0


# What to look at where ranks are missing, by who started this one.
_HOW_TO_START = {
    "torchrun": "Start torchrun on every node with the same --nnodes, --master-addr and --master-port, and --node-rank 0, 1, ...",
    "launch": "Start `launch` on every node with the same --nnodes, --master-addr and --master-port, and --node-rank 0, 1, ...",
    "slurm": "squeue -s and scontrol show job say which tasks of the step run; srun has to start all of them at once.",
    "open mpi": "mpirun has to start all ranks at once; its -x passes MASTER_ADDR and MASTER_PORT on.",
    "PyTorchJob": "kubectl get pods shows which pod is Pending or waits for its image; kubectl describe pod says why.",
}


def how_to_start(launch: Launch) -> str:
    """Where the missing ranks are to be looked for, in the words of what started this one."""
    who = "PyTorchJob" if any(origin.startswith("PyTorchJob") for origin in launch.origins.values()) else launch.launcher
    by_hand = (
        f"Start one process with each RANK from 0 to {launch.world_size - 1}, all with MASTER_ADDR={launch.master_addr} "
        f"MASTER_PORT={launch.master_port}; docker compose ps -a shows nodes that ended."
    )
    return _HOW_TO_START.get(who, by_hand)


def read_env(environ: Mapping[str, str]) -> Launch:
    """Who is this process? `environ` is os.environ or a test's mapping; besides, only /proc's port range is read.

    Raises LaunchError with every mistake, one a line.
    """
    run_name = _run_name(environ)
    if "RANK" in environ:
        found = _explicit(environ)
    else:
        _refuse_kubeflow_without_rank(environ)
        found = _horovodrun(environ) or _open_mpi(environ) or _slurm(environ) or _no_launcher(environ)
    if found.launcher == "python":
        return single(run_name, found.warnings)
    launch = replace(check(found, run_name, who_sets_them=_WHO_SETS_THEM), file=environ.get("RANKUP_FILE", ""))
    if launch.launcher in {"torchrun", "launch"}:
        restarts = environ.get("RANKUP_RESTART") or environ.get("TORCHELASTIC_RESTART_COUNT") or "0"
        return replace(
            launch,
            agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            restart_count=int(restarts) if restarts.isdecimal() else 0,
        )
    ports = ephemeral_range()
    if not launch.file and launch.origins["MASTER_PORT"] == "environment" and launch.master_port in ports:
        warning = (
            f"MASTER_PORT={launch.master_port} is one of this machine's ports for outgoing connections "
            f"({ports.start}-{ports.stop - 1}) and may be taken at any moment. Choose one below {ports.start}."
        )
        launch = replace(launch, warnings=(*launch.warnings, warning))
    return launch


def _explicit(environ: Mapping[str, str]) -> Found:
    """RANK is set: the environment's values and nobody else's, apart from what others say about this node."""
    found = _given(environ, "environment", NAMES)
    if environ.get("RANKUP_LAUNCH") or "TORCHELASTIC_RUN_ID" in environ:
        # launch uses torch's agent, so it sets TORCHELASTIC_RUN_ID too
        found.launcher = "launch" if environ.get("RANKUP_LAUNCH") else "torchrun"
        found.origins = dict.fromkeys(found.values, found.launcher)
        if "GROUP_WORLD_SIZE" not in environ:
            found.warnings.append(
                "TORCHELASTIC_RUN_ID is set but GROUP_WORLD_SIZE is not: left over from another torchrun? Unset it."
            )
        _refuse_multiplied(environ, found)
    else:
        _take_pod(environ, found)
        _compare_with_slurm(environ, found)
    return found


def _given(environ: Mapping[str, str], launcher: str, names: tuple[str, ...] = FIVE) -> Found:
    values = {name: environ[name] for name in names if name in environ}
    return Found(launcher, values, dict.fromkeys(values, "environment"))


def _adopt(environ: Mapping[str, str], found: Found, names: dict[str, str], origin: str) -> None:
    """Take each name from the launcher's own variable. An explicit value that contradicts it means two launchers."""
    for name, theirs in names.items():
        if theirs in environ:
            if found.values.get(name, environ[theirs]) != environ[theirs]:
                raise LaunchError(
                    f"{name}={found.values[name]} but {theirs}={environ[theirs]}, and RANK is not set: two launchers "
                    f"are mixed. Unset {name}, or set {' '.join(FIVE)} all."
                )
            found.add(name, environ[theirs], origin)


def _count(environ: Mapping[str, str], *names: str) -> int | None:
    """The first of a scheduler's variables that is set and not empty."""
    for name in names:
        if text := environ.get(name):
            if not re.fullmatch(r"[0-9]{1,18}", text):
                raise LaunchError(f"{name} must be a whole number, got {text!r}. Leave it to the scheduler.")
            return int(text)
    return None


def _no_launcher(environ: Mapping[str, str]) -> Found:
    """No launcher that we know: one process, unless half a set or a foreign launcher says otherwise."""
    for name, who in _FOREIGN.items():
        if (_count(environ, name) or 1) > 1:
            raise LaunchError(
                f"{name}={environ[name]} but RANK is not set: {who} is not supported. Start with {_TORCHRUN}."
            )
    found = _given(environ, "environment", (*FIVE, "LOCAL_WORLD_SIZE"))
    if found.values and "RANKUP_FILE" in environ:
        raise LaunchError("--init-method must come with --rank and --world-size, or a launcher that gives them, got no rank.")
    if found.values:
        return found  # incomplete, as RANK is missing: the check says what else is
    found.launcher = "python"
    if "TORCHELASTIC_RUN_ID" in environ:
        found.warnings.append("TORCHELASTIC_RUN_ID is set but RANK is not: left over from another torchrun? Unset it.")
    if "PET_NPROC_PER_NODE" in environ:
        found.warnings.append(
            f"PET_NPROC_PER_NODE={environ['PET_NPROC_PER_NODE']} is for torchrun, and this is one process. "
            f"For one process a device let the command be {_TORCHRUN}."
        )
    elif "JOB_COMPLETION_INDEX" in environ:
        found.warnings.append(
            f"JOB_COMPLETION_INDEX={environ['JOB_COMPLETION_INDEX']} but RANK is not set: this pod trains alone. "
            "k8s/job.yaml shows how an Indexed Job supplies RANK and WORLD_SIZE."
        )
    return found


# --- Kubeflow ---------------------------------------------------------------------------------------------------------


def _take_pod(environ: Mapping[str, str], found: Found) -> None:
    """PyTorchJob: RANK counts pods, WORLD_SIZE counts processes. They agree with one process a pod only."""
    per_pod = environ.get("PET_NPROC_PER_NODE", "")
    if not per_pod or "LOCAL_RANK" in environ:
        return
    if per_pod.isdecimal() and int(per_pod) > 1:
        raise LaunchError(
            f"RANK={environ['RANK']} counts pods but WORLD_SIZE={environ.get('WORLD_SIZE', '')} counts processes, "
            f'since PET_NPROC_PER_NODE={per_pod}. Let the command be {_TORCHRUN}, or set nprocPerNode: "1".'
        )
    if environ.get("PET_NODE_RANK") == environ["RANK"]:
        found.origins = dict.fromkeys(found.values, "PyTorchJob operator (PET_*)")
        found.add("LOCAL_WORLD_SIZE", 1, "one process a pod")
        found.add("GROUP_RANK", environ["RANK"], "one process a pod")
        # not PET_NNODES: with an elasticPolicy it counts the Workers alone
        found.add("GROUP_WORLD_SIZE", environ.get("WORLD_SIZE"), "one process a pod")


def _refuse_kubeflow_without_rank(environ: Mapping[str, str]) -> None:
    """PET_* are torchrun's defaults. Trainer v2, elastic jobs and Workers without a Master set them, and no RANK."""
    nodes, per_node = environ.get("PET_NNODES", ""), environ.get("PET_NPROC_PER_NODE", "")
    if nodes and not re.fullmatch(r"[0-9]+(:[0-9]+)?", nodes):
        raise LaunchError(f"PET_NNODES must be a count or least:most, got {nodes!r}. Leave it to Kubeflow.")
    most_nodes = int(nodes.split(":")[-1]) if nodes else 1
    if most_nodes > 1 or (per_node.isdecimal() and int(per_node) > 1):
        told = " ".join(f"{name}={environ[name]}" for name in ("PET_NNODES", "PET_NPROC_PER_NODE") if environ.get(name))
        raise LaunchError(
            f"{told} but RANK is not set: plain python would train alone in every pod. Kubeflow sets PET_* for "
            f"torchrun: let the command be {_TORCHRUN}."
        )


def outside_pod(environ: Mapping[str, str], *, num_nodes: int, nproc: int) -> Mapping[str, str]:
    """For `launch` in a pod of Kubeflow's: the environment without what counts pods, and is not for the ranks it starts.

    Raises LaunchError where its flags say other than Kubeflow does: every pod would train alone, and report success.
    """
    if "PET_NNODES" not in environ or "LOCAL_RANK" in environ:
        return environ
    for flag, name, value in (("--nnodes", "PET_NNODES", num_nodes), ("--nproc", "PET_NPROC_PER_NODE", nproc)):
        if environ.get(name, "").isdecimal() and int(environ[name]) != value:
            raise LaunchError(f"{flag} must be what Kubeflow gives, {name}={environ[name]}, got {value}. Set {flag}=$({name}).")
    if ":" in environ["PET_NNODES"]:
        raise LaunchError(f"PET_NNODES={environ['PET_NNODES']} may change, which launch can't follow. Use {_TORCHRUN}.")
    return {name: value for name, value in environ.items() if not name.startswith("PET_") and name not in FIVE}


# --- Open MPI ---------------------------------------------------------------------------------------------------------


def _open_mpi(environ: Mapping[str, str]) -> Found | None:
    """Before Slurm: mpirun's daemons are Slurm tasks, and our processes inherit those tasks' variables."""
    size = _count(environ, "OMPI_COMM_WORLD_SIZE")
    if size is None or size == 1:
        return None
    found = _given(environ, "open mpi")
    theirs = {"RANK": "RANK", "LOCAL_RANK": "LOCAL_RANK", "WORLD_SIZE": "SIZE", "LOCAL_WORLD_SIZE": "LOCAL_SIZE"}
    _adopt(environ, found, {ours: f"OMPI_COMM_WORLD_{name}" for ours, name in theirs.items()}, "Open MPI")
    if found.values.get("LOCAL_WORLD_SIZE") == str(size):
        found.add("MASTER_ADDR", "127.0.0.1", "Open MPI (one node)")
    elif "MASTER_ADDR" not in found.values:
        raise LaunchError(
            f"OMPI_COMM_WORLD_SIZE={size} on several nodes, but Open MPI does not say where rank 0 is. "
            "Give mpirun -x MASTER_ADDR=<rank 0's host> -x MASTER_PORT=<a free port>."
        )
    for job in ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"):
        if environ.get(job):
            port = port_for(str(zlib.crc32(environ[job].encode())), 0, ephemeral_range())
            found.add("MASTER_PORT", port, f"derived from {job}")
    return found


# --- Horovod ----------------------------------------------------------------------------------------------------------


def _horovodrun(environ: Mapping[str, str]) -> Found | None:
    """Before Slurm and Open MPI, below which it may run."""
    size = _count(environ, "HOROVOD_SIZE")
    if size is None or size == 1:
        return None
    found = _given(environ, "horovodrun")
    theirs = {"RANK": "RANK", "LOCAL_RANK": "LOCAL_RANK", "WORLD_SIZE": "SIZE", "LOCAL_WORLD_SIZE": "LOCAL_SIZE"}
    _adopt(environ, found, {ours: f"HOROVOD_{name}" for ours, name in theirs.items()}, "horovodrun")
    if found.values.get("LOCAL_WORLD_SIZE") == str(size):
        found.add("MASTER_ADDR", "127.0.0.1", "horovodrun (one node)")
    elif "MASTER_ADDR" not in found.values:
        raise LaunchError(
            f"HOROVOD_SIZE={size} on several nodes, but horovodrun does not say where rank 0 is. Set MASTER_ADDR=<rank 0's host> "
            "and MASTER_PORT=<a free port> before it."
        )
    if port := _count(environ, "HOROVOD_GLOO_RENDEZVOUS_PORT"):  # another one in each start
        found.add("MASTER_PORT", port_for(str(port), 0, ephemeral_range()), "derived from HOROVOD_GLOO_RENDEZVOUS_PORT")
    return found


# --- Slurm ------------------------------------------------------------------------------------------------------------


def _slurm(environ: Mapping[str, str]) -> Found | None:
    """Inside a step the task's number is a rank. In the batch shell SLURM_PROCID=0 with SLURM_NTASKS=2 is none."""
    tasks, nodes, step = _slurm_tasks(environ), _slurm_nodes(environ), _slurm_step(environ)
    if tasks is None:
        return None
    if tasks == 1:
        # a batch script may export MASTER_ADDR and MASTER_PORT whatever its size
        alone = not any(name in environ for name in ("LOCAL_RANK", "WORLD_SIZE"))
        return Found("python", {}, {}) if alone else None
    if step is None:
        raise LaunchError(
            f"Slurm gave this job {tasks} tasks, but this process is none of them (no SLURM_STEP_ID: a batch or salloc "
            "shell). Start with srun, as slurm/ddp.sbatch does through slurm/task.sh; for a single process: srun -n 1."
        )
    found = _given(environ, "slurm")
    count = "SLURM_STEP_NUM_TASKS" if environ.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    names = {"RANK": "SLURM_PROCID", "LOCAL_RANK": "SLURM_LOCALID", "WORLD_SIZE": count, "GROUP_RANK": "SLURM_NODEID"}
    _adopt(environ, found, names, "Slurm step")
    found.add("GROUP_WORLD_SIZE", nodes, "Slurm step")
    found.add("LOCAL_WORLD_SIZE", _slurm_local_tasks(environ, tasks, nodes), "Slurm step")
    lists = [name for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST") if environ.get(name)]
    if nodes == 1:
        found.add("MASTER_ADDR", "127.0.0.1", "Slurm step (one node)")  # a container may not resolve its host's name
    elif lists and "MASTER_ADDR" not in found.values:
        found.add("MASTER_ADDR", expand_nodelist(environ[lists[0]])[0], f"derived from {lists[0]}")
    job_id = _count(environ, "SLURM_JOB_ID", "SLURM_JOBID")
    if job_id is not None:
        restart = _count(environ, "SLURM_RESTART_COUNT") or 0
        # from the job's own id, not the array's: the last task of an array has the array's id as its own
        port = port_for(str(job_id), restart, ephemeral_range(), step=step)
        found.add("MASTER_PORT", port, "derived from SLURM_JOB_ID")
    return found


def _run_name(environ: Mapping[str, str]) -> str | None:
    """The same after a requeue, and another one for each task of an array."""
    array, index = _count(environ, "SLURM_ARRAY_JOB_ID"), _count(environ, "SLURM_ARRAY_TASK_ID")
    job_id = _count(environ, "SLURM_JOB_ID", "SLURM_JOBID")
    if array is not None and index is not None:
        return f"slurm-{array}_{index}"
    return None if job_id is None else f"slurm-{job_id}"


def _slurm_step(environ: Mapping[str, str]) -> int | None:
    step = _count(environ, "SLURM_STEP_ID", "SLURM_STEPID")
    return None if step is None or step >= _FIRST_SPECIAL_STEP else step


def _slurm_nodes(environ: Mapping[str, str]) -> int | None:
    return _count(environ, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")


def _slurm_tasks(environ: Mapping[str, str]) -> int | None:
    """How many processes are meant: the step's count inside one, otherwise the job's (one a node if none was given)."""
    if _slurm_step(environ) is not None:
        return _count(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
    tasks = _count(environ, "SLURM_NTASKS", "SLURM_NPROCS")
    nodes = _count(environ, "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
    if tasks is None and nodes is not None:
        return nodes * (_count(environ, "SLURM_NTASKS_PER_NODE") or 1)
    return tasks


def _slurm_local_tasks(environ: Mapping[str, str], tasks: int, nodes: int | None) -> int | None:
    """This node's share of the step's tasks: "2(x2),1" is 2, 2 and 1."""
    if nodes == 1:
        return tasks
    text = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE", "")
    counts, node = expand_counts(text), _count(environ, "SLURM_NODEID")
    return counts[node] if node is not None and node < len(counts) == nodes and sum(counts) == tasks else None


def _compare_with_slurm(environ: Mapping[str, str], found: Found) -> None:
    """An explicit RANK beats Slurm's. If it is this task's number, Slurm may tell the rest about this node."""
    tasks, nodes = _slurm_tasks(environ), _slurm_nodes(environ)
    if _slurm_step(environ) is None or tasks is None:
        return
    if (environ.get("SLURM_PROCID"), str(tasks)) == (environ["RANK"], environ.get("WORLD_SIZE")):
        found.add("LOCAL_RANK", environ.get("SLURM_LOCALID"), "Slurm step")
        found.add("GROUP_RANK", environ.get("SLURM_NODEID"), "Slurm step")
        found.add("GROUP_WORLD_SIZE", nodes, "Slurm step")
        found.add("LOCAL_WORLD_SIZE", _slurm_local_tasks(environ, tasks, nodes), "Slurm step")
    elif tasks > 1:
        found.warnings.append(
            f"RANK={environ['RANK']} WORLD_SIZE={environ.get('WORLD_SIZE', '')} from the environment beat Slurm's task "
            f"{environ.get('SLURM_PROCID', '?')} of {tasks}. If this is not meant, unset RANK before srun."
        )


def _refuse_multiplied(environ: Mapping[str, str], found: Found) -> None:
    """torchrun inside each of several tasks on a node starts n times n processes, and ranks share devices."""
    tasks, nodes = _slurm_tasks(environ), _slurm_nodes(environ)
    if _slurm_step(environ) is None or tasks is None or nodes is None or tasks <= nodes:
        return
    way_out = "Use --ntasks-per-node=1 with torchrun or launch, or srun without them (slurm/task.sh)."
    if environ.get("GROUP_WORLD_SIZE") == str(tasks):  # one group, each task an agent of it: nodes simulated by tasks
        found.warnings.append(f"{found.launcher} runs in {tasks} Slurm tasks on {nodes} nodes. {way_out}")
    else:
        where = f"{found.launcher} runs in each of {tasks} Slurm tasks on {nodes} nodes"
        raise LaunchError(f"{where}: that multiplies the processes. {way_out}")
