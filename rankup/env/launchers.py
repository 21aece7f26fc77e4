"""How the variables of Slurm, mpirun, horovodrun and Kubernetes describe a rank, and how jobs get ports of their own.

`adopt` returns RANK and its companions as strings.
"""

import contextlib
import random
import re
import socket
import zlib
from collections.abc import Mapping
from typing import NamedTuple

from rankup.errors import UserError

WHO_SETS_THEM = "torchrun, `rankup launch` and PyTorchJob set them."
# An Indexed Job with more pods than its manifest says in WORLD_SIZE
OF_A_JOB = "The manifest has the number of pods twice: `completions`, and --nnodes or WORLD_SIZE (k8s/job.yaml)."
FIVE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
TORCHRUN = "torchrun -m train.main train ..."
# From this step number on, Slurm counts special steps, such as the batch shell and salloc's shell. They are not ranks
FIRST_SPECIAL_STEP = 0xFFFFFFF0
# Launchers whose variables share a prefix: the launcher's name, the prefix, the variables that may name the job, and
# what to set on several nodes. horovodrun comes first, because it may run inside mpirun
BY_PREFIX = (
    ("horovodrun", "HOROVOD_", ("HOROVOD_GLOO_RENDEZVOUS_PORT",),
     "Set MASTER_ADDR=<rank 0's host> and MASTER_PORT=<a free port> before it."),
    ("mpirun", "OMPI_COMM_WORLD_", ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
     "Give mpirun -x MASTER_ADDR=<rank 0's host> -x MASTER_PORT=<a free port>."),
)
# Packages whose ranks learn of each other from a launcher of their own alone: the variable in which it says how many
# ranks there are, and how to start a script with it
OWN_LAUNCHERS = {
    "horovod": ("HOROVOD_SIZE", "horovodrun -np {0} --gloo python {1}, or mpirun -np {0} python {1} if Horovod was "
                "built with MPI"),
    "mpi4py": ("OMPI_COMM_WORLD_SIZE", "mpirun -np {0} python {1}"),
}
# The process counts of launchers that are not supported: MPICH and Intel MPI, MVAPICH2, jsrun
FOREIGN = ("PMI_SIZE", "MV2_COMM_WORLD_SIZE", "JSM_NAMESPACE_SIZE")


def adopt(environ: Mapping[str, str]) -> tuple[str, dict[str, str]] | None:
    """Return the launcher that started this process without RANK ("python" for a single task) and the variables that it
    implies, or None. Raises UserError if a launcher of several processes does not say which rank this is."""
    refuse_pod(environ)
    # MPI comes before Slurm, because mpirun's daemons may be Slurm tasks; and before PMI_SIZE, which srun sets too
    if found := _adopt_mpi(environ) or adopt_slurm(environ):
        return found
    for name in FOREIGN:
        if (count(environ, name) or 1) > 1:
            raise UserError(
                f"{name}={environ[name]} but RANK is not set: that launcher is not supported. Start with {TORCHRUN}."
            )
    # An Indexed Job does not tell its pods how many pods there are. A TrainJob with PET_NNODES=1 has only one
    if (index := environ.get("JOB_COMPLETION_INDEX")) and environ.get("PET_NNODES") != "1":
        if "WORLD_SIZE" in environ:
            return "kubernetes", {"RANK": index}
        raise UserError(
            f"JOB_COMPLETION_INDEX={index} but WORLD_SIZE is not set: each pod would train alone. Set WORLD_SIZE, "
            "MASTER_ADDR and MASTER_PORT as k8s/job.yaml does. If each pod should train alone, give launch --nnodes 1 "
            "or unset JOB_COMPLETION_INDEX."
        )
    return None


def count(
    environ: Mapping[str, str], name: str, *, least: int = 0, most: int = 10**18, hint: str = WHO_SETS_THEM
) -> int | None:
    """Return the number in a variable, or None if it is empty. Raises UserError for other text and out of bounds."""
    if not (text := environ.get(name)):
        return None
    if not re.fullmatch(r"[0-9]{1,18}", text) or not least <= int(text) <= most:
        rule = f"from {least} to {most}" if most < 10**18 else f">= {least}"
        raise UserError(f"{name} must be a whole number {rule}, got {text!r}. {hint}")
    return int(text)


