"""Who the ranks are to each other, and what is said of missing, double and different ones."""

from dataclasses import replace

import pytest
from torch.distributed import HashStore

from rankup.env.rank_env import ranges
from train.group import keys
from train.group.members import (
    Hosts,
    Member,
    Members,
    describe_claims,
    describe_differences,
    describe_missing,
    speakers,
)


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
    settings = {"x": {"torch version": "2.14.1", "setting lr": "0.1"}}
    settings["y"] = settings["x"] | {"setting lr": "0.2"}
    found = [Member(rank=r, host=f"host{r // 2}", digest=digest) for r, digest in enumerate("xyxy")]
    assert describe_differences(found, settings) == (
        "setting lr must be the same on all ranks, got 0.1 on ranks 0, 2 (host0, host1) and 0.2 on ranks 1, 3 (host0, "
        "host1).\n"
        "Start all ranks with the same program and settings."
    )


def test_a_setting_that_one_rank_does_not_know_is_a_difference():
    found = [Member(rank=0, host="a", digest="x"), Member(rank=1, host="b", digest="y")]
    assert "setting new must be the same on all ranks, got 1 on rank 0 (a) and nothing on rank 1 (b)." in (
        describe_differences(found, {"x": {"setting new": "1"}, "y": {}})
    )


def test_both_processes_of_a_rank_are_named():
    said = describe_claims([Member(1, host="node0", pid=7), Member(1, host="node1", pid=8)])
    assert said.startswith("rank 1 was claimed twice: by node0 (pid 7) and by node1 (pid 8).")


def test_a_message_to_all_names_so_many_machines_and_no_more():
    said = describe_missing(members(*range(1000)), [], world_size=1001, local_world_size=None, waited_s=5)
    assert "63 on host63; 64 on host64" not in said
    assert said.endswith("; and ranks on 936 more machines)")


def test_a_rank_reads_of_the_others_only_whom_it_is_asked_about():
    store = HashStore()
    for rank in range(100):
        store.set(keys.member(rank), Member(rank, host=f"host{rank}").to_json())
    hosts = Hosts(Members(store, 100, myself=50))
    for rank in range(100):
        store.set(keys.member(rank), Member(rank, host="read later").to_json())
    assert [hosts[rank] for rank in (0, 46, 50, 54)] == ["host0", "host46", "host50", "host54"], "read at once"
    assert hosts[90] == "read later"
    assert hosts[91] == "read later"
    assert len(list(hosts)) == 100


def test_who_is_on_every_rank_is_asked_in_one_request():
    class Counting(HashStore):
        requests = 0

        def multi_get(self, names: list[str]) -> list[bytes]:
            Counting.requests += 1
            return [self.get(name) for name in names]

    store = Counting()
    for rank in range(100):
        store.set(keys.member(rank), Member(rank, host=f"host{rank}").to_json())
    hosts = Hosts(Members(store, 100, myself=50))
    assert list(hosts) == [f"host{rank}" for rank in range(100)]
    assert Counting.requests == 2


def test_without_a_store_the_names_that_are_known_remain():
    class Leaving(HashStore):
        def multi_get(self, names: list[str]) -> list[bytes]:
            if "member/90" in names:
                raise RuntimeError("the store's process is gone")
            return [self.get(name) for name in names]

    store = Leaving()
    for rank in range(100):
        store.set(keys.member(rank), Member(rank, host=f"host{rank}").to_json())
    hosts = list(Hosts(Members(store, 100, myself=50)))
    assert (hosts[50], hosts[90]) == ("host50", "?")


def test_a_member_of_another_version_is_understood():
    assert Member.from_json('{"rank": 1, "world_size": 2, "host": "a", "unheard_of": 3}') == Member(1, 2, "a")


def test_one_rank_of_each_machine_speaks_for_all_of_it():
    ranks = [Member(rank=r, host=f"host{r // 2}", local_rank=r % 2, token=str(r)) for r in range(4)]

    def speaking(those: list[Member]) -> list[int]:
        return [member.rank for member in those if member.prints_for_host(speakers(those))]

    assert speaking(ranks) == [0, 2]
    assert speaking([ranks[1], ranks[2]]) == [1, 2], "the first of the machine is not there"
    twins = [replace(ranks[0], host="localhost"), replace(ranks[2], host="localhost")]
    assert speaking(twins) == [0, 2], "two machines may have one name"
