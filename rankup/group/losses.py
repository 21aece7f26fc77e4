"""Where the other ranks are, and which of them caused the end: what the line says, and what to say of that."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rankup.agent.protocol import KILLED
from rankup.errors import root_cause, worth_restarting
from rankup.group.line import Line
from rankup.timing import QUIET_S, WHERE_S


@dataclass(frozen=True, slots=True)
class Suspect:
    """A rank that may be the cause, and why. `code`: that it ended with, where somebody knows. `alive`: it keeps the
    others waiting."""

    rank: int
    why: str
    code: int | None = None
    alive: bool = False


class Losses:
    """What the line has said so far."""

    def __init__(self, line: Line, rank: int, *, ask: Callable[[str], None] = lambda name: None) -> None:
        """`ask`: is called with the signal by which somebody asks the job to stop."""
        self._line, self._rank, self._ask = line, rank, ask
        self.must_leave = False  # for a stop: the ranks do not come to the step that all stop at
        self._heard, self._answered = [threading.Event()], threading.Event()
        self._lost: Mapping[str, Any] = {}
        self._signs: list[dict[str, Any]] = []
        line.listen(self._hear)

    def _hear(self, message: Mapping[str, Any]) -> None:
        """In the line's thread."""
        if message["is"] in ("lost", "gone") and not self._lost:
            self._lost = message
            for event in self._heard:
                event.set()
        elif message["is"] == "stop":
            self._ask(str(message["signal"]))
        elif message["is"] == "leave":
            self.must_leave = True
        elif message["is"] == "ranks":
            self._signs = message["ranks"]
            self._answered.set()

    def signs(self, *, timeout_s: float = WHERE_S) -> list[dict[str, Any]]:
        """Where each rank was when it last said so, see `Leader.signs`. Any thread; what is known where nobody answers
        in time."""
        self._answered.clear()
        if self._line.say("ask"):
            self._answered.wait(timeout_s)
        return self._signs

    def wait(self, timeout_s: float | None = None) -> bool:
        """Whether a rank is lost, or the line itself, within that time."""
        return self._heard[0].wait(timeout_s)

    def notify(self, event: threading.Event) -> None:
        """Set it too once a rank is lost, or now."""
        self._heard.append(event)
        if self._lost:
            event.set()

    @property
    def gone(self) -> bool:
        """Whether somebody's process has ended by itself: a collective with it breaks, or never comes to an end."""
        return self._lost.get("code") == KILLED

    @property
    def hang(self) -> bool:
        """Whether somebody is late, and nobody has ended."""
        return bool(self._lost.get("alive"))

    def reported(self) -> list[Suspect]:
        """Who has said itself how it ends."""
        lost = self._lost
        if lost.get("code") in (None, KILLED):
            return []
        return [Suspect(rank, lost["why"], code=lost["code"]) for rank in lost["ranks"]]

    def suspects(self, *, waiting: bool, overdue: bool) -> list[Suspect]:
        """The most likely first; empty where all ranks wait for each other. `waiting`: this rank waits in a collective
        itself. `overdue`: its own deadline has passed."""
        late = self._late() if not self._lost else []
        if not (lost := self._lost):  # which may have come meanwhile, and says more
            return late or ([] if waiting else [Suspect(self._rank, "the others wait for it", alive=True)])
        if lost["is"] == "gone" and overdue and not waiting:
            # This rank is the one that takes too long: those that waited for it have left, rank 0 among them
            return [Suspect(self._rank, "the others have left", alive=True)]
        if lost["is"] == "gone":
            return [Suspect(0, lost["why"], code=lost.get("code"))]
        code = lost.get("code")
        return [Suspect(rank, lost["why"], code=code, alive=lost.get("alive", False)) for rank in lost["ranks"]]


    def _late(self) -> list[Suspect]:
        """Where nobody has ended: who gave no sign of life, else who does not wait for others."""
        signs = [sign for sign in self.signs() if sign["rank"] != self._rank]
        if not self._answered.is_set():
            return [Suspect(0, "it does not answer")]
        silent = [sign for sign in signs if time.time() - sign["seen"] > QUIET_S]
        if silent:
            return [Suspect(sign["rank"], "gave no sign of life") for sign in silent]
        busy = [sign for sign in signs if not sign["waiting"]]
        return [Suspect(s["rank"], f"is alive, in {s['phase']} at step {s['step']}", alive=True) for s in busy]


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
