"""What launchers other than Slurm say of a rank: torchrun's agent, Kubeflow's operator, mpirun and horovodrun.

`Variables` is RANK and its companions as strings, and who set each, before they are checked.
"""

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from rankup.env.addresses import port_for
from rankup.errors import LaunchError

FIVE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
NAMES = (*FIVE, "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
TORCHRUN = "torchrun -m train.main train ..."
KUBEFLOW_HINT = "kubectl get pods shows which pod is Pending or waits for its image; kubectl describe pod says why."
# Variables that count the processes of launchers whose ranks we do not adopt
FOREIGN = {
    "PMI_SIZE": "mpiexec (MPICH, Intel MPI)", "MV2_COMM_WORLD_SIZE": "mpirun (MVAPICH2)", "JSM_NAMESPACE_SIZE": "jsrun",
}


@dataclass(slots=True)
class Variables:
    """What `launcher` gave, and what is derived from it. `hint`: where to look for ranks that are missing."""

    launcher: str
    values: dict[str, str] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)  # variable -> who set it
    warnings: list[str] = field(default_factory=list)
    hint: str = ""

    def add(self, name: str, value: object, origin: str) -> None:
        """Set `name` unless it is set: an explicit value beats a derived one. None sets nothing."""
        if value is not None and name not in self.values:
            self.values[name], self.origins[name] = str(value), origin

    def adopt(self, environ: Mapping[str, str], names: Mapping[str, str], origin: str) -> None:
        """Take each variable (key) from the launcher's own one (value).

        Raises LaunchError where an explicit value contradicts it: two launchers are mixed.
        """
        for name, theirs in names.items():
            if theirs in environ and self.values.get(name, environ[theirs]) != environ[theirs]:
                raise LaunchError(
                    f"{name}={self.values[name]} but {theirs}={environ[theirs]}, and RANK is not set: two launchers "
                    f"are mixed. Unset {name}, or set {' '.join(FIVE)} all."
                )
            self.add(name, environ.get(theirs), origin)


def given(environ: Mapping[str, str], launcher: str, names: tuple[str, ...] = FIVE) -> Variables:
    """Those of `names` that are set already."""
    values = {name: environ[name] for name in names if name in environ}
    return Variables(launcher, values, dict.fromkeys(values, "environment"))


def count(environ: Mapping[str, str], *names: str) -> int | None:
    """The number in the first of `names` that is set and not empty. Raises LaunchError if it is not a number."""
    for name in names:
        if text := environ.get(name):
            if not re.fullmatch(r"[0-9]{1,18}", text):
                raise LaunchError(f"{name} must be a whole number, got {text!r}. Leave it to the scheduler.")
            return int(text)
    return None


# mpirun and horovodrun ------------------------------------------------------------------------------------------------


def adopt_mpi(environ: Mapping[str, str]) -> Variables | None:
    """The rank that horovodrun or mpirun gives. horovodrun may run inside mpirun, so it is asked first.

    Raises LaunchError on several nodes without MASTER_ADDR: neither says where rank 0 is.
    """
    # The job is a variable that has another value in each start
    of_mpi = "PMIX_NAMESPACE" if environ.get("PMIX_NAMESPACE") else "OMPI_MCA_ess_base_jobid"
    for launcher, title, prefix, job, way_out, hint in (
        ("horovodrun", "horovodrun", "HOROVOD_", "HOROVOD_GLOO_RENDEZVOUS_PORT",
         "Set MASTER_ADDR=<rank 0's host> and MASTER_PORT=<a free port> before it.", ""),
        ("open mpi", "Open MPI", "OMPI_COMM_WORLD_", of_mpi,
         "Give mpirun -x MASTER_ADDR=<rank 0's host> -x MASTER_PORT=<a free port>.",
         "mpirun has to start all ranks at once; its -x passes MASTER_ADDR and MASTER_PORT on."),
    ):
        size = count(environ, f"{prefix}SIZE")
        if size is None or size == 1:
            continue
        found = given(environ, launcher)
        found.hint = hint
        theirs = {"RANK": "RANK", "LOCAL_RANK": "LOCAL_RANK", "WORLD_SIZE": "SIZE", "LOCAL_WORLD_SIZE": "LOCAL_SIZE"}
        found.adopt(environ, {ours: prefix + name for ours, name in theirs.items()}, title)
        if found.values.get("LOCAL_WORLD_SIZE") == str(size):
            found.add("MASTER_ADDR", "127.0.0.1", f"{title} (one node)")
        elif "MASTER_ADDR" not in found.values:
            raise LaunchError(
                f"{prefix}SIZE={size} on several nodes, but {title} does not say where rank 0 is. {way_out}"
            )
        if environ.get(job):
            found.add("MASTER_PORT", port_for(zlib.crc32(environ[job].encode())), f"derived from {job}")
        return found
    return None


def refuse_foreign(environ: Mapping[str, str]) -> None:
    """Raise LaunchError below a launcher of several processes whose ranks we can't read."""
    for name, who in FOREIGN.items():
        if (count(environ, name) or 1) > 1:
            raise LaunchError(
                f"{name}={environ[name]} but RANK is not set: {who} is not supported. Start with {TORCHRUN}."
            )


# Kubeflow: the operator counts pods, and sets PET_*, which are torchrun's defaults ------------------------------------


