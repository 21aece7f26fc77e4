"""A rank's line to the others, beside what is training: who is lost, who asks to stop, where everybody is.

Under an agent it is a local socket to it. Without one the rank is a member of the meeting itself
(`rankup.group.meeting`). No torch here.
"""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rankup import timing
from rankup.agent.protocol import KILLED
from rankup.errors import root_cause, worth_restarting
from rankup.group.stop import StopRequest


@dataclass(frozen=True, slots=True)
class Suspect:
    """A rank that may be the cause, and why. `code`: that it ended with, where somebody knows. `alive`: it keeps the
    others waiting."""

    rank: int
    why: str
    code: int | None = None
    alive: bool = False


class Line:
    """What was heard so far, and what follows from it.

    `heard`: is set once a rank is lost, or the line itself. `must_leave`: for a stop, as the ranks do not come to the
    step that all stop at.
    """

    def __init__(self, rank: int, stop: StopRequest) -> None:
        self._rank, self._stop = rank, stop
        self.heard = threading.Event()
        self.must_leave = False
        self._answered = threading.Event()
        self._lost: Mapping[str, Any] = {}
        self._signs: list[dict[str, Any]] = []
        self.nodes: list[dict[str, Any]] = []  # where their number may change, as they were said with the last signs

    def say(self, kind: str, **values: Any) -> bool:
        """Any thread. Raises nothing, and takes SAY_S at most. Returns False where it reached nobody."""
        return False

    def hear(self, message: Mapping[str, Any]) -> None:
        """The others say: lost, gone, stop, leave, ranks. In one thread."""
        if message["is"] in ("lost", "gone") and not self._lost:
            self._lost = message
            self.heard.set()
            self._stop.wake()
        elif message["is"] == "stop":
            self._stop.ask(str(message["signal"]))
        elif message["is"] == "leave":
            self.must_leave = True
        elif message["is"] == "ranks":
            self._signs, self.nodes = message["ranks"], message.get("nodes", [])
            self._answered.set()

    def signs(self) -> list[dict[str, Any]]:
        """Where each rank was when it last said so, see `Leader.signs`. Any thread but that of `hear`; what is known
        where nobody answers in time."""
        self._answered.clear()
        if self.say("ask"):
            self._answered.wait(timing.WHERE_S)
        return self._signs

    @property
    def gone(self) -> bool:
        """Whether somebody's process has ended by itself, or is out of reach: a collective with it breaks, or never
        comes to an end."""
        return self._lost.get("code") == KILLED or self._lost.get("is") == "gone"

    @property
    def hang(self) -> bool:
        """Whether somebody is late, and nobody has ended."""
        return bool(self._lost.get("alive"))

    def reported(self) -> list[tuple[int, int, str]]:
        """Rank, code and reason of who has said itself how it ends."""
        if self._lost.get("code") in (None, KILLED):
            return []
        return [(rank, self._lost["code"], self._lost["why"]) for rank in self._lost["ranks"]]

    def suspects(self, *, waiting: bool, overdue: bool) -> list[Suspect]:
        """The most likely first; empty where all ranks wait for each other. `waiting`: this rank waits in a collective
        itself. `overdue`: its own deadline has passed."""
        late = self._late() if not self._lost else []
        if not (lost := self._lost):  # which may have come meanwhile, and says more
            return late or ([] if waiting else [Suspect(self._rank, "the others wait for it", alive=True)])
        if lost["is"] == "gone" and overdue and not waiting:
            # This rank is the one that takes too long: those that waited for it have left, rank 0 among them
            return [Suspect(self._rank, "the others have left", alive=True)]
        ranks, alive = lost.get("ranks", [0]), bool(lost.get("alive"))
        return [Suspect(rank, lost["why"], code=lost.get("code"), alive=alive) for rank in ranks]

    def _late(self) -> list[Suspect]:
        """Where nobody has ended: who gave no sign of life, else who does not wait for others."""
        signs = [sign for sign in self.signs() if sign["rank"] != self._rank]
        if not self._answered.is_set():
            return [Suspect(0, "it does not answer")]
        silent = [sign for sign in signs if time.time() - sign["seen"] > timing.QUIET_S]
        if silent:
            return [Suspect(sign["rank"], "gave no sign of life") for sign in silent]
        busy = [sign for sign in signs if not sign["waiting"]]
        return [Suspect(s["rank"], f"is alive, in {s['phase']} at step {s['step']}", alive=True) for s in busy]


class AgentLine(Line):
    """To the agent of this node. `agent`: what it has put into RANKUP_AGENT."""

    def __init__(self, agent: Mapping[str, Any], rank: int, stop: StopRequest) -> None:
        super().__init__(rank, stop)
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(agent["socket"])
        self._lock, self._begun = threading.Lock(), b""  # of a message whose end has not come
        stop.hear(self._socket.fileno(), self.receive)
        self.say("rank", local_rank=agent["local_rank"])

    def receive(self) -> bool:
        """Hear what has come. Returns False where nothing more will. In the thread of `StopRequest`."""
        try:
            data = self._socket.recv(1 << 16)
            *whole, self._begun = (self._begun + data).split(b"\n")
            for line in whole:
                self.hear(json.loads(line))
        except (OSError, ValueError):
            return False
        return bool(data)

    def say(self, kind: str, **values: Any) -> bool:
        data = json.dumps({"is": kind, **values}).encode() + b"\n"
        if self._lock.acquire(timeout=timing.SAY_S):
            try:
                with contextlib.suppress(OSError):
                    self._socket.sendall(data)
                    return True
            finally:
                self._lock.release()
        return False


def root_exit_code(suspects: list[Suspect], otherwise: int) -> int:
    """The exit code of a rank that lost others: the code of the likeliest suspect where that forbids a restart.

    A mistake or a fault on one rank ends all ranks so, and so does a rank that was asked to stop and left without them.
    """
    reported = [suspect.code for suspect in suspects[:1] if suspect.code is not None]
    code = root_cause([*reported, otherwise])
    return otherwise if worth_restarting(code) else code


def describe(suspects: list[Suspect], hosts: Sequence[str]) -> str:
    """One clause: "rank 3 on node1 (its process has ended)"; "suspected: ..." where its end is not known."""
    if not suspects:
        return "suspected: nobody, all ranks wait for each other"
    named = ", ".join(f"rank {s.rank} on {hosts[s.rank]} ({s.why})" for s in suspects[:4])
    return named if suspects[0].code is not None else f"suspected: {named}"
