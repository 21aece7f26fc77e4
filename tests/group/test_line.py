"""Which rank caused the end: from what the line says, and from where the others were. Whole jobs are in
`test_rendezvous` and `test_deadlines`."""

import contextlib
import logging
import socket
import time
from collections.abc import Mapping
from typing import Any

import pytest

from rankup.agent.record import RecordWriter
from rankup.env.rank_env import RankEnv
from rankup.group import group
from rankup.group.line import Line, describe
from rankup.group.meeting import MemberLine
from rankup.group.stop import StopRequest


class Asked(Line):
    """Of rank 1. What the others answer to `ask` is `signs`; None: nobody answers. `late`: comes meanwhile."""

    def __init__(self, signs: list[dict[str, Any]] | None, late: Mapping[str, Any] | None) -> None:
        super().__init__(1, StopRequest())
        self.answer, self.late = signs, late

    def say(self, kind: str, **values: Any) -> bool:
        if self.late is not None:
            self.hear(self.late)
        if self.answer is not None:
            now = time.time()
            self.hear({"is": "ranks", "ranks": [{**sign, "seen": now - sign["silent_s"]} for sign in self.answer]})
        return self.answer is not None


def sign(rank: int, *, waiting: bool = True, silent_s: float = 0.0) -> dict[str, Any]:
    return {"rank": rank, "phase": "step", "step": 7, "waiting": waiting, "silent_s": silent_s}


LOST = {"is": "lost", "ranks": [2], "why": "error: x", "code": 1}
GONE = {"is": "gone", "why": "its process has ended", "code": 137}
ALL_WAIT = [sign(rank) for rank in (0, 2, 3)]


@pytest.mark.parametrize(
    ("heard", "late", "signs", "waiting", "text"),
    [
        ([LOST, GONE], None, None, True, "rank 2 on node1 (error: x)"),  # the first loss counts
        ([], LOST, ALL_WAIT, True, "rank 2 on node1 (error: x)"),
        ([GONE], None, None, True, "rank 0 on node0 (its process has ended)"),
        ([GONE], None, None, False, "suspected: rank 1 on node0 (the others have left)"),
        ([], None, [sign(0), sign(2, waiting=False), sign(3, silent_s=9.0)], True,
         "suspected: rank 3 on node1 (gave no sign of life)"),
        ([], None, [sign(0), sign(2, waiting=False), sign(3)], True,
         "suspected: rank 2 on node1 (is alive, in step at step 7)"),
        ([], None, ALL_WAIT, True, "suspected: nobody, all ranks wait for each other"),
    ],
)
def test_who_was_lost_is_named_from_what_the_line_says_and_from_where_the_others_are(
    heard: list[dict[str, Any]], late: dict[str, Any] | None, signs: list[dict[str, Any]] | None, waiting: bool,
    text: str,
) -> None:
    """Of a rank whose deadline has passed. Who else is named, and that none waits for an answer: `test_deadlines`."""
    line = Asked(signs, late)
    for message in heard:
        line.hear(message)
    assert describe(line.suspects(waiting=waiting, overdue=True), ["node0", "node0", "node1", "node1"]) == text


def test_the_name_of_a_launchers_store_is_looked_up_before_lookups_end(monkeypatch: pytest.MonkeyPatch):
    """Else a name that only a resolver knows leads nowhere."""
    connected: list[str] = []
    monkeypatch.setattr(group, "TCPStore", lambda ip, *_, **__: connected.append(ip))
    with socket.create_server(("127.0.0.1", 0)) as store:
        launch = RankEnv(
            rank=1, world_size=2, master_addr="localhost", master_port=store.getsockname()[1], agent_store=True
        )
        MemberLine(
            launch, {}, attempt="a", timeout_s=60.0, log=logging.getLogger("quiet"), record=RecordWriter(None),
            stop=StopRequest(), until_formed=contextlib.ExitStack(),
        )
    assert connected == ["127.0.0.1"]