def refuse_pod(environ: Mapping[str, str]) -> None:
    """Raise LaunchError in one pod of several: RANK is not set, so that each would train alone.

    Trainer v2, elastic jobs and Workers without a Master set PET_* and no RANK: only torchrun can read those.
    """
    nodes, per_node = environ.get("PET_NNODES", ""), environ.get("PET_NPROC_PER_NODE", "")
    if nodes and not re.fullmatch(r"[0-9]+(:[0-9]+)?", nodes):
        raise LaunchError(f"PET_NNODES must be a count or least:most, got {nodes!r}. Leave it to Kubeflow.")
    if int(nodes.split(":")[-1] or 1) > 1 or (per_node.isdecimal() and int(per_node) > 1):
        names = [name for name in ("PET_NNODES", "PET_NPROC_PER_NODE") if environ.get(name)]
        raise LaunchError(
            f"{' '.join(f'{name}={environ[name]}' for name in names)} but RANK is not set: plain python would "
            f"train alone in every pod. Kubeflow sets PET_* for torchrun: let the command be {TORCHRUN}."
        )


def complete_pod(environ: Mapping[str, str], found: Variables) -> None:
    """PyTorchJob: RANK counts pods, WORLD_SIZE counts processes. They agree only with one process in each pod."""
    per_pod = environ.get("PET_NPROC_PER_NODE", "")
    if not per_pod or "LOCAL_RANK" in environ:
        return  # not in a pod of Kubeflow's, or below torchrun there
    if per_pod.isdecimal() and int(per_pod) > 1:
        raise LaunchError(
            f"RANK={environ['RANK']} counts pods but WORLD_SIZE={environ.get('WORLD_SIZE', '')} counts processes, "
            f'since PET_NPROC_PER_NODE={per_pod}. Let the command be {TORCHRUN}, or set nprocPerNode: "1".'
        )
    if environ.get("PET_NODE_RANK") == environ["RANK"]:
        found.origins = dict.fromkeys(found.values, "PyTorchJob operator (PET_*)")
        found.hint = KUBEFLOW_HINT
        # Not PET_NNODES: with an elasticPolicy it counts the Workers alone
        nodes = environ.get("WORLD_SIZE")
        for name, value in (("LOCAL_WORLD_SIZE", 1), ("GROUP_RANK", environ["RANK"]), ("GROUP_WORLD_SIZE", nodes)):
            found.add(name, value, "one process a pod")


def warnings_alone(environ: Mapping[str, str]) -> list[str]:
    """No launcher gave a rank: warnings for somebody who expected more than one process."""
    if "PET_NPROC_PER_NODE" in environ:
        return [
            f"PET_NPROC_PER_NODE={environ['PET_NPROC_PER_NODE']} is for torchrun, and this is one process. "
            f"For one process a device let the command be {TORCHRUN}."
        ]
    if "JOB_COMPLETION_INDEX" in environ:
        return [
            f"JOB_COMPLETION_INDEX={environ['JOB_COMPLETION_INDEX']} but RANK is not set: this pod trains alone. "
            "k8s/job.yaml shows how an Indexed Job supplies RANK and WORLD_SIZE."
        ]
    return []


def count_pods(environ: Mapping[str, str], *, num_nodes: int | None) -> tuple[Mapping[str, str], int | None]:
    """For an agent in a pod: `environ` where RANK and WORLD_SIZE count pods, and the ranks of a pod if Kubeflow says.

    Outside of Kubeflow's pods `environ` itself. `num_nodes`: what an option says. Raises LaunchError where pods come
    and go, where nobody says which pod this is, and where WORLD_SIZE is another's.
    """
    nodes, per_pod = environ.get("PET_NNODES"), environ.get("PET_NPROC_PER_NODE", "")
    if nodes is None or "LOCAL_RANK" in environ:
        return environ, None
    if ":" in nodes:
        raise LaunchError(f"PET_NNODES={nodes} may change, which launch can't follow. Use {TORCHRUN}.")
    nproc = int(per_pod) if re.fullmatch(r"[1-9][0-9]{0,6}", per_pod) else None  # auto, gpu and cpu are torchrun's
    left = {name: value for name, value in environ.items() if not name.startswith("PET_")}
    if "PET_NODE_RANK" in environ:
        # PyTorchJob sets the same address twice; Trainer v2 only its own
        ours = {name: environ.get(f"PET_{name}", left.get(name)) for name in ("MASTER_ADDR", "MASTER_PORT")}
        known = {**ours, "RANK": environ["PET_NODE_RANK"], "WORLD_SIZE": nodes}
        processes = str(int(nodes) * (nproc or 1)) if nodes.isdecimal() else nodes
        for name, value in (("RANK", known["RANK"]), ("WORLD_SIZE", processes)):
            if environ.get(name, value) != value:
                raise LaunchError(
                    f"{name} must be {value}, as PET_NODE_RANK={known['RANK']} PET_NNODES={nodes} "
                    f"PET_NPROC_PER_NODE={per_pod} say, got {environ[name]}. Leave it to Kubeflow."
                )
        left |= {name: value for name, value in known.items() if value is not None}
    elif "RANK" not in environ and num_nodes is None and nodes != "1":
        refuse_pod(environ)
    return left, nproc
