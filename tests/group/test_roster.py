"""How rank 0 keeps the roster, with a clock that only the test moves."""

import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from train.group.members import Member
from train.group.roster import EARLIER_S, SILENT_S, Roster


class Hall:
    """Rank 0's roster of a group of three, and the ranks that come and answer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now_s)
        self.me = Member(rank=0, world_size=3, host="node0", pid=1000, token="a")
        self.roster = Roster(self.me)

    def enter(self, rank: int, token: str) -> Member:
        member = Member(rank=rank, world_size=3, host="node0", pid=1000 + rank, token=token)
        self.roster.enter(member)
        return member

    def call(self, *answering: str) -> None:
        number = self.roster.call()
        for token in answering:
            self.roster.answer(token, number)

    def present(self) -> list[str]:
        return [member.token for member in self.roster.present()]


@pytest.fixture
def hall(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hall]:
    yield Hall(monkeypatch)
    monkeypatch.undo()


def test_members_are_present_in_the_order_of_their_ranks(hall: Hall):
    hall.enter(2, "c"), hall.enter(1, "b")
    assert hall.roster.call_due
    assert not hall.roster.all_here, "introduced, but they may have died since"
    hall.call("c", "b")
    assert hall.roster.all_here
    assert hall.present() == ["a", "b", "c"]


def test_the_roll_is_not_called_before_it_can_be_complete(hall: Hall):
    hall.enter(2, "c")
    assert not hall.roster.call_due


def test_a_rank_that_died_before_the_last_came_is_not_present(hall: Hall):
    hall.enter(1, "b"), hall.enter(2, "c")
    hall.call("c")
    assert not hall.roster.all_here
    assert hall.present() == ["a", "c"]


def test_a_rank_that_came_back_replaces_its_dead_self_in_a_moment(hall: Hall):
    hall.enter(1, "b"), hall.enter(2, "c")
    hall.call("c")
    hall.enter(1, "b2")
    assert hall.roster.call_due
    hall.call("c", "b2")
    assert not hall.roster.all_here, "the other process may be about to answer"
    assert hall.roster.settling
    hall.now_s += EARLIER_S * 1.1
    assert hall.roster.all_here
    assert hall.roster.claimed_twice() == []
    assert hall.present() == ["a", "b2", "c"]


def test_an_answer_to_an_earlier_call_does_not_count(hall: Hall):
    hall.enter(1, "b"), hall.enter(2, "c")
    hall.call("b", "c")
    hall.call("c")
    hall.roster.answer("b", 1)
    assert hall.present() == ["a", "c"]


def test_two_that_live_beside_each_other_are_both_named(hall: Hall):
    one, two = hall.enter(1, "b"), hall.enter(1, "b2")
    assert hall.roster.call_due
    assert hall.roster.claimed_twice() == [], "as yet both may be one rank that came back"
    hall.call("b2", "b")
    assert hall.roster.claimed_twice() == [one, two]


def test_a_second_process_with_rank_0_is_named(hall: Hall):
    other = hall.enter(0, "a2")
    hall.call("a2")
    assert hall.roster.claimed_twice() == [hall.me, other]


def test_who_falls_silent_is_gone_until_another_takes_the_rank(hall: Hall):
    silent = hall.enter(1, "b")
    hall.call()
    assert hall.roster.gone() == [], "it has time to answer"
    hall.now_s += SILENT_S * 1.1
    assert hall.roster.gone() == [silent]
    assert [member.token for member in hall.roster.living()] == ["a"]
    hall.enter(1, "b2")
    assert hall.roster.gone() == []
    assert [member.token for member in hall.roster.living()] == ["a", "b2"]


def test_a_rank_that_waits_is_not_gone_while_nobody_calls_the_roll(hall: Hall):
    hall.enter(1, "b")
    hall.now_s += 10 * SILENT_S
    assert hall.roster.gone() == []


def test_a_rank_that_reconnects_is_one_member(hall: Hall):
    member = hall.enter(1, "b")
    hall.roster.enter(replace(member, local_ip="192.168.77.1"))
    hall.enter(2, "c")
    hall.call("b", "c")
    assert hall.roster.all_here
    assert [m.local_ip for m in hall.roster.present()] == ["", "192.168.77.1", ""]
