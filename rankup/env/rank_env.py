"""Who this rank is: turns the environment of any launcher into a RankEnv, or refuses it. No torch here.

A complete set (RANK WORLD_SIZE MASTER_ADDR MASTER_PORT, and LOCAL_RANK, 0 by default) starts that rank. Nothing set
starts one process. Without RANK, a launcher's own variables count if they certainly mean a rank. Setting only some of
the five is an error: otherwise a job could train alone on every node and report success.
"""

import contextlib
import ipaddress
import json
import os
import re
import urllib.parse
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

from rankup.env import launchers
from rankup.env.launchers import FIVE, OF_A_JOB, WHO_SETS_THEM, count
from rankup.errors import UserError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RankEnv:
    """Who this process is and where its group meets; by default a single process that no launcher started."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int | None = 1  # None if the launcher does not set it
    master_addr: str = "127.0.0.1"
    master_port: int = 0  # 0 only for a single process, which does not listen, and with `file`
    launcher: str = "python"  # "environment" if the variables were set by hand, or the launcher's name
    run_name: str | None = None  # the scheduler's job names the run, so that a requeued job resumes the same run
    restart_count: int = 0  # restarts by torchrun or our agents, without the requeues of a scheduler
    agent: Mapping[str, Any] | None = None  # how this rank reaches its agent, and what the agent says of the run
    agent_store: bool = False  # an agent serves the store on master_port, so rank 0 connects like the other ranks
    file: str = ""  # the file in which rank 0 writes its address, in place of master_addr and master_port
    attempt: str = ""  # this attempt's id if an agent gave one; the agent looks for it in status.json
    start: str = ""  # the id of this launch, which all its attempts share; "" if no agent and no container gave one

    @property
    def distributed(self) -> bool:
        """Whether a launcher gave this process a rank. A complete set with WORLD_SIZE=1 is a group of one, so True."""
        return self.launcher != "python"


# Reading -------------------------------------------------------------------------------------------------------------


def read_rank_env(environ: Mapping[str, str]) -> RankEnv:
    """Read who this process is. Raises UserError if the environment describes neither a rank nor a single process."""
    given = {name: environ[name] for name in (*FIVE, "LOCAL_WORLD_SIZE", "RANKUP_FILE") if name in environ}
    if "RANKUP_AGENT" in environ:  # checked first: ranks may inherit variables of an earlier torchrun from the shell
        launcher, values = "launch", given
    elif "RANK" in environ:
        by_torchrun = {"TORCHELASTIC_RUN_ID", "GROUP_WORLD_SIZE"} <= environ.keys()
        launcher, values = "torchrun" if by_torchrun else "environment", given
    elif found := launchers.adopt(environ):
        launcher, derived = found
        where = {name: text for name, text in given.items() if name.startswith("MASTER_")}
        values = {**given, **derived, **where}
    else:  # a part of the five does not mean a single process: `_checked` names what is missing
        launcher, values = "environment" if given else "python", given
    in_job = values.get("RANK") == environ.get("JOB_COMPLETION_INDEX")
    more = _checked(values, hint=OF_A_JOB if in_job else WHO_SETS_THEM) if launcher != "python" else {}
    more["start"] = environ.get("RANKUP_START", "")  # in containers, which the engine restarts by itself
    if agent := json.loads(environ.get("RANKUP_AGENT", "null")):
        job, restarts = agent["job"], agent["restarts"]
        more |= {"agent": agent, "agent_store": True, "restart_count": restarts, "attempt": f"{job}-{restarts}",
                 "start": more["start"] or job}
    elif launcher == "torchrun":
        more["restart_count"] = int(environ.get("TORCHELASTIC_RESTART_COUNT", 0))
        more["agent_store"] = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return RankEnv(launcher=launcher, run_name=run_name(environ), **more)


def run_name(environ: Mapping[str, str], given: str = "") -> str | None:
    """Return `given`, or else a run name from the id of the Slurm job, which a requeue keeps. In an array each task has
    a run of its own: its number is a part of the name."""
    job, task = environ.get("SLURM_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    job = environ.get("SLURM_ARRAY_JOB_ID") if task else job
    name = given or (f"slurm-{job}" if job else None)
    return f"{name}_{task}" if task else name


def array_task(environ: Mapping[str, str]) -> int | None:
    """Return the number of this task in an array of Slurm jobs, or None outside of an array."""
    return count(environ, "SLURM_ARRAY_TASK_ID")


def _checked(values: Mapping[str, str], *, hint: str) -> dict[str, Any]:
    """Return the fields of RankEnv. Raises UserError for missing and for impossible values. `hint`: the way out if RANK
    does not fit WORLD_SIZE."""
    meets = () if values.get("RANKUP_FILE") else ("MASTER_ADDR", "MASTER_PORT")
    if missing := [name for name in ("RANK", "WORLD_SIZE", *meets) if not values.get(name)]:
        raise UserError(
            f"{' '.join(f'{name}={text!r}' for name, text in values.items())} but {' '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not set. {WHO_SETS_THEM} For a single process unset "
            f"{' '.join(values)}."
        )
    address = values.get("MASTER_ADDR") or "127.0.0.1"
    if _ip(address) is None and not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", address):
        raise UserError(f"MASTER_ADDR must be a host name or an address, without a port, got {address!r}.")
    world_size = count(values, "WORLD_SIZE", least=1) or 1
    return {
        "rank": count(values, "RANK", most=world_size - 1, hint=hint), "world_size": world_size,
        # torchrun sets LOCAL_RANK per process; PyTorchJob, which sets RANK per pod, does not
        "local_rank": count(values, "LOCAL_RANK") or 0,
        "local_world_size": count(values, "LOCAL_WORLD_SIZE", least=1), "master_addr": address,
        "master_port": count(values, "MASTER_PORT", least=1, most=65535) or 0, "file": values.get("RANKUP_FILE", ""),
    }


def with_options(
    environ: Mapping[str, str], *, init_method: str = "", rank: int | None = None, world_size: int | None = None
) -> Mapping[str, str]:
    """Return `environ` with the variables that these options stand for. Raises UserError for an unknown kind of URL,
    and if a variable is set already."""
    if world_size is not None and rank is None:  # a launcher's own count would silently override it
        raise UserError(f"--world-size must come with --rank, got {world_size} alone.")
    told = _parse_url(init_method) if init_method else {}
    told |= {name: str(value) for name, value in (("RANK", rank), ("WORLD_SIZE", world_size)) if value is not None}
    for name in told:
        if name in environ:
            raise UserError(
                f"--init-method, --rank, --world-size must be left out if {name}={environ[name]} is set. Keep one."
            )
    return {**environ, **told}


def _parse_url(url: str) -> dict[str, str]:
    """Return the variables that a URL stands for. For `file:///path` rank 0 opens a free port and writes its address
    into that file, until all have met: torch's own file store hangs if an earlier run left its file."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme == "file" and not parts.netloc and parts.path.strip("/"):
        path = Path(urllib.parse.unquote(parts.path))
        if not path.parent.is_dir() or path.is_dir():
            raise UserError(f"--init-method must name a file in an existing folder that all ranks see, got {path}.")
        return {"RANKUP_FILE": str(path)}
    address = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[^\[\]:/@]+):([0-9]+)/?", parts.netloc + parts.path)
    if parts.scheme == "tcp" and address and not parts.query:
        return {"MASTER_ADDR": address[1].strip("[]"), "MASTER_PORT": address[2]}
    raise UserError(f"--init-method must be tcp://HOST:PORT or file:///PATH, got {url}. For env:// leave it out.")


