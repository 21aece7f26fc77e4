"""Faults at exact places: a process of a job ends, or stops, in the middle of a forward, of a save, of joining.

The program knows nothing of it. `order` makes a `sitecustomize.py`, which Python runs as it starts; it puts hooks
around functions of the program as they are imported, see `place_hooks`. Each is a place with a name, see `PLACES`. The
order stands in the variable FAULTS: JSON, a folder and a list of groups of faults. A group is armed when all faults of
the group before it have struck, so that one job can suffer many, one after the other, also a second one while it
recovers from the first. Each strikes once, whatever process gets there first: it makes a file in the folder. No torch
here and nothing else that is slow: fork servers import it too.
"""

import ctypes
import functools
import json
import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FAULTS = "FAULTS"
# A fault that shall come together with others waits for them so long: some may have died of the first already
TOGETHER_S = 5.0

JOINING = ("before joining", "met", "before forming", "formed")
PREPARING = ("before building", "data loaded", "warming up", "ready")
STEPPING = (
    "forward", "backward", "between buckets", "reducing the loss", "before the optimizer", "in the optimizer",
    "after the optimizer",
)
KEEPING = ("evaluating", "saving", "publishing", "published")
RESCUING = ("before the rescue", "writing the rescue", "publishing the rescue")
RESCUED = ("reading the rescue", "sending the rescue", "rescue known")
PLACES = (*JOINING, *PREPARING, *STEPPING, *KEEPING, *RESCUING, *RESCUED, "between the renames")


@dataclass(frozen=True)
class Fault:
    """What happens to one process, where. `rank` -1: whichever rank gets there first. `step`: not before that step.

    `how`: a signal's name. `whom`: the rank itself, the process that forked it ("server"), the "agent", or the whole
    "node", all three. `saved`: a save that is under way gets done first. `late_s`: so much later, wherever the process
    is by then.
    """

    place: str
    rank: int = -1
    step: int = 0
    how: str = "SIGKILL"
    whom: str = "self"
    saved: bool = False
    late_s: float = 0.0

    def __post_init__(self) -> None:
        assert self.place in PLACES, self.place


Groups = Sequence[Sequence[Fault]]


def order(folder: Path, faults: Groups) -> dict[str, str]:
    """The variables of a job that shall suffer them. `folder` gets what happened."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text("from tests.rigs import place_hooks\n\nplace_hooks.install()\n")
    root = str(Path(__file__).resolve().parents[2])
    text = json.dumps({"folder": str(folder), "faults": [[asdict(fault) for fault in group] for group in faults]})
    return {FAULTS: text, "PYTHONPATH": f"{folder}:{root}"}


@dataclass(frozen=True)
class Strike:
    fault: Fault
    rank: int
    pids: list[int]  # of the ranks that it took along
    time: float


def strikes(folder: Path) -> list[Strike]:
    """What has struck so far."""
    found = [json.loads(path.read_text() or "null") for path in sorted(folder.glob("*.struck"))]
    return [Strike(Fault(**entry.pop("fault")), **entry) for entry in found if entry]


def updates(folder: Path) -> list[dict[str, Any]]:
    """The optimizer steps that all processes have finished: {"rank", "pid", "step", "time"}, by time."""
    lines = [line for path in folder.glob("updates-*.jsonl") for line in path.read_text().splitlines()]
    return sorted((json.loads(line) for line in lines), key=lambda entry: float(entry["time"]))


# In the job's processes -----------------------------------------------------------------------------------------


class Now:
    """Where this process is."""

    step = 0  # the optimizer step that is being done, from 1; 0 before the first
    inside_step = False


@functools.cache
def _order() -> tuple[Path, list[list[Fault]]]:
    given = json.loads(os.environ[FAULTS])
    return Path(given["folder"]), [[Fault(**fault) for fault in group] for group in given["faults"]]


def due(place: str) -> Path | None:
    """The file that says that the fault due here has struck, or None where none is due."""
    folder, groups = _order()
    for number, group in enumerate(groups):
        files = [folder / f"{number:02d}-{index}.struck" for index in range(len(group))]
        missing = [(file, fault) for file, fault in zip(files, group, strict=True) if not file.exists()]
        for file, fault in missing:
            mine = fault.rank in (-1, int(os.environ.get("RANK", "-2")))
            if fault.place == place and mine and Now.step >= fault.step:
                return file
        if missing:
            return None
    return None


def at(place: str) -> None:
    """This process has come to a place: suffer what is due here."""
    file = due(place)
    if file is None:
        return
    folder, groups = _order()
    number, index = (int(part) for part in file.stem.split("-"))
    group = groups[number]
    for thread in threading.enumerate():
        if thread.name == "save" and group[index].saved:
            thread.join()
    if len(group) > 1:
        file.with_suffix(".here").touch()
        until_s = time.monotonic() + TOGETHER_S
        while len(list(folder.glob(f"{number:02d}-*.here"))) < len(group) and time.monotonic() < until_s:
            time.sleep(0.005)
    fault = group[index]
    try:
        claim = os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    except FileExistsError:  # another rank got here first
        return
    pids = [os.getpid()] if fault.whom == "self" else _siblings()
    entry = {"fault": asdict(fault), "rank": int(os.environ["RANK"]), "pids": pids, "time": time.time()}
    os.write(claim, json.dumps(entry).encode())
    os.close(claim)
    if fault.late_s:
        threading.Timer(fault.late_s, _strike, [fault]).start()
    else:
        _strike(fault)


def note_update() -> None:
    """This process has finished an optimizer step."""
    entry = {"rank": int(os.environ["RANK"]), "pid": os.getpid(), "step": Now.step, "time": time.time()}
    with (_order()[0] / f"updates-{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps(entry) + "\n")


def _strike(fault: Fault) -> None:
    number = getattr(signal, fault.how)
    server = os.getppid()
    agent = _parent(server) if b"fork_server" in Path(f"/proc/{server}/cmdline").read_bytes() else server
    victims = {
        "self": [os.getpid()], "server": [server], "agent": [agent],
        "node": [agent, server, os.getpid()],
    }[fault.whom]
    if fault.how == "SIGSEGV" and fault.whom == "self":
        ctypes.string_at(0)  # a real one, in C
    for pid in victims:
        os.kill(pid, number)
    # The end of a parent takes this process along; a request to stop comes back from it while this place lasts
    time.sleep(2.0 if number == signal.SIGTERM else 600.0)


def _siblings() -> list[int]:
    """The ranks of this node, this one included: they end with what has started them."""
    parent = os.getppid()
    return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
