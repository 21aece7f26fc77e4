"""What the variables of launchers say of a rank (Slurm, mpirun, horovodrun, Kubernetes), and ports that do not collide.

`adopt` returns RANK and its companions as strings.
"""

import contextlib
import random
import re
import socket
import zlib
from collections.abc import Mapping

from rankup.errors import UserError

WHO_SETS_THEM = "torchrun, `rankup launch` and PyTorchJob set them; on Slurm start with srun and slurm/task.sh."
FIVE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
TORCHRUN = "torchrun -m train.main train ..."
# Slurm numbers the batch shell, salloc's interactive shell and the like from here on: steps, but not tasks of ours
FIRST_SPECIAL_STEP = 0xFFFFFFF0
# Launchers whose ranks we adopt by a prefix: name, prefix, variables of which one names the job, what several nodes
# lack. horovodrun may run inside mpirun, so it comes first
BY_PREFIX = (
    ("horovodrun", "HOROVOD_", ("HOROVOD_GLOO_RENDEZVOUS_PORT",),
     "Set MASTER_ADDR=<rank 0's host> and MASTER_PORT=<a free port> before it."),
    ("mpirun", "OMPI_COMM_WORLD_", ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
     "Give mpirun -x MASTER_ADDR=<rank 0's host> -x MASTER_PORT=<a free port>."),
)
# What counts the processes of launchers whose ranks we do not adopt: MPICH's and Intel MPI's, MVAPICH2's, jsrun
FOREIGN = ("PMI_SIZE", "MV2_COMM_WORLD_SIZE", "JSM_NAMESPACE_SIZE")


def adopt(environ: Mapping[str, str]) -> tuple[str, dict[str, str]] | None:
    """RANK is not set: the launcher that started this process ("python" for one process alone), and what it says; None
    where none did. Raises UserError where a launcher of several processes does not say which rank this is."""
    refuse_pod(environ)
    # mpirun's daemons are Slurm tasks: the inner launcher's ranks are ours. srun sets PMI_SIZE for its tasks too
    if found := _adopt_mpi(environ) or adopt_slurm(environ):
        return found
    for name in FOREIGN:
        if (count(environ, name) or 1) > 1:
            raise UserError(
                f"{name}={environ[name]} but RANK is not set: that launcher is not supported. Start with {TORCHRUN}."
            )
    # An Indexed Job does not tell its pods how many they are; that a TrainJob has only one is known
    if (index := environ.get("JOB_COMPLETION_INDEX")) and environ.get("PET_NNODES") != "1":
        if "WORLD_SIZE" in environ:
            return "kubernetes", {"RANK": index}
        raise UserError(
            f"JOB_COMPLETION_INDEX={index} but WORLD_SIZE is not set: each pod would train alone. Set WORLD_SIZE, "
            "MASTER_ADDR and MASTER_PORT as k8s/job.yaml does. If each is to train alone, give launch --nnodes 1, or "
            "unset JOB_COMPLETION_INDEX."
        )
    return None


def count(environ: Mapping[str, str], name: str, *, least: int = 0, most: int = 10**18) -> int | None:
    """The number in that variable, None where it is empty. Raises UserError for anything else, and beyond the bounds.
    """
    if not (text := environ.get(name)):
        return None
    if not re.fullmatch(r"[0-9]{1,18}", text) or not least <= int(text) <= most:
        rule = f"from {least} to {most}" if most < 10**18 else f">= {least}"
        raise UserError(f"{name} must be a whole number {rule}, got {text!r}. {WHO_SETS_THEM}")
    return int(text)


# Slurm: inside a step the number of a task is a rank; in a batch shell it is not --------------------------------------


def adopt_slurm(environ: Mapping[str, str]) -> tuple[str, dict[str, str]] | None:
    """As `adopt`. Raises UserError in a batch shell of several tasks: it has SLURM_PROCID=0, yet is not rank 0."""
    step, nodes, tasks = (count(environ, f"SLURM_{name}") for name in ("STEP_ID", "NNODES", "NTASKS"))
    is_task = step is not None and step < FIRST_SPECIAL_STEP
    if is_task:  # of a step, which may have fewer tasks and nodes than its job
        tasks, nodes = count(environ, "SLURM_STEP_NUM_TASKS"), count(environ, "SLURM_STEP_NUM_NODES")
    elif tasks is None and nodes is not None:
        tasks = nodes * (count(environ, "SLURM_NTASKS_PER_NODE") or 1)
    if tasks is None:
        return None
    if tasks == 1:
        # A batch script may export MASTER_ADDR and MASTER_PORT whatever its size
        return None if {"LOCAL_RANK", "WORLD_SIZE"} & environ.keys() else ("python", {})
    if not is_task:
        raise UserError(
            f"Slurm gave this job {tasks} tasks, but this process is not one of them (no SLURM_STEP_ID: a batch "
            "or salloc shell). Start with srun, as slurm/ddp.sbatch does through slurm/task.sh; for a single "
            "process: srun -n 1."
        )
    names = {"RANK": "SLURM_PROCID", "LOCAL_RANK": "SLURM_LOCALID", "WORLD_SIZE": "SLURM_STEP_NUM_TASKS"}
    found = {name: environ[own] for name, own in names.items() if own in environ}
    # Where all nodes have as many
    if share := re.fullmatch(r"([0-9]+)(\(x[0-9]+\))?", environ.get("SLURM_STEP_TASKS_PER_NODE", "")):
        found["LOCAL_WORLD_SIZE"] = share[1]
    if nodes == 1:
        found["MASTER_ADDR"] = "127.0.0.1"  # a container may not resolve its host's name
    elif hosts := environ.get("SLURM_STEP_NODELIST"):
        # "n[08-11,20],m05" -> n08. Slurm's own command for it does not exist inside containers
        found["MASTER_ADDR"] = re.sub(r"\[([0-9]+)[^\]]*\]", r"\1", hosts).partition(",")[0]
    # From the job's own id, not the array's: the last task of an array has the array's id as its own
    if (job_id := count(environ, "SLURM_JOB_ID")) is not None:
        restart = count(environ, "SLURM_RESTART_COUNT") or 0
        found["MASTER_PORT"] = str(port_for(job_id, restart=restart, step=step or 0))
    return "slurm", found


