"""The record of a rank: it outlives the rank, all ranks stop by it, and health checks find it."""

import json
import os
import random
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rankup.agent import record as health
from rankup.agent.record import (
    HEALTHY_STEP_S,
    MARGIN,
    NO_LIMIT,
    NO_STOP,
    SILENT_S,
    SIZE,
    PhaseClock,
    Records,
    RecordWriter,
    StopAgreement,
    find_records,
    judge,
)
from tests.rigs.jobs import ROOT, environment

# As a rank does it, and then it is killed
RANK = """
import json, os, signal, sys
from rankup.agent.record import RecordWriter
record = RecordWriter(json.loads(sys.argv[1]))
record.enter("step", 30.0)
record.set_place("loop.py:12")
for step in range(1, 1001):
    record.begin(step)
record.wait(True)
print(record.may_begin(1000), flush=True)
sys.stdin.readline()
print(record.may_begin(1000), flush=True)
sys.stdin.readline()
print(record.may_begin(1000), flush=True)
record.settle()
record.finish()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_record_of_a_killed_process_stays_and_the_agent_s_answer_reaches_it() -> None:
    records = Records(3, first_rank=8)
    empty = records.of(0).read()
    assert (empty.rank, empty.phase, empty.step, empty.place, empty.timeout_s) == (8, "start", 0, "", NO_LIMIT)
    assert (empty.waiting, empty.finished, empty.settled, empty.signed_s) == (False, False, False, 0.0)
    others = records.of(0).read(), records.of(2).read()
    with subprocess.Popen(
        [sys.executable, "-c", RANK, json.dumps(records.place(1))], env=environment(), cwd=ROOT, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "True\n"
        assert records.of(1).ask_to_stop(1000) == 1000
        print(file=process.stdin, flush=True)
        assert process.stdout.readline() == "None\n"
        records.of(1).confirm_stop(1000)
        print(file=process.stdin, flush=True)
        assert process.stdout.readline() == "False\n"
    assert process.returncode == -9
    found = records.of(1).read()
    assert (found.rank, found.phase, found.step, found.place, found.timeout_s) == (9, "step", 1000, "loop.py:12", 30.0)
    assert (found.waiting, found.finished, found.settled) == (True, True, True)
    assert empty.entered_s < found.signed_s < found.entered_s
    assert (records.of(0).read(), records.of(2).read()) == others
    records.of(1).clear()
    assert replace(records.of(1).read(), entered_s=0) == replace(empty, rank=9, entered_s=0)


@pytest.mark.parametrize("place", [None, {"path": "/proc/self/fd/none", "number": 0}, "file", "other memory", "short"])
def test_record_goes_nowhere_where_its_memory_can_not_be_reached(place: Any, tmp_path: Path) -> None:
    """Another namespace of processes may have another file under the same name, which must stay as it is."""
    if place == "file":
        (tmp_path / "rankup-records").write_bytes(bytes(SIZE))
        place = {"path": str(tmp_path / "rankup-records"), "number": 0}
    elif place == "other memory":
        file = os.memfd_create("somebody-elses")
        os.ftruncate(file, SIZE)
        place = {"path": f"/proc/self/fd/{file}", "number": 0}
    elif place == "short":
        records = Records(1)
        place = {**records.place(0), "number": 1}
    writer = RecordWriter(place)
    assert not writer.shared
    writer.begin(5)
    writer.enter("step", 1.0)
    writer.set_place("here")
    assert writer.may_begin(NO_STOP - 1)
    if place and Path(place["path"]).exists() and place["number"] == 0:
        assert Path(place["path"]).read_bytes() == bytes(SIZE)


def test_a_step_that_begins_waits_for_nobody_and_has_all_its_time() -> None:
    record, now_s = RecordWriter(None), time.monotonic()
    record.enter("step", 30.0, since_s=now_s - 20.0)
    record.wait(True)
    record.begin_anew(7)
    now = record.read()
    assert (now.phase, now.step, now.waiting) == ("step", 7, False)
    assert now.until_s >= now_s + 30.0


# The step at which all ranks stop, in every order of events that chance brings ------------------------------------


class Rank:
    """Trains on its own record; `step` steps are finished. It may be ahead of the slowest by one, as an exchange of
    gradients allows."""

    def __init__(self, step: int) -> None:
        self.record, self.step, self.stopped = RecordWriter(None), step, False
        self.record.begin(step)

    def run(self, all_ranks: list["Rank"]) -> Iterator[None]:
        while True:
            self.record.begin(self.step)
            yield  # the agent may come between the two halves of `may_begin`
            while (may_begin := self.record.may_begin(self.step)) is None:
                yield
            if not may_begin:
                self.stopped = True
                return
            while min(rank.step for rank in all_ranks) < self.step:
                yield  # it waits in the exchange
            self.step += 1
            yield


class Member:
    """An agent: it has ranks, and messages on their way in both directions."""

    def __init__(self, ranks: list[Rank]) -> None:
        self.ranks = ranks
        self.inbox: deque[tuple[str, int]] = deque()
        self.outbox: deque[tuple[int, int]] = deque()

    def take(self) -> None:
        kind, stop = self.inbox.popleft()
        if kind == "prepare":
            self.outbox.append((stop, max(rank.record.ask_to_stop(stop) for rank in self.ranks)))
        else:
            for rank in self.ranks:
                rank.record.confirm_stop(stop)


def stop_all(chance: random.Random, members: list[Member]) -> int:
    """Let everything happen in an order that `chance` draws. Returns the step."""
    ranks = [rank for member in members for rank in member.ranks]
    running = {rank: rank.run(ranks) for rank in ranks}
    agreement = StopAgreement(members)
    for member in members:
        member.inbox.append(("prepare", agreement.step))
    speeds = {rank: chance.choice([1, 3, 30]) for rank in ranks}
    for _ in range(200_000):
        if all(rank.stopped for rank in ranks):
            return agreement.step
        member = chance.choice(members)
        event = chance.random()
        if event < 0.1 and member.inbox:
            member.take()
        elif event < 0.2 and member.outbox:
            stop, step = member.outbox.popleft()
            if agreement.hear(member, stop=stop, step=step):
                for each in members:
                    each.inbox.append(("confirm" if agreement.confirmed else "prepare", agreement.step))
        else:
            rank = chance.choice(member.ranks)
            for _ in range(speeds[rank]):
                next(running[rank], None)
    raise AssertionError("they never came to a step at which all stop")


@pytest.mark.parametrize("members", [1, 2, 3])
def test_all_ranks_stop_before_the_same_step_whatever_comes_first(members: int) -> None:
    for seed in range(150):
        chance = random.Random(seed)
        began = chance.choice([0, 1000])
        group = [Member([Rank(began) for _ in range(chance.choice([1, 2]))]) for _ in range(members)]
        step = stop_all(chance, group)
        assert {rank.step for member in group for rank in member.ranks} == {step}, seed
        assert step > began


def test_refused_step_is_raised_by_twice_the_margin_once_each_member_has_answered_the_last_question() -> None:
    agreement = StopAgreement("ab")
    steps = []
    for furthest in (7, 20, 100):
        asked = agreement.step
        for who in ("a", "a", "stranger"):
            assert not agreement.hear(who, stop=asked, step=furthest)
        assert agreement.hear("b", stop=asked, step=0)
        assert not agreement.hear("a", stop=asked, step=999)
        steps.append(agreement.step)
    assert steps == [7 + MARGIN, 20 + 2 * MARGIN, 100 + 4 * MARGIN]
    assert not agreement.confirmed
    assert [agreement.hear(who, stop=steps[-1], step=4) for who in "abb"] == [False, True, False]
    assert agreement.confirmed


# The clock ------------------------------------------------------------------------------------------------------------


def test_phases_add_up_to_the_age_of_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    clock = PhaseClock("start")
    for phase, lasts_s in (("join", 2.0), ("step", 3.0), ("step", 4.0), ("save", 1.0)):
        clock.enter(phase)
        now_s += lasts_s
    assert clock.seconds() == {"start": 0.0, "join": 2.0, "step": 7.0, "save": 1.0, "data": 0.0}
    now_s += 10
    assert clock.seconds()["save"] == 11.0  # the present phase counts before it ends
    clock.enter("step")
    now_s += 3
    clock.wait_for_data(2.0)
    assert (clock.seconds()["step"], clock.seconds()["data"]) == (8.0, 2.0)
    clock.enter("rollout")  # by who gives the next batch, for which the loop waits 7 s
    now_s += 6
    clock.enter("step")
    now_s += 1
    clock.wait_for_data(7.0)
    assert clock.seconds() == {"start": 0.0, "join": 2.0, "step": 8.0, "save": 11.0, "data": 3.0, "rollout": 6.0}


def test_rank_that_is_stopped_does_not_live_because_its_agent_does(monkeypatch: pytest.MonkeyPatch) -> None:
    found = replace(RecordWriter(None).read(), entered_s=20.0, signed_s=30.0)
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    assert found.sign()["ago_s"] == 70.0
    assert replace(found, entered_s=90.0).sign()["ago_s"] == 10.0  # it may not have had the time to say more


# The health check -----------------------------------------------------------------------------------------------------


def test_health_check_finds_the_ranks_of_an_agent_and_one_without() -> None:
    """Each once, however many processes have its memory; through the command as a container's engine runs it."""
    records, alone = Records(2, first_rank=4711), RecordWriter(None, rank=5711)
    writers = [RecordWriter(records.place(0)), alone]
    for writer in writers:
        writer.set_place("here")
    found = find_records(str(os.getpid()))
    assert [record.rank for record in found if record.rank in range(4711, 5712)] == [4711, 4712, 5711]
    check = [sys.executable, "-I", health.__file__]
    said = subprocess.run(check, capture_output=True, text=True, cwd="/", check=False)
    assert said.returncode == 1
    for text in ("rank 4711: start (step 0) for ", "rank 4712: not started", "rank 5711: start "):
        assert said.stdout.count(text) == 1


