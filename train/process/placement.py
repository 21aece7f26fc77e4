"""Who this process is: a Launch, made from RANK and its companions, with every mistake named. No torch here."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from train.errors import LaunchError
from train.process.addresses import host_mistake, is_loopback

REQUIRED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
FIVE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
NAMES = (*FIVE, "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")


@dataclass(frozen=True, slots=True)
class Launch:
    """Who this process is and where its group meets; by default one process that no launcher started.

    Counts that the launcher does not give are None.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int | None = 1
    num_nodes: int | None = 1
    node_rank: int | None = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 0  # 0 only for a single process, which listens nowhere
    launcher: str = "python"  # or "environment" (by hand), or the one that env.py recognised: only for messages
    run_name: str | None = None  # named by the scheduler's job, so that a requeued job resumes the same run
    origins: dict[str, str] = field(default_factory=lambda: dict.fromkeys(FIVE, "default"))  # variable -> who set it
    warnings: tuple[str, ...] = ()
    restart_count: int = 0  # restarts by torchrun or our supervisor; the requeues of a scheduler are not among them
    max_restarts: int = 0  # of our supervisor
    predecessor: int | None = None  # the exit code of the process in whose place this one was started
    progress: str = ""  # where the supervisor looks for the last finished step: `train.process.progress`
    agent_store: bool = False  # torch's agent already listens on master_port: rank 0 connects to it like the others
    file: str = ""  # where rank 0 writes its address, in place of master_addr and master_port
    attempt: str = ""  # the id of this attempt where a supervisor gave one: it looks for it in status.json
    numbers_attempts: bool = False  # by our supervisor: status.job_of tells which attempts belong together
    start: str = ""  # names a start whose containers an engine restarts by itself
    parent_pid: int | None = None  # the process without which this one shall not go on
    has_horovod_rendezvous: bool = False  # the launcher already serves what Horovod's ranks meet by
    hint: str = ""  # where to look for ranks that are missing

    @property
    def distributed(self) -> bool:
        """Was a rank given? A complete set with WORLD_SIZE=1 is a group of one, and True."""
        return self.launcher != "python"


@dataclass(slots=True)
class Found:
    """The variables as strings and who set each: what reading any launcher results in, before anything is checked."""

    launcher: str
    values: dict[str, str]
    origins: dict[str, str]
    warnings: list[str] = field(default_factory=list)
    parent_pid: int | None = None
    has_horovod_rendezvous: bool = False
    hint: str = ""

    def add(self, name: str, value: object, origin: str) -> None:
        """Set `name` unless it is set: an explicit value beats a derived one. None sets nothing."""
        if value is not None and name not in self.values:
            self.values[name], self.origins[name] = str(value), origin


