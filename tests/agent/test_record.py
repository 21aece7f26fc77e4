"""The record of a rank: it outlives the rank, and all ranks stop at the step that it names."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rankup.agent.record import NO_LIMIT, PhaseClock, Record
from rankup.agent.votes import MARGIN, StopAgreement
from tests.rigs.jobs import ROOT, environment

# What a rank does before it is killed
RANK = """
import os, signal, sys
from rankup.agent.record import Record
record = Record.at(sys.argv[1])
record.enter("step", 30.0)
record.beat("loop.py:12")
for step in range(1, 1000):
    record.begin(step)
record.waiting = True
print(record.may_begin(1000), flush=True)
sys.stdin.readline()
print(record.may_begin(1000), flush=True)
sys.stdin.readline()
print(record.may_begin(1000), flush=True)
record.finished = True
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_record_outlives_a_killed_process_and_carries_the_agents_answer() -> None:
    record = Record.new(9)
    empty = record.read()
    assert (empty.rank, empty.phase, empty.step, empty.timeout_s) == (9, "start", 0, NO_LIMIT)
    assert (empty.waiting, empty.finished, empty.heartbeat_s) == (False, False, 0.0)
    with subprocess.Popen(
        [sys.executable, "-c", RANK, record.path], env=environment(), cwd=ROOT, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "True\n"
        assert record.ask_to_stop(1000) == 1000
        print(file=process.stdin, flush=True)
        assert process.stdout.readline() == "None\n"
        record.confirmed = 1000
        print(file=process.stdin, flush=True)
        assert process.stdout.readline() == "False\n"
    assert process.returncode == -9
    found = record.read()
    assert (found.rank, found.phase, found.step, found.timeout_s) == (9, "step", 1000, 30.0)
    assert found.heartbeat()["location"] == "loop.py:12"
    assert (found.waiting, found.finished) == (True, True)
    assert empty.entered_s < found.heartbeat_s < found.entered_s


def test_file_with_the_name_of_a_record_is_not_overwritten(tmp_path: Path) -> None:
    """Another PID namespace may have a process with the same id."""
    file = tmp_path / "rankup-records"
    file.write_bytes(bytes(512))
    (tmp_path / "link").symlink_to(file)
    with pytest.raises(FileNotFoundError):
        Record.at(str(tmp_path / "link"))
    assert file.read_bytes() == bytes(512)


def test_records_of_ended_ranks_leave_no_file_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for rank in range(3):
        assert Record.at(Record.new(rank).path).rank == rank
    assert len(os.listdir("/proc/self/fd")) == before


def test_new_step_does_not_wait_and_has_all_its_time() -> None:
    record, now_s = Record.new(), time.monotonic()
    record.enter("step", 30.0, since_s=now_s - 20.0)
    record.waiting = True
    record.begin_anew(7)
    now = record.read()
    assert (now.phase, now.step, now.waiting) == ("step", 7, False)
    assert now.until_s >= now_s + 30.0


def test_extended_deadline_counts_from_now() -> None:
    record, now_s = Record.new(), time.monotonic()
    record.enter("save", 5.0, since_s=now_s - 1000.0)
    record.extend(30.0)
    assert (record.phase, record.entered_s) == ("save", now_s - 1000.0)
    assert record.until_s >= now_s + 30.0


def test_reader_never_sees_a_half_written_number() -> None:
    record = Record.new()
    record.begin_anew(1)
    code = ("import sys\nfrom rankup.agent.record import Record\nrecord = Record.at(sys.argv[1])\n"
            "for step in range(2, 200_001):\n    record.begin_anew(step)")
    with subprocess.Popen([sys.executable, "-c", code, record.path], env=environment(), cwd=ROOT) as process:
        while process.poll() is None:
            assert all(record.step and record.began_s for _ in range(1000))
    assert record.step == 200_000


# The step at which all ranks stop, see tests/agent/simulator.py -------------------------------------------------------


def test_refused_step_is_raised_by_twice_the_margin_after_all_answers() -> None:
    agreement = StopAgreement("ab")
    steps = []
    for furthest in (7, 20, 100):
        for who in ("a", "a", "stranger"):
            assert not agreement.answer(who, stop=agreement.step, step=furthest)
        assert agreement.answer("b", stop=agreement.step, step=0)
        steps.append(agreement.step)
    assert steps == [7 + MARGIN, 20 + 2 * MARGIN, 100 + 4 * MARGIN]
    assert not agreement.confirmed
    assert [agreement.answer(who, stop=agreement.step, step=4) for who in "ab"] == [False, True]
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
    assert clock.seconds()["save"] == 11.0  # the current phase counts before it ends
    clock.enter("step")
    now_s += 3
    clock.wait_for_data(2.0)
    assert (clock.seconds()["step"], clock.seconds()["data"]) == (8.0, 2.0)
    clock.enter("rollout")  # the code that yields the next batch enters it; the loop waits 7 s for that batch
    now_s += 6
    clock.enter("step")
    now_s += 1
    clock.wait_for_data(7.0)
    assert clock.seconds() == {"start": 0.0, "join": 2.0, "step": 8.0, "save": 11.0, "data": 3.0, "rollout": 6.0}


def test_stopped_rank_does_not_seem_alive_through_its_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    record = Record.new()
    record.enter("join", since_s=20.0)
    record.heartbeat_s = 30.0
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    assert record.heartbeat()["ago_s"] == 70.0
    record.enter("step", since_s=90.0)  # since then it may not have had the time for a heartbeat
    assert record.heartbeat()["ago_s"] == 10.0
    record.enter("script", since_s=90.0)  # a script may send no heartbeats
    assert record.heartbeat()["ago_s"] == 0.0