def cache_folder() -> str:
    """Return the folder in which the user wants to keep downloads, or an empty string."""
    return os.environ.get("RANKUP_CACHE", "")


# In words ------------------------------------------------------------------------------------------------------------


def describe(env: RankEnv) -> str:
    """Return one line that says which rank this is, where the group meets, and which launcher started it."""
    if not env.distributed:
        return "rank 0 of 1: a single process, because no launcher gave a rank"
    local = f"local {env.local_rank}" + (f" of {env.local_world_size}" if env.local_world_size else "")
    host = f"[{env.master_addr}]" if ":" in env.master_addr else env.master_addr
    meets = f"meeting through {env.file}" if env.file else f"master {host}:{env.master_port}"
    return f"rank {env.rank} of {env.world_size} ({local}), {meets}; from {env.launcher}"


def ranges(numbers: Iterable[int]) -> str:
    """Write numbers as ranges: [0, 1, 2, 4, 6, 7] -> "0-2, 4, 6-7"."""
    # Within a range, each number minus its index gives the same difference
    parts = [[number for _, number in part]
             for _, part in groupby(enumerate(sorted(numbers)), key=lambda placed: placed[1] - placed[0])]
    return ", ".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)


def holders(pairs: Iterable[tuple[int, T]]) -> dict[T, list[int]]:
    """Return which ranks have each value. `pairs`: each rank and its value."""
    found: dict[T, list[int]] = {}
    for rank, value in pairs:
        found.setdefault(value, []).append(rank)
    return found


def is_loopback(host: str) -> bool:
    """Return whether this name or address means "this machine" on every machine."""
    ip = _ip(host)
    return host.lower() in ("localhost", "ip6-localhost") if ip is None else ip.is_loopback or ip.is_unspecified


def _ip(host: str) -> "ipaddress.IPv4Address | ipaddress.IPv6Address | None":
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host)
    return None
