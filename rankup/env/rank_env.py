"""Who this rank is: the environment of whichever launcher started it becomes a RankEnv or is refused. No torch here.

A complete set (RANK WORLD_SIZE MASTER_ADDR MASTER_PORT, and LOCAL_RANK, 0 by default) starts that rank. Nothing set
starts one process. Without RANK, a launcher's own variables count if they certainly mean a rank. Setting only some of
them is an error: otherwise a job could train alone on every node and report success.
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
from rankup.env.launchers import FIVE, WHO_SETS_THEM, count
from rankup.errors import UserError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RankEnv:
    """Who this process is and where its group meets; by default one process that no launcher started."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int | None = 1  # None where the launcher does not say
    master_addr: str = "127.0.0.1"
    master_port: int = 0  # 0 only for a single process, which listens nowhere, and with `file`
    launcher: str = "python"  # or "environment" (by hand), or the one that was recognised
    run_name: str | None = None  # named by the scheduler's job, so that a requeued job resumes the same run
    restart_count: int = 0  # restarts by torchrun or our agents; the requeues of a scheduler are not among them
    agent: Mapping[str, Any] | None = None  # how this rank reaches its agent, and what that says of the others
    agent_store: bool = False  # an agent already listens on master_port: rank 0 connects to it like the others
    file: str = ""  # where rank 0 writes its address, in place of master_addr and master_port
    attempt: str = ""  # the id of this attempt where an agent gave one: it looks for it in status.json
    start: str = ""  # names a start whose containers an engine restarts by itself

    @property
    def distributed(self) -> bool:
        """Was a rank given? A complete set with WORLD_SIZE=1 is a group of one, and True."""
        return self.launcher != "python"


# Reading -------------------------------------------------------------------------------------------------------------


def read_rank_env(environ: Mapping[str, str]) -> RankEnv:
    """Who is this process? Raises UserError where the environment does not say."""
    given = {name: environ[name] for name in (*FIVE, "LOCAL_WORLD_SIZE", "RANKUP_FILE") if name in environ}
    if "RANKUP_AGENT" in environ:  # its ranks inherit what is left of an earlier torchrun in the shell
        launcher, values = "launch", given
    elif "RANK" in environ:
        by_torchrun = {"TORCHELASTIC_RUN_ID", "GROUP_WORLD_SIZE"} <= environ.keys()
        launcher, values = "torchrun" if by_torchrun else "environment", given
    elif found := launchers.adopt(environ):
        launcher, derived = found
        where = {name: text for name, text in given.items() if name.startswith("MASTER_")}
        values = {**given, **derived, **where}
    else:  # half a set is no single process: the check names what is missing
        launcher, values = "environment" if given else "python", given
    more = _checked(values) if launcher != "python" else {}
    if agent := json.loads(environ.get("RANKUP_AGENT", "null")):
        job, restarts = agent["commit"]["job"], agent["commit"]["restarts"]
        more |= {"agent": agent, "agent_store": True, "restart_count": restarts, "attempt": f"{job}-{restarts}"}
    elif launcher == "torchrun":
        more["restart_count"] = int(environ.get("TORCHELASTIC_RESTART_COUNT", 0))
        more["agent_store"] = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return RankEnv(launcher=launcher, run_name=_run_name(environ), start=environ.get("RANKUP_START", ""), **more)


def _run_name(environ: Mapping[str, str]) -> str | None:
    """The number of Slurm's job, which a requeue keeps; in an array the array's number and the task's."""
    if index := environ.get("SLURM_ARRAY_TASK_ID"):
        return f"slurm-{environ.get('SLURM_ARRAY_JOB_ID')}_{index}"
    return f"slurm-{environ['SLURM_JOB_ID']}" if environ.get("SLURM_JOB_ID") else None


