"""How rank 0 reads the roster. The store is in memory, and the ranks are rows in it."""

import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from torch.distributed import HashStore

from train.group.members import Member, Roster, describe_claims, describe_differences, describe_missing, ranges


class Hall:
    """A store, and rank 0's view of it, with a clock that only the test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store, self.roster, self.now_s = HashStore(), Roster(), 100.0
        self.lines = ""
        monkeypatch.setattr(time, "monotonic", lambda: self.now_s)

    def enter(self, rank: int, token: str) -> Member:
        member = Member(rank=rank, world_size=3, host="node0", pid=1000 + len(self.lines), token=token)
        self.lines += member.to_json() + "\n"
        self.store.set("roster", self.lines)
        return member

    def pass_time(self, *alive: str, seconds: float = 0.1) -> None:
        for token in alive:
            self.store.add(f"alive/{token}", 1)
        self.now_s += seconds
        self.roster.look(self.store)

    def present(self) -> list[str]:
        return [member.token for member in self.roster.present()]


@pytest.fixture
def hall(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hall]:
    yield Hall(monkeypatch)
    monkeypatch.undo()


def test_members_are_present_in_the_order_of_their_ranks(hall: Hall):
    for rank, token in ((2, "c"), (0, "a"), (1, "b")):
        hall.enter(rank, token)
    hall.pass_time("a", "b", "c")
    assert hall.present() == [], "introduced, but not yet seen alive after the last one came"
    hall.pass_time("a", "b", "c")
    assert hall.present() == ["a", "b", "c"]


def test_a_rank_that_died_before_the_last_came_is_not_present(hall: Hall):
    hall.enter(0, "a"), hall.enter(1, "b")
    hall.pass_time("a", "b")
    hall.enter(2, "c")
    for _ in range(3):
        hall.pass_time("a", "c")
    assert hall.present() == ["a", "c"]


def test_a_rank_that_came_back_replaces_its_dead_self(hall: Hall):
    hall.enter(0, "a"), hall.enter(1, "b")
    hall.pass_time("a", "b")
    # It gave a last sign that rank 0 sees together with its successor
    hall.enter(1, "b2")
    hall.pass_time("a", "b", "b2")
    hall.pass_time("a", "b2")
    assert hall.roster.claimed_twice() == []
    assert hall.present() == ["a", "b2"]


def test_two_that_live_beside_each_other_are_both_named(hall: Hall):
    one, two = hall.enter(1, "b"), hall.enter(1, "b2")
    hall.pass_time("b", "b2")
    assert hall.roster.claimed_twice() == [], "as yet both may be one rank that came back"
    hall.pass_time("b", "b2")
    assert hall.roster.claimed_twice() == [one, two]
    said = f"rank 1 was claimed twice: by node0 (pid {one.pid}) and by node0 (pid"
    assert describe_claims([one, two]).startswith(said)


def test_who_falls_silent_is_gone_until_another_takes_the_rank(hall: Hall):
    hall.enter(0, "a")
    silent = hall.enter(1, "b")
    hall.pass_time("a", "b")
    hall.pass_time("a", seconds=3)
    assert hall.roster.gone() == [silent]
    hall.enter(1, "b2")
    hall.pass_time("a", "b2")
    assert hall.roster.gone() == []


def test_a_rank_that_reconnects_is_one_member(hall: Hall):
    member = hall.enter(0, "a")
    hall.pass_time("a")
    hall.lines += replace(member, local_ip="192.168.77.1").to_json() + "\n"
    hall.store.set("roster", hall.lines)
    hall.pass_time("a")
    assert [m.local_ip for m in hall.roster.living()] == ["192.168.77.1"]


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([], ""), ([3], "3"), ([0, 1, 2, 4, 6, 7], "0-2, 4, 6-7"), ([2, 1], "1-2"), (range(512), "0-511")],
)
def test_ranges_are_short(numbers: list[int], text: str):
    assert ranges(numbers) == text


def members(*ranks: int, per_node: int | None = None) -> list[Member]:
    size = per_node or 1
    return [Member(rank=r, host=f"host{r // size}", pid=r, node=r // size if per_node else None) for r in ranks]


@pytest.mark.parametrize(
    ("present", "gone", "per_node", "text"),
    [
        (members(0), [], None, "ranks 1-3 of 4 have not joined after 5 s (joined: 0 on host0)"),
        (members(0, 1, 2, per_node=2), [], 2,
         "rank 3 of 4 (on host1) has not joined after 5 s (joined: 0-1 on host0; 2 on host1)"),
        (members(0, 1, per_node=2), [], 2,
         "ranks 2-3 of 4 (on node 1 of 2) have not joined after 5 s (joined: 0-1 on host0)"),
        (members(0, 1, 3), members(2), None,
         "rank 2 of 4 has not joined after 5 s (joined: 0 on host0; 1 on host1; 3 on host3); "
         "rank 2 on host2 (pid 2) had joined, but fell silent"),
        (members(0, 1, 2, 3, 3), [], None,
         "all 4 ranks came, but never at the same time, after 5 s "
         "(seen: 0 on host0; 1 on host1; 2 on host2; 3 on host3)"),
    ],
)
def test_missing_ranks_are_named_with_what_is_known(
    present: list[Member], gone: list[Member], per_node: int | None, text: str
):
    assert describe_missing(present, gone, world_size=4, local_world_size=per_node, waited_s=5) == text


def test_differences_are_grouped_by_value():
    fingerprint = [{"torch version": "2.14.1", "setting lr": lr} for lr in ("0.1", "0.2", "0.1", "0.2")]
    found = [Member(rank=r, host=f"host{r // 2}", fingerprint=t) for r, t in enumerate(fingerprint)]
    assert describe_differences(found) == (
        "setting lr must be the same on all ranks, got 0.1 on ranks 0, 2 (host0, host1) and 0.2 on ranks 1, 3 (host0, "
        "host1).\n"
        "Start all ranks with the same program and settings."
    )
    assert describe_differences(found[::2]) == ""


def test_a_fingerprint_that_one_rank_does_not_know_is_a_difference():
    found = [Member(rank=0, host="a", fingerprint={"setting new": "1"}), Member(rank=1, host="b")]
    assert "setting new must be the same on all ranks, got 1 on rank 0 (a) and nothing on rank 1 (b)." in (
        describe_differences(found)
    )


def test_a_member_of_another_version_is_understood():
    assert Member.from_json('{"rank": 1, "world_size": 2, "host": "a", "unheard_of": 3}') == Member(1, 2, "a")


def test_one_rank_of_each_machine_speaks_for_all_of_it():
    ranks = [Member(rank=r, host=f"host{r // 2}", local_rank=r % 2) for r in range(4)]
    assert [member.prints_for_host(ranks) for member in ranks] == [True, False, True, False]
    assert ranks[1].prints_for_host([ranks[1], ranks[2]]), "the first of the machine is not there"
    twins = [Member(rank=r, host="localhost") for r in range(2)]
    assert all(member.prints_for_host(twins) for member in twins), "two machines may have one name"