# Slurm: inside a step the number of a task is a rank; in a batch shell it is not --------------------------------------


def task_number(environ: Mapping[str, str]) -> int | None:
    """Return the number of the step in which this process is a task, or None if it is in no step."""
    step = count(environ, "SLURM_STEP_ID")
    return step if step is not None and step < FIRST_SPECIAL_STEP else None


def adopt_slurm(environ: Mapping[str, str]) -> tuple[str, dict[str, str]] | None:
    """Like `adopt`, for Slurm. Raises UserError in the batch shell of several tasks: its SLURM_PROCID=0 is no rank."""
    step, nodes, tasks = task_number(environ), count(environ, "SLURM_NNODES"), count(environ, "SLURM_NTASKS")
    if step is not None:  # a step may have fewer tasks and nodes than its job
        tasks, nodes = count(environ, "SLURM_STEP_NUM_TASKS"), count(environ, "SLURM_STEP_NUM_NODES")
    elif tasks is None and nodes is not None:
        tasks = nodes * (count(environ, "SLURM_NTASKS_PER_NODE") or 1)
    if tasks is None:
        return None
    if tasks == 1:
        # A batch script may export MASTER_ADDR and MASTER_PORT even for one task
        return None if {"LOCAL_RANK", "WORLD_SIZE"} & environ.keys() else ("python", {})
    if step is None:
        raise UserError(
            f"Slurm gave this job {tasks} tasks, but this process is not one of them (no SLURM_STEP_ID: a batch "
            "or salloc shell). Start with `rankup launch`, which uses all nodes, or with srun; for a single process: "
            "srun -n 1."
        )
    names = {"RANK": "SLURM_PROCID", "LOCAL_RANK": "SLURM_LOCALID", "WORLD_SIZE": "SLURM_STEP_NUM_TASKS"}
    found = {name: environ[own] for name, own in names.items() if own in environ}
    # Slurm writes "4" or "4(x2)" if all nodes have the same number of tasks
    if share := re.fullmatch(r"([0-9]+)(\(x[0-9]+\))?", environ.get("SLURM_STEP_TASKS_PER_NODE", "")):
        found["LOCAL_WORLD_SIZE"] = share[1]
    if nodes == 1:
        found["MASTER_ADDR"] = "127.0.0.1"  # a container may not resolve its host's name
    elif hosts := environ.get("SLURM_STEP_NODELIST"):
        # "n[08-11,20],m05" -> n08. Slurm's own command, scontrol, does not exist inside containers
        found["MASTER_ADDR"] = re.sub(r"\[([0-9]+)[^\]]*\]", r"\1", hosts).partition(",")[0]
    # SLURM_JOB_ID differs for each task of an array. The array's id does not
    if (job_id := count(environ, "SLURM_JOB_ID")) is not None:
        restart = count(environ, "SLURM_RESTART_COUNT") or 0
        found["MASTER_PORT"] = str(port_for(job_id, restart=restart, step=step))
    return "slurm", found


def as_scheduled_task(
    environ: Mapping[str, str], *, rank: int, local: int, size: int, local_size: int
) -> dict[str, str]:
    """Return the variables that srun would set for this rank if it had started it: some scripts read their rank there.
    {} outside a job of Slurm. An agent is one task itself, so all its ranks would inherit that task's number."""
    if "SLURM_JOB_ID" not in environ:
        return {}
    each = f"{local_size}(x{size // local_size})" if size > local_size else str(local_size)
    numbers = {"PROCID": rank, "LOCALID": local, "NTASKS": size, "NPROCS": size, "STEP_NUM_TASKS": size,
               "NTASKS_PER_NODE": local_size, "TASKS_PER_NODE": each, "STEP_TASKS_PER_NODE": each}
    return {f"SLURM_{name}": str(value) for name, value in numbers.items()}


# mpirun and horovodrun ------------------------------------------------------------------------------------------------


