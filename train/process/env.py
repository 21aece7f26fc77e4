"""The environment variables of whichever launcher started us, read into a Launch or refused. No torch here.

A complete set (RANK WORLD_SIZE MASTER_ADDR MASTER_PORT, and LOCAL_RANK, 0 by default) starts that rank; nothing set
starts one process. Without RANK, what a launcher sets is adopted where it certainly means a rank. Anything between is
refused: the alternative is a job that trains alone on every node and reports success.
"""

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from train.errors import LaunchError
from train.process.addresses import ephemeral_range
from train.process.launchers import LAUNCHERS
from train.process.launchers.kubeflow import outside_pod
from train.process.launchers.launcher import given
from train.process.placement import FIVE, NAMES, Found, Launch, check, check_loopback, describe, how_to_start

__all__ = ["Launch", "cache_folder", "check_loopback", "describe", "how_to_start", "outside_pod", "read_env"]

WHO_SETS_THEM = (
    "torchrun, `python -m train.main launch` and PyTorchJob set them; on Slurm start with srun and slurm/task.sh."
)


def read_env(environ: Mapping[str, str]) -> Launch:
    """Who is this process? `environ` is os.environ or a test's mapping.

    Beside it only /proc's port range and the parent's process id are read. Raises LaunchError with every mistake, one
    on a line.
    """
    run_name = next(filter(None, (launcher.run_name(environ) for launcher in LAUNCHERS)), None)
    found = _explicit(environ) if "RANK" in environ else _adopted(environ)
    ours = _ours(environ, found)
    if found.launcher == "python":
        return Launch(run_name=run_name, warnings=tuple(found.warnings), **ours)
    launch = replace(check(found, run_name, who_sets_them=WHO_SETS_THEM), file=environ.get("RANKUP_FILE", ""), **ours)
    ports = ephemeral_range()
    if not launch.file and launch.origins["MASTER_PORT"] == "environment" and launch.master_port in ports:
        warning = (
            f"MASTER_PORT={launch.master_port} is one of this machine's ports for outgoing connections "
            f"({ports.start}-{ports.stop - 1}) and may be taken at any moment. Choose one below {ports.start}."
        )
        launch = replace(launch, warnings=(*launch.warnings, warning))
    return launch


def without_launcher(environ: Mapping[str, str]) -> Mapping[str, str]:
    """What is left of `environ` for a process that shall be no rank, but still ends with its parent."""
    return {name: environ[name] for name in ("RANKUP_PARENT",) if name in environ}


def cache_folder() -> str:
    """Where the user wants downloads to be kept, or an empty string."""
    return os.environ.get("RANKUP_CACHE", "")


def _ours(environ: Mapping[str, str], found: Found) -> dict[str, Any]:
    """The fields of Launch that our own launch files and torch's agent say beside the rank."""
    fields: dict[str, Any] = {
        "attempt": environ.get("RANKUP_ATTEMPT", ""),
        "start": environ.get("RANKUP_START", ""),
        "parent_pid": int(environ["RANKUP_PARENT"]) if environ.get("RANKUP_PARENT") else found.parent_pid,
    }
    restarts = environ.get("RANKUP_RESTART", "0")
    ended = environ.get("RANKUP_ENDED", "")
    fields["predecessor"] = int(ended) if ended.isdecimal() else None
    fields["progress"] = environ.get("RANKUP_PROGRESS", "")
    most = environ.get("RANKUP_MAX_RESTARTS", "0")
    fields["max_restarts"] = int(most) if most.isdecimal() else 0
    # By our own supervisor, which numbers the restarts of a rank
    fields["numbers_attempts"] = bool(environ.get("RANKUP_ATTEMPT")) and "RANKUP_RESTART" in environ
    if found.launcher == "torchrun":
        restarts = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        fields["agent_store"] = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    fields["restart_count"] = int(restarts) if restarts.isdecimal() else 0
    return fields


def _explicit(environ: Mapping[str, str]) -> Found:
    """RANK is set: the environment's values and nobody else's, apart from what launchers add about this node."""
    found = given(environ, "environment", NAMES)
    # `launch` goes first: its ranks inherit what is left of an earlier torchrun in the shell
    if environ.get("RANKUP_LAUNCH"):
        found.launcher = "launch"
    elif "TORCHELASTIC_RUN_ID" in environ:
        found.launcher = "torchrun"
        found.parent_pid = os.getppid()  # a torchrun that is killed leaves its workers running
    if found.launcher != "environment":
        found.hint = (
            f"Start {'`launch`' if found.launcher == 'launch' else 'torchrun'} on every node with the same --nnodes, "
            "--master-addr and --master-port, and --node-rank 0, 1, ..."
        )
        found.origins = dict.fromkeys(found.values, found.launcher)
        if "GROUP_WORLD_SIZE" not in environ:
            found.warnings.append(
                "TORCHELASTIC_RUN_ID is set but GROUP_WORLD_SIZE is not: left over from another torchrun? Unset it."
            )
    for launcher in LAUNCHERS:
        launcher.complete(environ, found)
    return found


def _adopted(environ: Mapping[str, str]) -> Found:
    """RANK is not set: what the first launcher says that started us, or one process unless half a set is there."""
    for launcher in LAUNCHERS:
        if (adopted := launcher.adopt(environ)) is not None:
            return adopted
    found = given(environ, "environment", (*FIVE, "LOCAL_WORLD_SIZE"))
    if found.values and "RANKUP_FILE" in environ:
        raise LaunchError(
            "--init-method must come with --rank and --world-size, or a launcher that gives them, got no rank."
        )
    if found.values:
        return found  # incomplete, as RANK is missing: the check names what else is
    found.launcher = "python"
    if "TORCHELASTIC_RUN_ID" in environ:
        found.warnings.append("TORCHELASTIC_RUN_ID is set but RANK is not: left over from another torchrun? Unset it.")
    for launcher in LAUNCHERS:
        found.warnings += launcher.warnings_alone(environ)
    return found
