"""Which rank caused the end: from the agent's messages, and from the places of the others. `test_rendezvous` and
`test_deadlines` run whole jobs."""

import itertools
import json
import logging
import socket
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rankup import timing
from rankup.agent import network
from rankup.agent.protocol import pages
from rankup.agent.record import Record
from rankup.env.rank_env import RankEnv
from rankup.errors import PEER_LOST
from rankup.group import own_agent, watchdog
from rankup.group.stop import StopRequest
from rankup.group.watchdog import Watchdog, describe


def watchdog_of(rank: int, *, waiting: bool) -> Watchdog:
    status: Any = SimpleNamespace(rank=rank, world_size=4, run_dir=Path(), attempt="a")
    watch = Watchdog(status, StopRequest(), record=Record.new(rank), log=logging.getLogger("quiet"))
    watch.record.waiting = waiting
    return watch


@pytest.mark.parametrize("after", range(4))
def test_only_rank_stops_whatever_its_agent_agrees_on_meanwhile(after: int) -> None:
    status: Any = SimpleNamespace(rank=0, world_size=1, run_dir=Path(), attempt="a")
    watch = Watchdog(status, StopRequest(), record=Record.new(0), log=logging.getLogger("quiet"))
    agents = Record.at(watch.record.path)
    assert watch.record.may_begin(7)
    steps = [partial(agents.ask_to_stop, 0), partial(agents.ask_to_stop, 9), partial(setattr, agents, "confirmed", 9)]
    for step in [*steps[:after], partial(watch.tell_others, "SIGTERM"), *steps[after:]]:
        step()
    assert watch.record.may_begin(8) is False


def heartbeat(
    rank: int, *, waiting: bool = True, silent_s: float = 0.0, at: str = "main", begun: int = 0
) -> dict[str, Any]:
    """`silent_s`: the age of the last heartbeat when the deadline passes; 0: a heartbeat comes with each answer. `at`:
    where the rank is. `begun`: how many collectives it has begun."""
    return {"rank": rank, "phase": "step", "step": 7, "waiting": waiting, "begun": {"0/gloo": begun},
            "silent_s": silent_s, "location": f"{at} (train.py:9 main) of step 8"}


class AlsoAsked(threading.Event):
    """Whoever asks again waits for a new answer."""

    def wait(self, timeout: float | None = None) -> bool:
        there = super().wait(timeout)
        self.clear()
        return there


LOST = {"is": "lost", "ranks": [2], "why": "error: x", "code": 1}
GONE = {"is": "gone", "why": "its process has ended", "code": 137}
ALL_WAIT = [heartbeat(rank) for rank in (0, 2, 3)]