def must_be_started_by(package: str, environ: Mapping[str, str], *, world_size: int, script: str) -> None:
    """Raise UserError if the ranks of a script that imports `package`, of OWN_LAUNCHERS, would not find each other."""
    variable, line = OWN_LAUNCHERS[package]
    given = environ.get(variable, "")
    if package == "horovod":
        may_meet = environ.get("HOROVOD_CONTROLLER") == "mpi"
    else:  # srun may have started an agent for each rank, as MPI's rank
        may_meet = "PMI_RANK" in environ or "PMIX_RANK" in environ
    if given != str(world_size) and not may_meet:
        raise UserError(
            f"{script}: {variable} must be {world_size} to import {package}, got {given or 'nothing'}: each rank would "
            f"train alone. Start the script itself: {line.format(world_size, script)}."
        )


def by_mpi(environ: Mapping[str, str]) -> bool:
    """Return whether mpirun or horovodrun started this process as one of several."""
    return any((count(environ, f"{prefix}SIZE") or 1) > 1 for _, prefix, _, _ in BY_PREFIX)


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
    """Raise UserError in one of several pods if RANK is not set. Trainer v2, elastic jobs and Workers without a Master
    set only PET_*, which only torchrun reads."""
    shown = {name: environ[name] for name in ("PET_NNODES", "PET_NPROC_PER_NODE") if environ.get(name)}
    if "RANK" not in environ and not {*shown.values()} <= {"1", "1:1", "auto", "gpu", "cpu"}:
        raise UserError(
            f"{' '.join(f'{name}={text}' for name, text in shown.items())} but RANK is not set: plain python would "
            f"train alone in every pod. Kubeflow sets PET_* for torchrun: start with {TORCHRUN}."
        )


def count_pods(environ: Mapping[str, str], *, node_rank: int | None) -> tuple[Mapping[str, str], int | None]:
    """Prepare `environ` for an agent: RANK and WORLD_SIZE count pods in the result. Also returns the ranks per pod, or
    None if Kubeflow does not set them. `node_rank`: the option. Raises UserError if the pod's number is unknown."""
    nodes, per_pod = environ.get("PET_NNODES"), environ.get("PET_NPROC_PER_NODE", "")
    if nodes is None:
        return environ, None
    left = {name: value for name, value in environ.items() if not name.startswith("PET_")}
    if "PET_NODE_RANK" in environ:
        # PyTorchJob sets the address with and without PET_, Trainer v2 only with it
        left |= {name: environ[f"PET_{name}"] for name in ("MASTER_ADDR", "MASTER_PORT") if f"PET_{name}" in environ}
        left |= {"RANK": environ["PET_NODE_RANK"], "WORLD_SIZE": nodes}
    elif node_rank is None and nodes != "1":
        refuse_pod(environ)
    # torchrun also takes auto, gpu and cpu, which are no numbers
    return left, int(per_pod) if re.fullmatch(r"[1-9][0-9]{0,6}", per_pod) else None


# Ports ----------------------------------------------------------------------------------------------------------------

# The default of torchrun too. Nodes that are started by hand must use the same port before they can talk to each other
PORT_OF_LAUNCH = 29400
# Between common services of cluster nodes (16443, 23456), above the ports that need root, and below those that Linux
# gives to outgoing connections
_PORTS = range(16500, 23400)


def port_for(job_id: int, *, restart: int = 0, step: int = 0) -> int:
    """Return a port for rank 0 that is the same on every node of a job. Jobs whose ids are less than 6900 apart get
    different ports. So do a job's restarts, because an earlier attempt may still hold its port."""
    # Prime factors give neighbouring jobs, restarts and steps different ports
    return _PORTS[(job_id + 7919 * restart + 3571 * step) % len(_PORTS)]


def free_port() -> int:
    """Return a port of this machine on which nothing listens now. Raises OSError if 100 random ports are all in use."""
    for port in random.Random().sample(_PORTS, 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    raise OSError(f"no free port among {_PORTS}")


class ProgressEndpoint(NamedTuple):
    """Where a TrainJob of Kubeflow takes reports: an address, and files with a certificate and a token."""

    url: str
    ca_cert: str
    token: str

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> "ProgressEndpoint | None":
        """Return the endpoint that Kubeflow Trainer has set for this pod, or None."""
        values = [environ.get(f"KUBEFLOW_TRAINER_STATUS_{name}", "") for name in ("URL", "CA_CERT", "TOKEN")]
        return cls(*values) if values[0] and values[2] else None