# mpirun and horovodrun ------------------------------------------------------------------------------------------------


def _adopt_mpi(environ: Mapping[str, str]) -> tuple[str, dict[str, str]] | None:
    for launcher, prefix, jobs, way_out in BY_PREFIX:
        size = count(environ, f"{prefix}SIZE")
        if size is None or size == 1:
            continue
        theirs = {"RANK": "RANK", "LOCAL_RANK": "LOCAL_RANK", "WORLD_SIZE": "SIZE", "LOCAL_WORLD_SIZE": "LOCAL_SIZE"}
        found = {ours: environ[prefix + name] for ours, name in theirs.items() if prefix + name in environ}
        if found.get("LOCAL_WORLD_SIZE") == str(size):
            found["MASTER_ADDR"] = "127.0.0.1"
        elif not {"MASTER_ADDR", "RANKUP_FILE"} & environ.keys():
            raise UserError(
                f"{prefix}SIZE={size} on several nodes, but {launcher} does not say where rank 0 is. {way_out}"
            )
        if job := next(filter(None, map(environ.get, jobs)), None):
            found["MASTER_PORT"] = str(port_for(zlib.crc32(job.encode())))
        return launcher, found
    return None


# Kubeflow: the operator counts pods, and sets PET_*, which are torchrun's defaults ------------------------------------


def refuse_pod(environ: Mapping[str, str]) -> None:
    """Raise UserError in one pod of several without RANK. Trainer v2, elastic jobs and Workers without a Master set
    PET_* alone, which only torchrun can read."""
    shown = {name: environ[name] for name in ("PET_NNODES", "PET_NPROC_PER_NODE") if environ.get(name)}
    if "RANK" not in environ and not {*shown.values()} <= {"1", "1:1", "auto", "gpu", "cpu"}:
        raise UserError(
            f"{' '.join(f'{name}={text}' for name, text in shown.items())} but RANK is not set: plain python would "
            f"train alone in every pod. Kubeflow sets PET_* for torchrun: let the command be {TORCHRUN}."
        )


def count_pods(environ: Mapping[str, str], *, node_rank: int | None) -> tuple[Mapping[str, str], int | None]:
    """For an agent: `environ`, in which RANK and WORLD_SIZE count pods, and the ranks of a pod if Kubeflow says.
    `node_rank`: of options. Raises UserError where nobody says how many pods there are, or which it is."""
    nodes, per_pod = environ.get("PET_NNODES"), environ.get("PET_NPROC_PER_NODE", "")
    if nodes is None:
        return environ, None
    left = {name: value for name, value in environ.items() if not name.startswith("PET_")}
    if "PET_NODE_RANK" in environ:
        # PyTorchJob sets the same address twice; Trainer v2 only its own
        left |= {name: environ[f"PET_{name}"] for name in ("MASTER_ADDR", "MASTER_PORT") if f"PET_{name}" in environ}
        left |= {"RANK": environ["PET_NODE_RANK"], "WORLD_SIZE": nodes}
    elif node_rank is None and nodes != "1":
        refuse_pod(environ)
    # auto, gpu and cpu are torchrun's
    return left, int(per_pod) if re.fullmatch(r"[1-9][0-9]{0,6}", per_pod) else None


# Ports ----------------------------------------------------------------------------------------------------------------

# torchrun's default too. The nodes of a launch by hand must agree on a port without talking to each other first
PORT_OF_LAUNCH = 29400
# Between services that one meets on cluster nodes (16443, 23456); above the ports that need root, and below those that
# Linux gives to outgoing connections
_PORTS = range(16500, 23400)


def port_for(job_id: int, *, restart: int = 0, step: int = 0) -> int:
    """A port for rank 0, the same on every node of a job. Jobs whose ids are less than 6900 apart get different ports,
    and so do a job's restarts, as the earlier attempt may still hold its port."""
    # Primes, so that neighbouring jobs, restarts and steps differ
    return _PORTS[(job_id + 7919 * restart + 3571 * step) % len(_PORTS)]


def free_port() -> int:
    """A port of this machine that nobody listens on now. Raises OSError where there is no free one among 100."""
    for port in random.Random().sample(_PORTS, 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    raise OSError(f"no free port among {_PORTS}")