@pytest.mark.parametrize(("heard", "late", "heartbeats", "waiting", "text"), [
    ([LOST, GONE], None, None, True, "rank 2 on node1 (error: x)"),  # the first loss counts
    ([], LOST, ALL_WAIT, True, "rank 2 on node1 (error: x)"),
    ([GONE], None, None, True, "rank 0 on node0 (its process has ended)"),
    ([GONE], None, None, False, "suspected: rank 1 on node0 (the others have left)"),
    ([], None, [heartbeat(0), heartbeat(2, waiting=False), heartbeat(3, silent_s=9.0)], True,
     "suspected: rank 3 on node1 (sent no heartbeat)"),
    ([], None, [heartbeat(0), heartbeat(2, waiting=False), heartbeat(3)], True,
     "suspected: rank 2 on node1 (is alive, in step at step 7)"),
    ([], None, ALL_WAIT, True, "suspected: nobody, all ranks wait for each other"),
    # Stopped a moment ago, so that the rank still seems to wait, or to be alive
    ([], None, [heartbeat(0), heartbeat(2), heartbeat(3, silent_s=0.1)], True,
     "suspected: rank 3 on node1 (sent no heartbeat)"),
    ([], None, [heartbeat(0), heartbeat(2, waiting=False, silent_s=0.1), heartbeat(3)], True,
     "suspected: rank 2 on node1 (sent no heartbeat)"),
])
def test_suspect_is_named_from_messages_and_from_the_other_ranks_places(
    heard: list[dict[str, Any]], late: dict[str, Any] | None, heartbeats: list[dict[str, Any]] | None, waiting: bool,
    text: str, monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Called by a rank whose deadline has passed. `test_deadlines` tests the other ranks, and that no rank waits for an
    answer. The machine's clock changes meanwhile, and another thread asks too."""
    watch, passed_s, hours = watchdog_of(1, waiting=waiting), time.monotonic(), itertools.count(9, -1)
    watch._answered = AlsoAsked()
    clock = SimpleNamespace(time=lambda: 3600.0 * next(hours), monotonic=time.monotonic)
    monkeypatch.setattr(watchdog, "time", clock)
    monkeypatch.setattr(timing, "QUIET_S", 0.5)
    monkeypatch.setattr(timing, "ALIVE_S", 0.1)

    def say(kind: str) -> bool:
        """The others answer `ask` with `heartbeats`, or not at all if it is None. `late` arrives meanwhile."""
        if late is not None:
            watch.on_message(late)
        if heartbeats is not None:
            late_s = time.monotonic() - passed_s
            ranks = [{**each, "ago_s": each["silent_s"] and each["silent_s"] + late_s} for each in heartbeats]
            time.sleep(0.2)  # the answer is under way
            watch.on_message({"is": "ranks", "ranks": ranks, "nodes": [], "start": 0, "more": False})
        return heartbeats is not None

    watch.connect(SimpleNamespace(send=say), ["node0", "node0", "node1", "node1"])
    for message in heard:
        watch.on_message(message)
    assert describe(watch.suspects(overdue=True), watch.hosts) == text


SLEEPS = heartbeat(2, waiting=False, at="main")


@pytest.mark.parametrize(("others", "suspects"), [
    ([heartbeat(0, waiting=False, at="synchronize"), SLEEPS, heartbeat(3, waiting=False, at="backward")], [2]),
    ([heartbeat(rank, waiting=False, at="backward") for rank in (0, 2, 3)], []),
    ([heartbeat(rank, waiting=False, at="synchronize") for rank in (0, 2, 3)], []),
    ([heartbeat(0, at="barrier"), heartbeat(2, at="barrier"), heartbeat(3, at="barrier")], [1]),
    ([heartbeat(0, begun=5), heartbeat(2, begun=5), heartbeat(3, begun=5)], [1]),
])
@pytest.mark.parametrize("at", ["backward", "synchronize"])
def test_rank_in_backward_is_a_suspect_only_if_all_others_certainly_wait(
    others: list[dict[str, Any]], suspects: list[int], at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This rank's deadline has passed in `at`, which Python can't look into. The backend may count no collectives, and
    on a GPU the host has begun all of them."""
    watch = watchdog_of(1, waiting=False)
    monkeypatch.setattr(watchdog, "own_location", lambda: (f"{at} (train.py:9 main)", False))
    watch.begun = lambda: {"0/gloo": 0}
    ranks = [{**each, "ago_s": 0.0} for each in others]
    said = {"is": "ranks", "ranks": ranks, "nodes": [], "start": 0, "more": False}
    line = SimpleNamespace(send=lambda kind: watch.on_message(said) or True)
    watch.connect(line, ["node0", "node0", "node1", "node1"])
    assert [suspect.rank for suspect in watch.suspects(overdue=True)] == suspects


def test_places_of_many_ranks_come_in_pages() -> None:
    """In one message they would be longer than LONGEST, which reads as the end of the connection."""
    watch, longest = watchdog_of(1, waiting=True), "x" * 256
    places = [{**heartbeat(rank), "location": longest, "ago_s": 0.5} for rank in range(6000)]
    nodes = [{"node": node, "why": longest} for node in range(750)]
    messages = pages(places, nodes)
    assert max(len(json.dumps(message)) for message in messages) < network.LONGEST
    assert len(network.encode("ranks", ranks=places, nodes=nodes)) > network.LONGEST
    for _ in range(2):
        for message in messages:
            assert not watch._answered.is_set()
            watch.on_message(message)
        assert watch._answered.is_set()
        assert [each["rank"] for each in watch._heartbeats] == [*range(6000)]
        assert watch.nodes == nodes
        watch._answered.clear()


def test_loop_prints_nothing_while_the_watching_thread_ends_the_process(monkeypatch: pytest.MonkeyPatch):
    watch = watchdog_of(1, waiting=True)
    watch.connect(SimpleNamespace(send=lambda kind: False), ["node0"] * 4)
    watch.on_message(GONE)
    monkeypatch.setattr(watchdog, "set_hard_deadline", lambda timeout_s: None)
    monkeypatch.setattr(watchdog, "leave", lambda *_, **__: None)  # it takes a while
    watch._leave()
    loop = threading.Thread(target=watch.exit_within, args=(PEER_LOST,), daemon=True)
    loop.start()
    loop.join(1.0)
    assert loop.is_alive()


def test_others_leave_for_a_stop_after_rank_0_has_saved(monkeypatch: pytest.MonkeyPatch):
    """Otherwise the loop of rank 0 may first notice that they are gone, and keep the state only in memory."""
    watch, left = watchdog_of(1, waiting=True), list[int]()
    watch.connect(SimpleNamespace(send=lambda kind: False), ["node0"] * 4)
    watch.protect(SimpleNamespace(save_for_stop=lambda: "saved"), timeout_s=60.0)
    monkeypatch.setattr(timing, "LAST_MESSAGE_S", 600.0)
    monkeypatch.setattr(watchdog, "set_hard_deadline", lambda timeout_s: None)
    monkeypatch.setattr(watchdog, "leave", lambda code, *_, **__: left.append(code))
    leaving = threading.Thread(target=watch._leave_for_stop, daemon=True)
    leaving.start()
    leaving.join(0.5)
    assert not left
    watch.on_message({**LOST, "ranks": [0], "code": 143})
    leaving.join(60.0)
    assert left == [143]


@pytest.mark.parametrize(
    "leaves", [lambda watch: watch.exit_within(PEER_LOST), Watchdog.end_steps], ids=["fault", "stop"]
)
def test_stop_does_not_end_a_process_whose_loop_is_leaving(leaves: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    watch, left = watchdog_of(1, waiting=True), list[int]()
    monkeypatch.setattr(watchdog, "set_hard_deadline", lambda timeout_s: None)
    monkeypatch.setattr(watchdog, "leave", lambda code, *_, **__: left.append(code))
    watch.protect(SimpleNamespace(save_for_stop=lambda: "kept"), timeout_s=60.0)
    leaves(watch)
    watch._leave_for_stop()
    assert left == []


def test_state_is_rescued_only_once() -> None:
    watch, kept = watchdog_of(1, waiting=True), list[int]()
    watch.protect(SimpleNamespace(rescue=lambda: kept.append(1)), timeout_s=60.0)
    assert (watch.suspects(), watch.suspects(), kept) == ([], [], [1])


def test_name_of_a_launchers_store_is_resolved_before_lookups_end(monkeypatch: pytest.MonkeyPatch):
    """Otherwise a name that only a resolver knows would not work."""
    connected: list[str] = []
    monkeypatch.setattr(own_agent, "TCPStore", lambda ip, *_, **__: connected.append(ip))
    with socket.create_server(("127.0.0.1", 0)) as store:
        launch = RankEnv(
            rank=1, world_size=2, master_addr="localhost", master_port=store.getsockname()[1], agent_store=True
        )
        own_agent.launchers_store(launch, timeout_s=60.0)
    assert connected == ["127.0.0.1"]
