"""Kubeflow's variables: the operator counts pods, and sets PET_*, which are torchrun's defaults."""

import re
from collections.abc import Mapping

from rankup.env.variables import FIVE, TORCHRUN, Variables
from rankup.errors import LaunchError

HINT = "kubectl get pods shows which pod is Pending or waits for its image; kubectl describe pod says why."


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


def complete(environ: Mapping[str, str], found: Variables) -> None:
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
        found.add("LOCAL_WORLD_SIZE", 1, "one process a pod")
        found.add("GROUP_RANK", environ["RANK"], "one process a pod")
        # Not PET_NNODES: with an elasticPolicy it counts the Workers alone
        found.add("GROUP_WORLD_SIZE", environ.get("WORLD_SIZE"), "one process a pod")
        found.hint = HINT


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


def outside_pod(environ: Mapping[str, str], *, num_nodes: int, nproc: int) -> Mapping[str, str]:
    """For `launch` in a pod of Kubeflow's: `environ` without PET_* and the five variables.

    They describe pods, and the ranks that `launch` starts get their own. Raises LaunchError where the flags of
    `launch` differ from Kubeflow's counts: every pod would train alone and report success.
    """
    if "PET_NNODES" not in environ or "LOCAL_RANK" in environ:
        return environ
    for flag, name, value in (("--nnodes", "PET_NNODES", num_nodes), ("--nproc", "PET_NPROC_PER_NODE", nproc)):
        if environ.get(name, "").isdecimal() and int(environ[name]) != value:
            raise LaunchError(
                f"{flag} must be what Kubeflow gives, {name}={environ[name]}, got {value}. Set {flag}=$({name})."
            )
    if ":" in environ["PET_NNODES"]:
        raise LaunchError(f"PET_NNODES={environ['PET_NNODES']} may change, which launch can't follow. Use {TORCHRUN}.")
    return {name: value for name, value in environ.items() if not name.startswith("PET_") and name not in FIVE}


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