def check(found: Found, run_name: str | None, *, who_sets_them: str) -> Launch:
    """Turn strings into a Launch. Raises LaunchError with all mistakes, one on a line."""
    mistakes: list[str] = []
    if missing := [name for name in REQUIRED if name not in found.values]:
        mistakes.append(_incomplete(found.values, missing, who_sets_them))
    found.add("LOCAL_RANK", 0, "default")  # torchrun sets it per process; PyTorchJob, which sets RANK per pod, does not
    numbers = {name: _number(name, found, mistakes) for name in NAMES if name != "MASTER_ADDR"}
    mistakes += _contradictions(numbers)
    host = found.values.get("MASTER_ADDR")
    if host == "":
        mistakes.append(_empty("MASTER_ADDR"))
    elif host is not None and (rule := host_mistake(host)):
        mistakes.append(f"MASTER_ADDR {rule}, got {host!r}. Give the name or address of rank 0's machine.")
    if mistakes:
        raise LaunchError("\n".join(mistakes))
    given = {name: number for name, number in numbers.items() if number is not None}  # has all that must be there
    world_size, local_world_size = given["WORLD_SIZE"], numbers["LOCAL_WORLD_SIZE"]
    num_nodes = numbers["GROUP_WORLD_SIZE"]
    if num_nodes is None and local_world_size is not None:
        num_nodes = -(-world_size // local_world_size)  # exact where all nodes run as many processes as this one
    elif num_nodes is None and world_size == 1:
        num_nodes = 1
    return Launch(
        rank=given["RANK"], local_rank=given["LOCAL_RANK"], world_size=world_size,
        local_world_size=world_size if num_nodes == 1 and local_world_size is None else local_world_size,
        num_nodes=num_nodes, node_rank=0 if num_nodes == 1 else numbers["GROUP_RANK"],
        master_addr=found.values["MASTER_ADDR"], master_port=given["MASTER_PORT"],
        launcher=found.launcher, run_name=run_name, hint=found.hint, warnings=tuple(found.warnings),
        origins={name: found.origins[name] for name in NAMES if name in found.origins},
        has_horovod_rendezvous=found.has_horovod_rendezvous,
    )


def _incomplete(values: dict[str, str], missing: list[str], who_sets_them: str) -> str:
    shown = {name: value if re.fullmatch(r"[!-~]+", value) else repr(value) for name, value in values.items()}
    given = " ".join(f"{name}={value}" for name, value in shown.items())
    gap = f"{' '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set"
    return f"{given} but {gap}. {who_sets_them} For a single process unset {' '.join(values)}."


def _empty(name: str) -> str:
    return f"{name} must be set or absent, got an empty string. Look for a variable that your launch file left empty."


def _number(name: str, found: Found, mistakes: list[str]) -> int | None:
    text = found.values.get(name)
    if text is None:
        return None
    if text == "":
        mistakes.append(_empty(name))
    elif re.fullmatch(r"-?[0-9]{1,18}", text):
        return int(text)
    else:
        rule = "a whole number without spaces" if re.search(r"\s", text) else "a whole number"
        origin = found.origins[name]
        mistakes.append(f"{name} must be {rule}, got {text!r} (from {origin}). Correct it where it is set.")
    return None


def _contradictions(numbers: dict[str, int | None]) -> list[str]:
    """The mistakes in the numbers, alone or together. None, for one that could not be read, contradicts nothing."""
    rank, world, local = numbers["RANK"], numbers["WORLD_SIZE"], numbers["LOCAL_RANK"]
    local_world, port = numbers["LOCAL_WORLD_SIZE"], numbers["MASTER_PORT"]
    group_rank, group_world = numbers["GROUP_RANK"], numbers["GROUP_WORLD_SIZE"]
    mistakes = [
        f"{name} must be >= 1, got {size}. It counts {what}."
        for name, size, what in (
            ("WORLD_SIZE", world, "all processes of the job"),
            ("LOCAL_WORLD_SIZE", local_world, "this node's processes"),
            ("GROUP_WORLD_SIZE", group_world, "the nodes"),
        )
        if size is not None and size < 1
    ]
    for name, number, total, size, hint in (
        ("RANK", rank, "WORLD_SIZE", world, "Ranks count from 0 over all nodes; the last is WORLD_SIZE-1."),
        ("LOCAL_RANK", local, "LOCAL_WORLD_SIZE", local_world, "Local ranks count this node's processes from 0."),
        ("GROUP_RANK", group_rank, "GROUP_WORLD_SIZE", group_world, "Nodes count from 0."),
    ):
        if number is not None and number < 0:
            mistakes.append(f"{name} must be >= 0, got {number}. {hint}")
        elif number is not None and size is not None and 1 <= size <= number:
            mistakes.append(f"{name} must be 0..{size - 1} with {total}={size}, got {number}. {hint}")
    if rank is not None and local is not None and 0 <= rank < local:
        mistakes.append(f"LOCAL_RANK must be <= RANK, got LOCAL_RANK={local} RANK={rank}. Are the two exchanged?")
    for name, size in (("LOCAL_WORLD_SIZE", local_world), ("GROUP_WORLD_SIZE", group_world)):
        if size is not None and world is not None and 1 <= world < size:
            mistakes.append(
                f"{name} must be <= WORLD_SIZE, got {name}={size} WORLD_SIZE={world}. "
                "WORLD_SIZE counts all processes on all nodes."
            )
    if port is not None and not 1 <= port <= 65535:
        mistakes.append(f"MASTER_PORT must be 1..65535, got {port}. Take one that is free on rank 0's machine.")
    return mistakes


def check_loopback(launch: Launch, simulated_nodes: bool) -> None:
    """Raise LaunchError if the nodes are known to be several, yet each would look for rank 0 on itself."""
    if not launch.file and is_loopback(launch.master_addr) and (launch.num_nodes or 1) > 1 and not simulated_nodes:
        raise LaunchError(
            f"MASTER_ADDR={launch.master_addr} on {launch.num_nodes} nodes: each node would wait for itself. "
            "Set it to the address of rank 0's machine, or give --simulated-nodes if all nodes are this machine."
        )


def how_to_start(launch: Launch) -> str:
    """Where to look for the missing ranks: the launcher's own hint, or how to start them by hand."""
    return launch.hint or (
        f"Start one process with each RANK from 0 to {launch.world_size - 1}, all with "
        f"MASTER_ADDR={launch.master_addr} MASTER_PORT={launch.master_port}; "
        "docker compose ps -a shows nodes that ended."
    )


def describe(launch: Launch) -> str:
    """One line: which rank this is, where the group meets, and who set each variable."""
    if not launch.distributed:
        return "rank 0 of 1: a single process, as no launcher gave a rank"

    def place(word: str, number: int | None, count: int | None) -> list[str]:
        return [] if number is None else [f"{word} {number}" if count is None else f"{word} {number} of {count}"]

    places = place("local", launch.local_rank, launch.local_world_size)
    places += place("node", launch.node_rank, launch.num_nodes)
    host = f"[{launch.master_addr}]" if ":" in launch.master_addr else launch.master_addr
    meets = f"meeting by {launch.file}" if launch.file else f"master {host}:{launch.master_port}"
    names_by_origin: dict[str, list[str]] = {}
    for name in FIVE[:3] if launch.file else FIVE:
        names_by_origin.setdefault(launch.origins[name], []).append(name)
    origins = ", ".join(f"{' '.join(names)} {_from(origin)}" for origin, names in names_by_origin.items())
    who = f"rank {launch.rank} of {launch.world_size} ({', '.join(places)})"
    return f"{who}, {meets}; {origins}"


def ranges(numbers: Iterable[int]) -> str:
    """[0, 1, 2, 4, 6, 7] -> "0-2, 4, 6-7"."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def _from(origin: str) -> str:
    if origin == "default":
        return "by default"
    return origin if origin.startswith("derived") else f"from {origin}"
