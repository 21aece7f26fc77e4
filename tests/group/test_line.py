"""The line of ranks without an agent, two of them in one process, and which rank caused the end: from what the line
says, and from where the others were. Whole jobs are in `test_rendezvous` and `test_deadlines`."""

import contextlib
import gc
import logging
import socket
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from rankup.agent.record import RecordWriter
from rankup.env.rank_env import RankEnv
from rankup.errors import JoinError
from rankup.group import group
from rankup.group.meeting import MemberLine
from rankup.group.stop import StopRequest
from rankup.group.watchdog import Line, Suspect, describe
from tests.rigs.jobs import wait_for


class Heard(MemberLine):
    def __init__(self, *values: Any, **more: Any) -> None:
        super().__init__(*values, **more)
        self.messages: list[Mapping[str, Any]] = []

    def hear(self, message: Mapping[str, Any]) -> None:
        self.messages.append(message)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def line_of(rank: int, port: int, world_size: int = 2, timeout_s: float = 60.0) -> Heard:
    return line_for(RankEnv(rank=rank, world_size=world_size, local_world_size=world_size, master_port=port), timeout_s)


def line_for(launch: RankEnv, timeout_s: float = 60.0) -> Heard:
    return Heard(
        launch, {}, attempt="a", timeout_s=timeout_s, log=logging.getLogger("quiet"), record=RecordWriter(None),
        stop=StopRequest(), until_formed=contextlib.ExitStack(),
    )


@contextmanager
def joined() -> Iterator[list[Heard]]:
    """The lines of two ranks that have met."""
    port = free_port()
    lines = [line_of(rank, port) for rank in (0, 1)]
    with ThreadPoolExecutor() as pool:
        first, second = pool.map(lambda line: line.join(), lines)
    try:
        assert first == second
        assert sum(count for _, count in first["hosts"]) == 2
        yield lines
    finally:
        for line in lines:
            line.close()
            line.until_formed.close()


def test_a_rank_that_leaves_is_lost_to_the_others() -> None:
    with joined() as (first, second):
        second.close()
        wait_for("it", lambda: not first.say("ask"))  # it has left its membership, as there is none any more
        (lost,) = [each for each in first.messages if each["is"] != "ranks"]
        assert (lost["is"], lost["ranks"], lost["code"]) == ("lost", [1], 137)


def test_the_end_of_rank_0_is_told_before_its_process_may_end() -> None:
    with joined() as (first, second):
        leader = first._leader
        assert leader is not None

        def say_and_do_no_more() -> None:
            leader.take("end", rank=0, code=1, cause="ValueError: x", suspect=None)
            wait_for("it", lambda: second.messages)

        first._loop.call_soon_threadsafe(say_and_do_no_more)
        wait_for("it", lambda: second.messages)
        lost = second.messages[0]
        assert (lost["is"], lost["ranks"], lost.get("code")) == ("lost", [0], 1)


def test_a_join_that_fails_closes_the_leaders_port() -> None:
    gc.collect()  # what other tests left
    port, threads = free_port(), set(threading.enumerate())
    lines = [line_of(0, port, 2, 0.5), line_of(1, port, 4, 0.5)]
    with warnings.catch_warnings(record=True) as seen, ThreadPoolExecutor() as pool:
        warnings.simplefilter("always", ResourceWarning)
        for failed in [pool.submit(line.join) for line in lines]:
            with pytest.raises(JoinError, match="WORLD_SIZE=4"):
                failed.result()
        wait_for("it", lambda: not [each for each in set(threading.enumerate()) - threads if each.name == "line"])
        gc.collect()
    assert [str(warning.message) for warning in seen] == []


# Who was lost ---------------------------------------------------------------------------------------------------

HOSTS = ["node0", "node0", "node1", "node1"]


class Asked(Line):
    """Of rank 1. What the others answer to `ask` is `signs`; None: nobody answers."""

    def __init__(self, signs: list[dict[str, Any]] | None = None) -> None:
        super().__init__(1, StopRequest())
        self.answer = signs

    def say(self, kind: str, **values: Any) -> bool:
        assert (kind, values) == ("ask", {})
        if self.answer is not None:
            now = time.time()
            self.hear({"is": "ranks", "ranks": [{**sign, "seen": now - sign["silent_s"]} for sign in self.answer]})
        return self.answer is not None


def sign(rank: int, *, waiting: bool = False, silent_s: float = 0.0) -> dict[str, Any]:
    """As it stands before the test begins: `silent_s` counts from its question."""
    return {"rank": rank, "phase": "step", "step": 7, "waiting": waiting, "silent_s": silent_s}


def found(
    message: Mapping[str, Any] | None = None, signs: list[dict[str, Any]] | None = None, *, waiting: bool = True,
    overdue: bool = False,
) -> list[Suspect]:
    """What rank 1 finds out."""
    line = Asked(signs)
    if message:
        line.hear(message)
    assert line.heard.is_set() == bool(message)
    return line.suspects(waiting=waiting, overdue=overdue)


def test_the_first_loss_counts() -> None:
    line = Asked()
    line.hear({"is": "lost", "ranks": [2], "why": "error: x", "code": 1})
    line.hear({"is": "gone", "why": "its process has ended", "code": 137})
    assert [(each.rank, each.code) for each in line.suspects(waiting=True, overdue=False)] == [(2, 1)]


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
    class Late(Asked):
        def say(self, kind: str, **values: Any) -> bool:
            self.hear({"is": "lost", "ranks": [2], "why": "is suspected by rank 0", "alive": True})
            return False

    suspects = Late().suspects(waiting=True, overdue=True)
    assert describe(suspects, HOSTS) == "suspected: rank 2 on node1 (is suspected by rank 0)"


def test_a_rank_that_is_late_itself_blames_itself_where_the_others_have_left() -> None:
    gone = {"is": "gone", "why": "its process has ended", "code": 137}
    assert [each.rank for each in found(gone, waiting=False, overdue=True)] == [1]
    assert [each.rank for each in found(gone, waiting=True, overdue=True)] == [0]


def test_a_silent_leader_is_suspected_and_not_called_dead() -> None:
    suspects = found({"is": "gone", "why": "gave no sign of life for 30 s"})
    assert describe(suspects, HOSTS) == "suspected: rank 0 on node0 (gave no sign of life for 30 s)"


def test_an_answer_is_waited_for_only_so_long() -> None:
    class Deaf(Asked):
        def say(self, kind: str, **values: Any) -> bool:
            return True

    assert Deaf().signs(timeout_s=0.05) == []


def test_the_name_of_a_launchers_store_is_looked_up_before_lookups_end(monkeypatch: pytest.MonkeyPatch):
    """Else a name that only a resolver knows leads nowhere."""
    connected: list[str] = []
    monkeypatch.setattr(group, "TCPStore", lambda ip, *_, **__: connected.append(ip))
    with socket.create_server(("127.0.0.1", 0)) as store:
        launch = RankEnv(
            rank=1, world_size=2, master_addr="localhost", master_port=store.getsockname()[1], agent_store=True
        )
        line_for(launch)
    assert connected == ["127.0.0.1"]
