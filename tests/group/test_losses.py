"""Which rank caused the end: from what the line says, and from where the others were."""

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from rankup.group import line as lines
from rankup.group.line import Losses, Suspect, describe, root_exit_code

HOSTS = ["node0", "node0", "node1", "node1"]


class Line:
    """What the others answer to `ask` is `signs`; None: nobody answers."""

    def __init__(self, signs: list[dict[str, Any]] | None) -> None:
        self.signs = signs
        self.deliver: Callable[[Mapping[str, Any]], None]

    def join(self) -> Mapping[str, Any]:
        raise AssertionError

    def listen(self, deliver: Callable[[Mapping[str, Any]], None]) -> None:
        self.deliver = deliver

    def say(self, kind: str, **values: Any) -> bool:
        assert (kind, values) == ("ask", {})
        if self.signs is not None:
            now = time.time()
            self.deliver({"is": "ranks", "ranks": [{**sign, "seen": now - sign["silent_s"]} for sign in self.signs]})
        return self.signs is not None

    def close(self) -> None: ...


def sign(rank: int, *, waiting: bool = False, silent_s: float = 0.0) -> dict[str, Any]:
    """As it stands before the test begins: `silent_s` counts from its question."""
    return {"rank": rank, "phase": "step", "step": 7, "waiting": waiting, "silent_s": silent_s}


def found(
    message: Mapping[str, Any] | None = None, signs: list[dict[str, Any]] | None = None, *, waiting: bool = True,
    overdue: bool = False,
) -> list[Suspect]:
    """What rank 1 finds out."""
    line = Line(signs)
    heard = threading.Event()
    seen = Losses(line, 1, heard=heard)
    if message:
        line.deliver(message)
    assert heard.is_set() == bool(message)
    return seen.suspects(waiting=waiting, overdue=overdue)


def test_a_process_that_has_ended_is_named_with_its_code() -> None:
    lost = {"is": "lost", "ranks": [2, 3], "why": "its process has ended", "code": 137}
    suspects = found(lost)
    assert [(each.rank, each.code, each.alive) for each in suspects] == [(2, 137, False), (3, 137, False)]
    assert describe(suspects, HOSTS) == (
        "rank 2 on node1 (its process has ended), rank 3 on node1 (its process has ended)"
    )


def test_the_first_loss_counts() -> None:
    line = Line([])
    seen = Losses(line, 1, heard=threading.Event())
    line.deliver({"is": "lost", "ranks": [2], "why": "error: x", "code": 1})
    line.deliver({"is": "gone", "why": "its process has ended", "code": 137})
    assert [(each.rank, each.code) for each in seen.suspects(waiting=True, overdue=False)] == [(2, 1)]


@pytest.mark.parametrize(
    ("signs", "waiting", "text"),
    [
        ([sign(0, waiting=True), sign(2), sign(3, waiting=True)], True,
         "suspected: rank 2 on node1 (is alive, in step at step 7)"),
        ([sign(0, waiting=True), sign(2), sign(3, waiting=True, silent_s=9)], True,
         "suspected: rank 3 on node1 (gave no sign of life)"),
        ([sign(rank, waiting=True) for rank in (0, 2, 3)], True,
         "suspected: nobody, all ranks wait for each other"),
        ([sign(rank, waiting=True) for rank in (0, 2, 3)], False,
         "suspected: rank 1 on node0 (the others wait for it)"),
        (None, True, "suspected: rank 0 on node0 (it does not answer)"),
    ],
)
def test_where_nobody_has_ended_who_keeps_the_others_waiting_is_named(
    signs: list[dict[str, Any]] | None, waiting: bool, text: str
) -> None:
    assert describe(found(signs=signs, waiting=waiting, overdue=True), HOSTS) == text


def test_a_loss_that_comes_while_the_others_are_asked_counts() -> None:
    class Late(Line):
        def say(self, kind: str, **values: Any) -> bool:
            self.deliver({"is": "lost", "ranks": [2], "why": "is suspected by rank 0", "alive": True})
            return False

    suspects = Losses(Late(None), 1, heard=threading.Event()).suspects(waiting=True, overdue=True)
    assert describe(suspects, HOSTS) == "suspected: rank 2 on node1 (is suspected by rank 0)"


def test_a_rank_that_is_late_itself_blames_itself_where_the_others_have_left() -> None:
    gone = {"is": "gone", "why": "its process has ended", "code": 137}
    assert [each.rank for each in found(gone, waiting=False, overdue=True)] == [1]
    assert [each.rank for each in found(gone, waiting=True, overdue=True)] == [0]


def test_a_silent_leader_is_suspected_and_not_called_dead() -> None:
    suspects = found({"is": "gone", "why": "gave no sign of life for 30 s"})
    assert describe(suspects, HOSTS) == "suspected: rank 0 on node0 (gave no sign of life for 30 s)"


def test_an_answer_is_waited_for_only_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    class Deaf(Line):
        def say(self, kind: str, **values: Any) -> bool:
            return True

    monkeypatch.setattr(lines, "WHERE_S", 0.0)
    assert Losses(Deaf(None), 1, heard=threading.Event()).signs(timeout_s=0.05) == []


@pytest.mark.parametrize(("code", "counts"), [(1, 1), (2, 2), (137, 171), (171, 171), (None, 171)])
def test_a_code_that_forbids_a_restart_becomes_that_of_all(code: int | None, counts: int) -> None:
    assert root_exit_code([Suspect(2, "x", code=code)], 171) == counts