def _checked(values: Mapping[str, str]) -> dict[str, Any]:
    """The fields of RankEnv. Raises UserError for what is missing, and for what can't be."""
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
        "rank": count(values, "RANK", most=world_size - 1), "world_size": world_size,
        # torchrun sets LOCAL_RANK per process; PyTorchJob, which sets RANK per pod, does not
        "local_rank": count(values, "LOCAL_RANK") or 0,
        "local_world_size": count(values, "LOCAL_WORLD_SIZE", least=1), "master_addr": address,
        "master_port": count(values, "MASTER_PORT", least=1, most=65535) or 0, "file": values.get("RANKUP_FILE", ""),
    }


def with_options(
    environ: Mapping[str, str], *, init_method: str = "", rank: int | None = None, world_size: int | None = None
) -> Mapping[str, str]:
    """`environ` and the variables that these options stand for. Raises UserError for a URL of another kind, and where
    a variable is set already."""
    if world_size is not None and rank is None:  # a launcher's own count would win, and nobody would notice
        raise UserError(f"--world-size must come with --rank, got {world_size} alone.")
    told = _parse_url(init_method) if init_method else {}
    told |= {name: str(value) for name, value in (("RANK", rank), ("WORLD_SIZE", world_size)) if value is not None}
    for name in told:
        if name in environ:
            raise UserError(
                f"--init-method, --rank, --world-size must be left out where {name}={environ[name]} is set. Keep one."
            )
    return {**environ, **told}


def _parse_url(url: str) -> dict[str, str]:
    """With `file:///path` rank 0 opens a free port and writes its address into that file, which is removed once all
    have met: torch's own file store waits without end where an earlier run left a file."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme == "file" and not parts.netloc and parts.path.strip("/"):
        path = Path(urllib.parse.unquote(parts.path))
        if not path.parent.is_dir() or path.is_dir():
            raise UserError(f"--init-method must name a file in a folder that exists and all ranks see, got {path}.")
        return {"RANKUP_FILE": str(path)}
    address = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[^\[\]:/@]+):([0-9]+)/?", parts.netloc + parts.path)
    if parts.scheme == "tcp" and address and not parts.query:
        return {"MASTER_ADDR": address[1].strip("[]"), "MASTER_PORT": address[2]}
    raise UserError(f"--init-method must be tcp://HOST:PORT or file:///PATH, got {url}. For env:// leave it out.")


def cache_folder() -> str:
    """Where the user wants downloads to be kept, or an empty string."""
    return os.environ.get("RANKUP_CACHE", "")


# In words ------------------------------------------------------------------------------------------------------------


def describe(env: RankEnv) -> str:
    """One line: which rank this is, where the group meets, and who started it."""
    if not env.distributed:
        return "rank 0 of 1: a single process, because no launcher gave a rank"
    local = f"local {env.local_rank}" + (f" of {env.local_world_size}" if env.local_world_size else "")
    host = f"[{env.master_addr}]" if ":" in env.master_addr else env.master_addr
    meets = f"meeting by {env.file}" if env.file else f"master {host}:{env.master_port}"
    return f"rank {env.rank} of {env.world_size} ({local}), {meets}; from {env.launcher}"


def ranges(numbers: Iterable[int]) -> str:
    """[0, 1, 2, 4, 6, 7] -> "0-2, 4, 6-7"."""
    # In a range each number is as far from its place among all as the one before it
    parts = [[number for _, number in part]
             for _, part in groupby(enumerate(sorted(numbers)), key=lambda placed: placed[1] - placed[0])]
    return ", ".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)


def holders(pairs: Iterable[tuple[int, T]]) -> dict[T, list[int]]:
    """Of ranks and what they have: which ranks have each value."""
    found: dict[T, list[int]] = {}
    for rank, value in pairs:
        found.setdefault(value, []).append(rank)
    return found


def is_loopback(host: str) -> bool:
    """Whether this name or address means "this machine" on every machine."""
    ip = _ip(host)
    return host.lower() in ("localhost", "ip6-localhost") if ip is None else ip.is_loopback or ip.is_unspecified


def _ip(host: str) -> "ipaddress.IPv4Address | ipaddress.IPv6Address | None":
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host)
    return None