@pytest.mark.parametrize(("phase", "timeout_s", "waiting", "later_s", "said"), [
    ("save", 5.0, False, 4.0, ""),
    ("save", 5.0, False, 6.0, "hung"),
    ("step", 2000.0, False, HEALTHY_STEP_S + 1, "hung"),
    ("step", 2000.0, True, HEALTHY_STEP_S + 1, "waiting for another rank"),
    ("evaluation", 2000.0, False, HEALTHY_STEP_S + 1, ""),
    ("start", NO_LIMIT, False, 9999.0, ""),
])
def test_health_is_a_matter_of_the_deadline_and_of_a_step_that_is_too_long(
    phase: str, timeout_s: float, waiting: bool, later_s: float, said: str
) -> None:
    record = RecordWriter(None, rank=3)
    record.enter(phase, timeout_s)
    record.begin(7)
    record.wait(waiting)
    now_s = time.monotonic() + later_s
    found = replace(record.read(), signed_s=now_s)
    good, line = judge(found, now_s=now_s, healthy_step_s=HEALTHY_STEP_S)
    assert line == f"rank 3: {phase} (step 7) for {later_s:.0f} s" + (f", {said}" if said else "")
    assert good == (not said)
    good, line = judge(replace(found, signed_s=now_s - SILENT_S - 1), now_s=now_s, healthy_step_s=HEALTHY_STEP_S)
    assert not good
    assert line.endswith("no sign of life for 11 s: stopped or frozen")
