"""Who this rank is: the environment of whichever launcher started it becomes a RankEnv or is refused. No torch here.

A complete set (RANK WORLD_SIZE MASTER_ADDR MASTER_PORT, and LOCAL_RANK, 0 by default) starts that rank; nothing set
starts one process. Without RANK, what a launcher sets is adopted where it certainly means a rank. Anything between is
refused: the alternative is a job that trains alone on every node and reports success.
"""

import contextlib
import ipaddress
import json
import os
import re
import urllib.parse
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rankup.env import launchers
from rankup.env.launchers import FIVE
from rankup.errors import UserError

WHO_SETS_THEM = "torchrun, `rankup launch` and PyTorchJob set them; on Slurm start with srun and slurm/task.sh."
MANY = 10**18
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
    """Who is this process? Raises UserError with every mistake, one on a line."""
    given = {name: environ[name] for name in (*FIVE, "LOCAL_WORLD_SIZE") if name in environ}
    file = environ.get("RANKUP_FILE", "")
    if "RANK" in environ:
        launcher = who_set_rank(environ)
        # An agent has looked itself, and says all; in another membership its ranks are not as many as Slurm's tasks
        derived = launchers.complete(environ, launcher) if launcher != "launch" else {}
    else:  # half a set is no single process: the check names what is missing
        launcher, derived = launchers.adopt(environ) or ("environment" if given or file else "python", {})
    more: dict[str, Any] = {}
    if launcher != "python":
        more = {**_checked({**derived, **given}, launcher, file=file), "file": file}
    if agent := json.loads(environ.get("RANKUP_AGENT", "null")):
        job, restarts = agent["commit"]["job"], agent["commit"]["restarts"]
        more |= {"agent": agent, "agent_store": True, "restart_count": restarts, "attempt": f"{job}-{restarts}"}
    elif launcher == "torchrun":
        more["restart_count"] = int(environ.get("TORCHELASTIC_RESTART_COUNT", 0))
        more["agent_store"] = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return RankEnv(
        launcher=launcher, run_name=_run_name(environ), start=environ.get("RANKUP_START", ""), **more,
    )


def who_set_rank(environ: Mapping[str, str]) -> str:
    """RANK is set: by launch or torchrun, which start a process for each rank, or by somebody else (environment)."""
    # Its ranks inherit what is left of an earlier torchrun in the shell
    if "RANKUP_AGENT" in environ:
        return "launch"
    return "torchrun" if {"TORCHELASTIC_RUN_ID", "GROUP_WORLD_SIZE"} <= environ.keys() else "environment"


def _run_name(environ: Mapping[str, str]) -> str | None:
    """The number of Slurm's job, which a requeue keeps; in an array the array's number and the task's."""
    if index := environ.get("SLURM_ARRAY_TASK_ID"):
        return f"slurm-{environ.get('SLURM_ARRAY_JOB_ID')}_{index}"
    return f"slurm-{environ['SLURM_JOB_ID']}" if environ.get("SLURM_JOB_ID") else None


def _checked(values: dict[str, str], launcher: str, *, file: str) -> dict[str, Any]:
    """The fields of RankEnv. Raises UserError with all mistakes, one a line."""
    needed = ("RANK", "WORLD_SIZE") if file else ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if missing := [name for name in needed if name not in values]:
        shown = [f"{name}={text if re.fullmatch(r'[!-~]+', text) else repr(text)}" for name, text in values.items()]
        raise UserError(
            f"{' '.join(shown)} but {' '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set. "
            f"{WHO_SETS_THEM} For a single process unset {' '.join(values)}."
        )
    # torchrun sets LOCAL_RANK per process; PyTorchJob, which sets RANK per pod, does not
    values = {"LOCAL_RANK": "0", **values}
    numbers = {name: int(text) for name, text in values.items() if re.fullmatch(r"-?[0-9]{1,18}", text)}
    rank, world, local = (max(0, numbers.get(name, MANY)) for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    bounds = {
        "RANK": (0, world - 1), "LOCAL_RANK": (0, min(rank, local - 1)), "WORLD_SIZE": (1, MANY),
        "LOCAL_WORLD_SIZE": (1, world), "MASTER_PORT": (1, 65535),
    }
    if launcher == "launch":  # where other agents were lost, a rank keeps its GPU, whatever its new number
        bounds["LOCAL_RANK"] = bounds["LOCAL_WORLD_SIZE"] = (0, MANY)
    wrong = {
        name: f"a whole number from {least} to {most}".replace(f" from {least} to {MANY}", f" >= {least}")
        for name, (least, most) in bounds.items() if name in values and not least <= numbers.get(name, -1) <= most
    }
    address = values.get("MASTER_ADDR", "127.0.0.1")
    if _ip(address) is None and not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", address):
        wrong["MASTER_ADDR"] = "a host name or an address, without a port"
    if wrong:
        raise UserError("\n".join(
            f"{name} must be {rule}, got {values[name]!r} (from {launcher}). {WHO_SETS_THEM}"
            for name, rule in wrong.items()
        ))
    return {
        "rank": rank, "local_rank": numbers["LOCAL_RANK"], "world_size": world, "master_addr": address,
        "local_world_size": numbers.get("LOCAL_WORLD_SIZE"), "master_port": numbers.get("MASTER_PORT", 0),
    }


def with_options(
    environ: Mapping[str, str], *, init_method: str = "", rank: int | None = None, world_size: int | None = None
) -> Mapping[str, str]:
    """`environ` and the variables that these options stand for. Raises UserError for a URL of another kind, where an
    option repeats a variable that is set, and where only some are given and no launcher says the rest."""
    options = (
        ("--rank", "RANK", rank), ("--world-size", "WORLD_SIZE", world_size),
        ("--init-method", "MASTER_ADDR", init_method or None),
    )
    for flag, name, value in options:
        if value is not None and name in environ:
            raise UserError(
                f"{flag} must be left out where {name}={environ[name]} is set already, got {value}. Keep one."
            )
    counts = {name: str(value) for name, value in (("RANK", rank), ("WORLD_SIZE", world_size)) if value is not None}
    told = {**environ, **counts, **(_parse_url(init_method) if init_method else {})}
    missing = [flag for flag, name, value in options if value is None and name not in environ]
    is_given = any(value is not None for _, _, value in options)
    if missing and is_given and ("RANK" in told or launchers.adopt(told) is None):
        raise UserError(
            f"{' and '.join(missing)} must be given too, got nothing. A rank has --rank, --world-size and "
            "--init-method; a single process has none of them."
        )
    return told


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
        return "rank 0 of 1: a single process, as no launcher gave a rank"
    local = f"local {env.local_rank}" + (f" of {env.local_world_size}" if env.local_world_size else "")
    host = f"[{env.master_addr}]" if ":" in env.master_addr else env.master_addr
    meets = f"meeting by {env.file}" if env.file else f"master {host}:{env.master_port}"
    return f"rank {env.rank} of {env.world_size} ({local}), {meets}; from {env.launcher}"


def ranges(numbers: Iterable[int]) -> str:
    """[0, 1, 2, 4, 6, 7] -> "0-2, 4, 6-7"."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


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
