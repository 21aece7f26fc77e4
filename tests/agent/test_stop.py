"""The rule by which all ranks stop before the same step, in every order of events that chance brings."""

import random
from collections import deque
from collections.abc import Iterator

import pytest

from rankup.agent.record import RecordWriter
from rankup.agent.stop import MARGIN, StopAgreement


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


def stop_all(chance: random.Random, members: list[Member]) -> tuple[int, int]:
    """Let everything happen in an order that `chance` draws. Returns the step, and how often one was refused."""
    ranks = [rank for member in members for rank in member.ranks]
    running = {rank: rank.run(ranks) for rank in ranks}
    agreement = StopAgreement(members)
    for member in members:
        member.inbox.append(("prepare", agreement.step))
    refused, speeds = -1, {rank: chance.choice([1, 3, 30]) for rank in ranks}
    for _ in range(200_000):
        if all(rank.stopped for rank in ranks):
            return agreement.step, refused
        member = chance.choice(members)
        event = chance.random()
        if event < 0.1 and member.inbox:
            member.take()
        elif event < 0.2 and member.outbox:
            stop, step = member.outbox.popleft()
            if agreement.hear(member, stop=stop, step=step):
                refused += not agreement.confirmed
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
        step, _ = stop_all(chance, group)
        assert {rank.step for member in group for rank in member.ranks} == {step}, seed
        assert step > began


def test_a_refused_step_is_raised_by_twice_the_margin() -> None:
    agreement = StopAgreement("ab")
    steps = []
    for furthest in (7, 20, 100):
        assert not agreement.hear("a", stop=agreement.step, step=furthest)
        assert agreement.hear("b", stop=agreement.step, step=0)
        steps.append(agreement.step)
    assert steps == [7 + MARGIN, 20 + 2 * MARGIN, 100 + 4 * MARGIN]
    assert not agreement.confirmed


def test_only_the_answer_of_each_member_to_the_last_question_counts() -> None:
    agreement = StopAgreement("ab")
    assert not agreement.hear("a", stop=0, step=3)
    assert not agreement.hear("a", stop=0, step=3)
    assert not agreement.hear("stranger", stop=0, step=3)
    assert agreement.hear("b", stop=0, step=3)
    assert not agreement.hear("a", stop=0, step=99)
    assert not agreement.hear("a", stop=5, step=3)
    assert agreement.hear("b", stop=5, step=4)
    assert agreement.confirmed
    assert not agreement.hear("b", stop=5, step=9)


def test_a_rank_that_nobody_asked_begins_its_step_and_one_that_is_asked_waits_for_the_answer() -> None:
    record = RecordWriter(None)
    assert record.may_begin(7)
    assert record.ask_to_stop(9) == 7
    assert record.may_begin(8)
    assert record.may_begin(9) is None
    assert record.ask_to_stop(11) == 9
    assert record.may_begin(9)
    record.confirm_stop(11)
    assert record.may_begin(10)
    assert record.may_begin(11) is False
