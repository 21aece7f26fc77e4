"""How the members of a job meet, lose each other and meet again.

Most members here are puppets, see `meeting_room`; test_leader_connection.py tests a member's own side.
test_membership.py and test_launch.py kill and stop real processes."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest

from rankup import timing
from rankup.agent import leader_connection
from rankup.agent.network import LONGEST, encode
from rankup.agent.protocol import describe_missing, differences
from rankup.agent.quorum import NONE, claims, outvoted, without
from rankup.env.node_env import Limits, NodeEnv
from rankup.errors import USER_MISTAKE, JoinError, UserError
from rankup.timing import FOUND_S, NOTICE_S
from tests.rigs.meeting_room import HELLO, Puppet, all_hear, asynchronous, get_ready, member, room, until

# A number of nodes that may change ------------------------------------------------------------------------------------

ANY = Limits(1, 3, wait_s=2.0)


def basis(voters: int, used: int, **more: Any) -> dict[str, Any]:
    known = [[f"token{node}", "127.0.0.1", 1, f"node {node}"] for node in range(voters)]
    tokens = [token for token, *_ in known]
    return {"n": 7, "v": 0, "voters": tokens, "used": tokens[:used], "known": known, "job": "job", **more}


@pytest.mark.parametrize(
    ("voters", "used", "here", "goes_on"),
    [
        (3, 3, (0,), False), (3, 3, (1, 2), True), (3, 2, (1, 2), True), (2, 2, (0,), True), (2, 2, (1,), False),
        (4, 4, (0, 3), True), (4, 4, (1, 2), False), (5, 2, (2, 3, 4), False), (5, 2, (1, 3, 4), True),
        (3, 3, (2, 1), True),  # the leader comes first
    ],
)
@asynchronous
async def test_at_most_one_part_of_a_job_continues(voters: int, used: int, here: tuple[int, ...], goes_on: bool):
    """A majority may, or the half with the leader, but never spares alone."""
    async with room(member(here[0], of=5), ANY) as there:
        puppets = [await there.enter(member(node, of=5), n=7, basis=basis(voters, used)) for node in here]
        await there.pass_time(3.0, *puppets)
        if goes_on:
            said = await there.agree(puppets[: len(here)])
            assert said["n"] == 8
            assert said["basis"]["used"][0] == f"token{here[0]}"
        else:
            await there.pass_time(ANY.wait_s + NOTICE_S, *puppets)
            said = await puppets[0].hears("waiting")
            why = "no majority" if 2 * len(here) <= voters else "none of those that trained"
            assert said["text"].startswith(f"{len(here)} of the {voters} nodes of membership 7 are here, {why}")


@pytest.mark.parametrize("here", [(0, 1), (2, 3)])
def test_each_half_must_claim_the_next_membership_in_a_shared_folder(here: tuple[int, int]):
    half = [f"token{node}" for node in here]
    assert outvoted(basis(4, 4), half, shared=True) == ""
    assert claims(basis(4, 4), half) == {7}
    assert not claims(basis(4, 4), [*half, f"token{3 - here[0]}"])
    assert not claims(NONE, half), "a first job must not claim anything, or no other could follow"
    assert outvoted(basis(4, 4), half[:1], shared=True)


def test_node_that_left_has_no_vote_in_the_last_memberships():
    left = without(basis(3, 2, before=[{"n": 6, "voters": ["token0", "token3"]}]), "token0")
    assert left == {"voters": ["token1", "token2"], "before": [{"n": 6, "voters": ["token3"]}], "left": True}


@asynchronous
async def test_half_that_cannot_claim_the_next_membership_proposes_nothing():
    """Its members would take the proposal for newer than the other half's commit, and impose it on others."""
    asked = list[tuple[str, int]]()

    async def claim(job: str, n: int) -> bool:
        asked.append((job, n))
        return len(asked) > 1

    async with room(member(2, of=5), ANY, claim) as there:
        puppets = [await there.enter(member(node, of=5), n=7, basis=basis(4, 4)) for node in (2, 3)]
        await there.pass_time(ANY.wait_s + 2.0, *puppets)
        await until(lambda: asked)
        await there.nothing_is_said_to(*puppets)
        await there.pass_time(NOTICE_S, *puppets)
        for said in await all_hear("waiting", puppets):
            assert said["text"] == "another part of the job goes on, or --shared-dir does not answer"
        await there.pass_time(1.0, *puppets)
        assert (await there.agree(puppets))["n"] == 8
    assert asked == [("job", 7)] * 2


@asynchronous
async def test_uncommitted_proposal_counts_only_with_the_membership_before_it():
    """Nodes 2 to 4 may not know of the proposal, and have the majority of the membership before it."""
    async with room(member(0, of=5), ANY) as there:
        last = basis(3, 3, before=[{"n": 6, "voters": [f"token{node}" for node in range(5)]}])
        puppets = [await there.enter(member(node, of=5), n=7, basis=last) for node in (0, 1)]
        await there.pass_time(ANY.wait_s + NOTICE_S, *puppets)
        for puppet in puppets:
            assert "2 of the 5 nodes of membership 6 are" in (await puppet.hears("waiting"))["text"]
        puppets.append(await there.enter(member(2, of=5)))
        said = await there.agree(puppets)
        assert not said["basis"]["before"]


@asynchronous
async def test_leader_announces_its_own_uncommitted_proposal():
    """Of two leaders that know the same committed membership, the one with the newer proposal continues."""
    async with room(limits=Limits(2, 3, wait_s=0.0)) as here:
        puppets = await here.three()
        await here.agree(puppets)
        here.leader.lose(here.leader.seats.members[1], "its script ended")
        here.leader.tick()
        await all_hear("lost", puppets)
        n = (await all_hear("propose", puppets))[0]["n"]
        for puppet in puppets:
            puppet.vanish()
        await until(lambda: not here.leader.seats.members)
        assert (await (await here.connect()).receive())["n"] == n


@asynchronous
async def test_spare_may_lead_from_a_membership_that_it_never_heard_proposed():
    """It came later, and the nodes in use have left. Nobody joins a leader that knows less than itself."""
    last = {**basis(4, 2), "voters": ["token2", "token3"], "left": True}
    async with room(member(2, of=5), Limits(2, 3, wait_s=0.0)) as there:
        puppets = [await there.enter(member(2, of=5), n=7, basis=last)]
        await until(lambda: there.leader.seats.members)
        assert (await (await there.connect()).receive())["formed"] == 7
        puppets.append(await there.enter(member(3, of=5), n=7, basis=last))
        await there.pass_time(1.0, *puppets)
        assert (await there.agree(puppets))["n"] == 8


@asynchronous
async def test_committed_membership_beats_a_proposal_with_the_same_number():
    """Another part of the job may have made the proposal, with voters that the continuing job does not have."""
    async with room(member(0, of=5), ANY) as there:
        puppets = [await there.enter(member(0, of=5), n=7, basis=basis(2, 2))]
        await there.pass_time(FOUND_S + 1, *puppets)
        proposed = (await puppets[0].hears("propose"))["basis"]
        puppets[0].send("ready", n=8, problem="")
        committed = (await puppets[0].hears("commit"))["basis"]
        there.leader.lose(there.leader.seats.members[0], "its script ended")
    async with room(member(1, of=5), ANY) as there:
        others = {"voters": ["token2", "token3", "token4"], "used": ["token2", "token3", "token4"]}
        puppets = [await there.enter(member(1, of=5), n=8, basis={**proposed, "voters": ["token1", "token2"]}),
                   await there.enter(member(2, of=5), n=8, basis={**committed, **others})]
        await there.pass_time(ANY.wait_s + NOTICE_S, *puppets)
        assert "1 of the 3 nodes of membership 8 are here" in (await puppets[0].hears("waiting"))["text"]


@asynchronous
async def test_proposal_of_a_cut_off_leader_is_older_than_the_others_commit():
    """Such a leader loses its members one by one, and proposes again each time, with higher numbers."""
    async with room(member(1, of=5), ANY) as there:
        last, ours, theirs = ([f"token{node}" for node in nodes] for nodes in (range(5), (0, 1, 4), (2, 3, 4)))
        proposed = basis(5, 5, before=[{"n": 7, "voters": last}]) | {"n": 10, "voters": ours, "used": ours}
        committed = basis(5, 5) | {"n": 8, "v": 1, "voters": theirs, "used": theirs}
        puppets = [await there.enter(member(node, of=5), n=10, basis=proposed) for node in (1, 0)]
        puppets.append(await there.enter(member(4, of=5), n=8, basis=committed))
        await there.pass_time(ANY.wait_s + NOTICE_S, *puppets)
        for said in await all_hear("waiting", puppets):
            assert said["text"].startswith("1 of the 3 nodes of membership 8 are here, no majority")


@asynchronous
async def test_spare_must_know_a_proposal_before_its_commit_but_gets_nobodys_place():
    async with room(member(0, of=3), Limits(1, 2, wait_s=0.0)) as here:
        used = [await here.enter(member(rank, of=3)) for rank in (0, 2)]
        await here.agree(used)
        spare = await here.enter(member(1, of=3))
        await spare.hears("spare")
        here.leader.lose(here.leader.seats.members[0], "its script ended")
        await all_hear("lost", (*used, spare))
        here.leader.tick()
        await get_ready(used)
        n = (await spare.hears("propose"))["n"]
        await here.nothing_is_said_to(*used)
        spare.send("ready", n=n, problem="")
        said = (await used[0].hears("commit"))["basis"]
        assert (said["used"], said["voters"]) == (["token0", "token2"], ["token0", "token2", "token1"])


@pytest.mark.parametrize("called", [[False], [True, True]])
@asynchronous
async def test_new_node_0_founds_no_job_while_members_may_still_look_for_their_leader(called: list[bool]):
    """The leader that they look for may be cut off from node 0."""
    async with room(member(0, of=3), Limits(1, 3, wait_s=0.0)) as here:
        puppet = await here.enter(member(0, of=3))
        for call in called:
            if call:
                link = await here.connect()
                await link.receive()
                link.send("leads", n=2, formed=2, running=False, token="token2", port=0, job="job")
                with pytest.raises(ConnectionError):
                    await link.receive()  # the message has arrived
            await here.pass_time(FOUND_S - 1, puppet)
        await here.nothing_is_said_to(puppet)
        await here.pass_time(2.0, puppet)
        assert (await puppet.hears("propose"))["n"] == 1


@asynchronous
async def test_ranks_do_not_stop_for_a_newcomer_that_still_imports():
    async with room(member(0, of=2), Limits(1, 2, wait_s=0.0)) as here:
        first = await here.enter(member(0, of=2))
        await here.pass_time(FOUND_S + 1, first)
        await here.agree([first])
        new = await here.enter(member(1, of=2))
        new.send("alive", ranks=[], warm=False)
        await here.pass_time(3.0, first)
        assert not here.leader.resizing
        new.send("alive", ranks=[], warm=True)
        await until(lambda: [here.leader.tick(), here.leader.resizing][1])


@pytest.mark.parametrize("most", [1, 3])
@asynchronous
async def test_node_that_differs_and_comes_during_the_commit_is_turned_away_alone(most: int):
    """It gets no vote, and the ranks do not stop for it."""
    async with room(member(0, of=2), Limits(1, most, wait_s=0.0)) as here:
        begun, prepared = asyncio.Event(), asyncio.Event()

        async def prepare(n: int) -> Mapping[str, Any]:
            begun.set()
            await prepared.wait()
            return {"job": "job"}

        here.prepared = prepare
        first = await here.enter(member(0, of=2), settings={"script": "a"})
        await here.pass_time(FOUND_S + 1, first)
        await get_ready([first])
        await begun.wait()
        wrong = await here.enter(member(1, of=2), settings={"script": "\x1b" + "b" * 300})
        wrong.send("alive", ranks=[], warm=True)
        await until(lambda: len(here.leader.seats.members) == 2)
        prepared.set()
        said = await wrong.hears("over")
        assert said["code"] == USER_MISTAKE
        assert f"script must be a, got \\x1b{'b' * 199}. Start all" in said["text"]
        assert (await first.hears("commit"))["basis"]["voters"] == ["token0"]
        await here.pass_time(3.0, first)
        await here.nothing_is_said_to(first)
        assert [member.token for member in here.leader.seats.members] == ["token0"]


@asynchronous
async def test_nodes_without_a_route_are_left_out_and_the_others_continue(monkeypatch: pytest.MonkeyPatch):
    """A node that returns waits longer each time. Otherwise the ranks would stop for it again and again."""
    monkeypatch.setattr(timing, "RETURN_S", 10.0)
    async with room(limits=Limits(2, 3, wait_s=2.0)) as here:
        puppets = await here.three()
        for puppet, problem in zip(puppets, ("no route to node1", "", "no answer from node0"), strict=True):
            puppet.send("ready", n=(await puppet.hears("propose"))["n"], problem=problem)
        assert (await puppets[2].hears("left_out"))["why"] == "no route to node1"  # never the leader
        await here.pass_time(FOUND_S + 1, *puppets)
        said = await here.agree(puppets[:2])
        assert (said["hosts"], said["basis"]["voters"]) == ([["node0", 1], ["node1", 1]], ["token0", "token1"])
        assert [row["state"] for row in here.leader.nodes()] == ["in use", "in use", "left out"]
        puppets[2].vanish()
        await until(lambda: len(here.leader.seats.members) == 2)
        again = await here.enter(member(2, token="again"))
        await again.hears("spare")
        await here.pass_time(timing.RETURN_S - 1, *puppets[:2], again)
        assert not here.leader.resizing
        await here.pass_time(2.0, *puppets[:2], again)
        assert here.leader.resizing
    assert "node2" in here.said[0]


@asynchronous
async def test_lost_spare_keeps_its_vote_until_the_others_know_of_its_loss():
    """Otherwise a leader cut off from both could continue alone, and the other node with the spare."""
    async with room(limits=Limits(1, 2, wait_s=0.0)) as here:
        puppets = [await here.enter(member(rank)) for rank in (0, 1)]
        await here.agree(puppets)
        spare = await here.enter(member(2))
        await spare.hears("spare")
        assert here.leader.nodes()[2]["state"] == "new"
        for v in range(1, 4):
            for puppet in puppets:
                puppet.send("has", n=1, v=v)
            await here.pass_time(0.5, *puppets, spare)
        assert here.leader.nodes()[2]["state"] == "spare"
        spare.vanish()
        await until(lambda: len(here.leader.seats.members) == 2)
        await here.pass_time(1.5, *puppets)
        known = [(await puppets[0].hears("basis"))["basis"] for _ in range(3)]
        assert [[len(each["voters"]) for each in (basis, *basis["before"])] for basis in known] == [[3, 2], [3], [2, 3]]
        assert here.leader.running
        assert [row["state"] for row in here.leader.nodes()] == ["in use", "in use", "lost"]
        puppets[1].vanish()
        assert (await puppets[0].hears("lost"))["host"] == "node1"
        await here.pass_time(2.0, puppets[0])
        await here.nothing_is_said_to(puppets[0])


@asynchronous
async def test_leader_yields_to_a_leader_of_its_job_with_a_newer_membership():
    async with room(limits=ANY) as here:
        puppet = await here.enter(member(0), n=7, basis=basis(3, 3))
        await here.nothing_is_said_to(puppet)
        assert here.leader.yields_to({"formed": 8, "n": 8, "running": False, "token": "", "job": "job"})
        assert here.leader.yields_to({"formed": 7, "n": 7, "running": True, "token": "", "job": ""})
        assert not here.leader.yields_to({"formed": 6, "n": 9, "running": True, "token": "z", "job": "job"})
        assert not here.leader.yields_to({"formed": 8, "n": 8, "running": True, "token": "", "job": "another"})


@asynchronous
async def test_running_job_beats_a_cut_off_leader_that_proposed_more():
    """The cut-off leader lost its members one by one, and proposed again each time. It must join the others although
    its own number is higher."""
    limits = Limits(2, 2, wait_s=0.0)
    async with room(member(0, of=5), limits) as alone, room(member(1, of=5), limits) as there:
        first, *others = [await alone.enter(member(node, of=5), n=7, basis=basis(5, 2)) for node in range(5)]
        for gone in others[:3]:
            await alone.pass_time(0.5)
            proposed = (await first.hears("propose"))["basis"]
            gone.vanish()
            await until(lambda gone=gone: gone.me.token not in alone.leader.seats.tokens)
        assert proposed["n"] == 10
        there.prepared = lambda n: asyncio.sleep(0, {"job": "job"})
        puppets = [await there.enter(member(node, of=5), n=7, basis=basis(5, 2)) for node in (1, 2, 3)]
        await there.pass_time(0.5)
        assert (await there.agree(puppets))["n"] == 8
        theirs = there.leader.greeting()
        assert alone.leader.yields_to(theirs)
        assert not there.leader.yields_to(alone.leader.greeting())

        async def who_leads(*place: Any, answer: Mapping[str, Any]) -> dict[str, Any]:
            return {**theirs, "over": ""}

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(leader_connection, "who_leads", who_leads)
            one = SimpleNamespace(basis=proposed, me=member(0, of=5))
            assert await leader_connection.elect(one, NodeEnv(), ("10.0.0.1", 1)) is not None


@asynchronous
async def test_last_membership_of_a_stopped_job_has_the_nodes_that_left():
    async with room(limits=Limits(1, 3, wait_s=0.0)) as here:
        puppets = await here.job()
        for puppet in puppets:
            puppet.send("leaving")
        while (await here.heard.get())[1]["is"] != "stop":
            pass
        here.leader.lose(here.leader.seats.members[1], "SIGTERM")
        while (said := await puppets[0].link.receive())["is"] != "propose":
            pass
        assert said["basis"]["used"] == said["basis"]["voters"] == ["token0", "token1", "token2"]


@pytest.mark.parametrize("change", ["a node joins", "a node is asked to leave", "a rank fails", "a node is lost"])
@asynchronous
async def test_job_waits_only_for_nodes_that_were_lost(change: str):
    """It has fewer nodes than it may have. After another change, no time has to pass until the next proposal."""
    async with room(member(0, of=4), Limits(1, 4, wait_s=8.0)) as here:
        puppets = [await here.enter(member(rank, of=4)) for rank in range(3)]
        await here.pass_time(8.0, *puppets)
        await here.agree(puppets)
        if change == "a node joins":
            puppets.append(await here.enter(member(3, of=4)))
            await puppets[3].hears("spare")
        elif change == "a node is asked to leave":
            puppets[2].send("leaving")
            await all_hear("stop", puppets), await all_hear("prepare", puppets)
        elif change == "a node is lost":
            puppets.pop().vanish()
        here.leader.lose(here.leader.seats.members[0], "nodes change")
        await all_hear("lost", puppets)
        if change == "a node is lost":
            await here.pass_time(7.0, *puppets)
            assert not here.leader._proposed
            await here.pass_time(1.0, *puppets)
        while (await puppets[0].link.receive())["is"] != "propose":
            pass


@asynchronous
async def test_leader_that_leaves_proposes_nothing():
    async with room(limits=Limits(1, 3, wait_s=0.0)) as here:
        puppets = await here.job()
        puppets[0].send("leaving")
        await all_hear("stop", puppets), await all_hear("prepare", puppets)
        here.leader.lose(here.leader.seats.members[1], "SIGTERM")
        await all_hear("lost", puppets)
        await here.pass_time(3.0, *puppets)
        await here.nothing_is_said_to(*puppets)


@asynchronous
async def test_nodes_that_still_import_are_not_waited_for_after_a_loss():
    """If too few nodes are left, the importing nodes wait too, and hear what is missing."""
    async with room(limits=Limits(2, 3, wait_s=0.0)) as here:
        puppets = [await here.enter(member(rank)) for rank in (0, 1)]
        await here.pass_time(FOUND_S + 1, *puppets)
        await here.agree(puppets)
        new = await here.enter(member(2), warm=False)
        await new.hears("spare")
        puppets[1].vanish()
        await puppets[0].hears("lost"), await new.hears("lost")
        await here.pass_time(NOTICE_S, puppets[0], new)
        text = "2 of at least 2 nodes are here, 1 of them still importing torch (lost: rank 1 on node1 (pid 1001): "
        for puppet in (puppets[0], new):
            assert (await puppet.hears("waiting"))["text"].startswith(text)
        puppets[0].send("alive", ranks=[], warm=False)  # no other node leads
        new.send("alive", ranks=[], warm=True)
        await here.pass_time(1.0, puppets[0], new)
        n = (await new.hears("propose"))["n"]
        assert (await puppets[0].hears("propose"))["n"] == n
        puppets[0].send("ready", n=n, problem="")
        await here.pass_time(NOTICE_S, puppets[0], new)
        late = "all 2 ranks have joined, but after 20 s some still import torch or wait for earlier ranks to end"
        for puppet in (puppets[0], new):
            assert (await puppet.hears("waiting"))["text"] == f"{late} (late: 1 on node2)"


def test_only_the_next_leader_asks_all_members(monkeypatch: pytest.MonkeyPatch):
    """When 64 members look for a leader at once, each of the others asks only a few."""
    asked: list[str] = []
    alive = {f"10.0.0.{node}": f"token{node}" for node in range(2, 64)}

    async def who_leads(ip: str, port: int, *, answer: Mapping[str, Any]) -> dict[str, Any] | None:
        asked.append(ip)
        assert (answer["n"], answer["port"], answer["job"]) == (7, 0, "job")
        said = {"token": alive.get(ip), "over": "this node does not lead", "n": 7, "formed": 7, "job": "job"}
        return said if ip in alive else None

    monkeypatch.setattr(leader_connection, "who_leads", who_leads)
    known = [[f"token{node}", f"10.0.0.{node}", 1, f"node {node}"] for node in range(64)]
    last = {"known": known, "n": 7, "v": 0, "job": "job"}

    def elect(node: int) -> tuple[str, int] | None:
        asked.clear()
        one = SimpleNamespace(basis=last, me=member(node, of=64))
        return asyncio.run(leader_connection.elect(one, NodeEnv(master_addr="10.0.0.0", master_port=1), None))

    for node in (3, 63):
        with pytest.raises(ConnectionError, match="node 2 should lead, but does not lead yet"):
            elect(node)
        assert len(asked) <= 5
    assert elect(2) is None
    assert len(asked) == 63


@pytest.mark.parametrize(("said", "leads"), [
    ({}, True), ({"formed": 6, "n": 9}, False), ({"job": "another"}, False), ({"token": "token1"}, False),
])
def test_leader_of_another_job_or_with_an_older_membership_is_not_followed(
    said: dict[str, Any], leads: bool, monkeypatch: pytest.MonkeyPatch
):
    async def who_leads(ip: str, port: int, *, answer: Mapping[str, Any]) -> dict[str, Any] | None:
        return {"token": "new", "over": "", "n": 7, "formed": 7, "job": "job", **said} if ip == "10.0.0.0" else None

    monkeypatch.setattr(leader_connection, "who_leads", who_leads)
    one = SimpleNamespace(basis=basis(2, 2), me=member(1))
    found = asyncio.run(leader_connection.elect(one, NodeEnv(master_addr="10.0.0.0", master_port=1), None))
    assert found == (("10.0.0.0", 1) if leads else None)


# Meeting --------------------------------------------------------------------------------------------------------------


@asynchronous
async def test_lost_member_voids_the_proposal():
    async with room() as here:
        puppets = await here.three()
        await all_hear("propose", puppets)
        puppets[0].vanish()
        await until(lambda: len(here.leader.seats.members) == 2)
        puppets[0] = await here.enter(member(0, token="again"))
        for puppet, n in zip(puppets, (2, 1, 2), strict=True):  # an answer to an earlier proposal does not count
            assert (await puppet.hears("propose"))["n"] == 2
            puppet.send("ready", n=n, problem="")
        await here.nothing_is_said_to(*puppets)
        puppets[1].send("ready", n=2, problem="")
        assert [(await puppet.hears("commit"))["n"] for puppet in puppets] == [2, 2, 2]


@asynchronous
async def test_member_lost_while_the_leader_prepares_voids_the_proposal():
    async with room() as here:
        began, gone, go = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def prepare(n: int) -> Mapping[str, Any]:
            if n == 1:
                began.set()
                try:
                    await go.wait()
                finally:
                    gone.set()
            return {}

        here.prepared = prepare
        puppets = await here.three()
        await get_ready(puppets)
        await began.wait()
        puppets[1].vanish()
        await gone.wait()  # the preparation was cancelled: nobody has set `go`
        go.set()
        await here.nothing_is_said_to(puppets[0], puppets[2])
        puppets[1] = await here.enter(member(1, token="again"))
        assert (await here.agree(puppets))["n"] == 2


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (UserError("no"), 2, "no"), (JoinError("not now"), 170, "not now"), (OSError("full"), 170, "OSError: full"),
        (None, 170, "KeyError: 'job'"),  # a fault in the commit itself
    ],
)
@asynchronous
async def test_all_members_end_when_the_leader_cannot_prepare(error: Exception | None, code: int, text: str):
    async def prepare(n: int) -> Mapping[str, Any]:
        if error is not None:
            raise error
        return {}

    async with room(limits=ANY if error is None else None) as here:
        here.prepared = prepare
        puppets = await here.three()
        await get_ready(puppets)
        for puppet in puppets:
            said = await puppet.hears("over")
            assert (said["code"], said["text"]) == (code, text)


@asynchronous
async def test_missing_route_to_a_member_that_ends_refuses_nobody():
    async with room() as here:
        puppets = await here.three()
        for puppet, problem in zip(puppets, ["1 refuses", "", ""], strict=True):
            puppet.send("ready", n=(await puppet.hears("propose"))["n"], problem=problem)
        puppets[1].vanish()
        puppets[1] = await here.enter(member(1, token="again"))
        await here.agree(puppets)


# Members that do not fit ---------------------------------------------------------------------------------------------


@asynchronous
async def test_member_that_does_not_fit_is_named_and_ends_no_complete_job():
    newcomer, text = member(1, of=9, token="new"), "rank 1 on node1 (pid 1001) was started with WORLD_SIZE=9, rank 0 on"
    async with room() as here:
        for puppet in (await here.enter(member(0)), await here.enter(newcomer)):
            said = await puppet.hears("over")
            assert (said["code"], said["text"][: len(text)]) == (170, text)
    async with room() as here:
        puppets = await here.job()
        await (await here.enter(newcomer)).hears("over")
        await here.nothing_is_said_to(*puppets)
        assert here.leader.running


@asynchronous
async def test_new_leader_that_differs_leaves_the_job_to_the_others():
    async with room() as here:
        own = await here.enter(member(0))
        other = await here.enter(member(1), settings={"rankup's code": "newer"}, n=3)
        assert (await own.hears("over"))["code"] == USER_MISTAKE
        said = (await other.hears("waiting"))["text"]
        assert said.startswith("rank 0 on node0 was turned away: rank 0 on node0 (pid 1000) differs from rank 1 ")
        await other.is_cut()


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: node0\r\n\r\n", b"\x80\x04\x95\n", b"[" * 100_000 + b"\n", b"{}\n", b'{"is": 3}\n',
        b'{"is": "hello"}\n', b"x" * (LONGEST + 10), b"9" * 10_000 + b"\n",
        *[
            encode("hello", **{**asdict(member(1)), **HELLO, **wrong})
            for wrong in (
                {"host": 3}, {"host": "\x1b[2J"}, {"host": "h" * 256}, {"first_rank": -1}, {"num_ranks": 3},
                {"n": None}, {"settings": 3},
            )
        ],
    ],
    ids=range(15),
)
@asynchronous
async def test_stranger_that_sends_garbage_is_disconnected(data: bytes):
    async with room() as here:
        first = await here.enter(member(0))
        link = await here.connect()
        await link.receive()
        link.write(data)
        await Puppet(link, member(1)).is_cut()
        await here.agree([first, await here.enter(member(1)), await here.enter(member(2))])


@asynchronous
async def test_stranger_that_says_nothing_is_disconnected(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(timing, "HELLO_S", 0.01)
    async with room() as here:
        link = await here.connect()
        await link.receive()
        await Puppet(link, member(1)).is_cut()


@pytest.mark.parametrize(
    "message", [{"is": "ready"}, {"is": "alive", "ranks": 3}, {"is": "alive", "ranks": [{"ago_s": 1.0}]}, {"is": "end"},
                {"is": "alive", "ranks": [{"rank": 1, "ago_s": 10**400}]},  # no float holds it
                {"is": "stop", "signal": "SIGKILL"}, {"stop": 1}]
)
@asynchronous
async def test_member_that_sends_garbage_is_lost(message: dict[str, Any]):
    async with room() as here:
        puppets = await here.job()
        puppets[1].link.write(json.dumps(message).encode() + b"\n")
        said = await puppets[2].hears("lost")
        assert said["why"].startswith("it sent a message that makes no sense: ")


# Two processes with one rank ------------------------------------------------------------------------------------------


@asynchronous
async def test_restarted_member_takes_the_place_of_its_frozen_process():
    async with room() as here:
        first, frozen, last = await here.job()
        again = await here.enter(member(1, token="again", pid=77))
        await here.pass_time(timing.SILENT_S + 1, first, last)
        await frozen.is_cut()
        for puppet in (first, last):
            assert (await puppet.hears("lost"))["why"].startswith("sent no heartbeat for ")
        await here.agree([first, again, last])


@asynchronous
async def test_member_that_reconnects_does_not_wait_for_its_old_connection():
    async with room() as here:
        first, cut, last = await here.job()
        again = await here.enter(cut.me)
        for puppet in (first, last):
            assert (await puppet.hears("lost"))["why"] == "its connection was cut"
        await here.agree([first, again, last])
        assert here.now_s == 1000.0


# Loss and the next membership -----------------------------------------------------------------------------------------


@asynchronous
async def test_loss_is_told_to_all_and_a_successor_completes_the_next_membership():
    async with room() as here:
        first, lost, last = await here.job()
        lost.vanish()
        for puppet in (first, last):
            said = await puppet.hears("lost")
            why = "its process has ended"
            assert said == {"is": "lost", "n": 1, "ranks": [1], "host": "node1", "why": why, "node": True, "code": 137}
        who, said = await here.heard.get()
        assert (who.token, said) == ("token1", {"is": "lost", "n": 1, "why": "its process has ended"})
        assert not here.leader.running
        again = await here.enter(member(1, token="again"))
        assert (await here.agree([first, again, last]))["n"] == 2


@asynchronous
async def test_members_may_leave_an_ended_job_and_nobody_may_join_it():
    async with room() as here:
        puppets = await here.job()
        here.leader.end("", code=0)
        here.leader.end("too late", code=1)
        puppets[1].vanish()
        await until(lambda: len(here.leader.seats.members) == 2)
        await all_hear("over", (puppets[0], puppets[2]))
        await here.nothing_is_said_to(puppets[0], puppets[2])
        late = await here.connect()
        assert (await late.receive())["over"] == "the job at this address has just ended"
        late.send("hello", **asdict(member(1, token="late")), **HELLO)
        await Puppet(late, member(1)).is_cut()


@asynchronous
async def test_ended_job_prepares_no_membership():
    """The job was stopped while ranks were still ending: its end would be judged and written twice."""
    prepared = list[int]()

    async def prepare(n: int) -> dict[str, Any]:
        prepared.append(n)
        return {}

    async with room() as here:
        here.prepared = prepare
        puppets = await here.three()
        await all_hear("propose", puppets)
        here.leader.end("", code=143)
        await all_hear("over", puppets)
        for puppet in puppets:
            puppet.send("ready", n=1, problem="")
        await here.nothing_is_said_to(*puppets)
    assert not prepared


@asynchronous
async def test_member_whose_ranks_have_all_finished_may_leave():
    async with room(member(0, of=3, num_ranks=2)) as here:
        puppets = [await here.enter(member(2, of=3)), await here.enter(member(0, of=3, num_ranks=2))][::-1]
        hosts = [["node0", 2], ["node2", 1]]
        assert await here.agree(puppets) == {"is": "commit", "n": 1, "ip": "127.0.0.1", "job": "job1", "hosts": hosts}
        puppets[1].send("end", host="", n=1, rank=2, code=0)
        puppets[1].vanish()
        await until(lambda: len(here.leader.seats.members) == 1)
        assert here.leader.running
        puppets[0].send("end", host="", n=1, rank=0, code=0)
        puppets[0].vanish()  # rank 1 has not finished
        await until(lambda: not here.leader.running)


@asynchronous
async def test_ends_and_agreed_steps_do_not_count_in_the_next_membership():
    async with room() as here:
        puppets = await here.job()
        puppets[1].send("end", host="", n=1, rank=1, code=0)
        await here.heard.get()
        for _ in range(2):
            here.leader.stop("SIGUSR1")
            await all_hear("stop", puppets), await all_hear("prepare", puppets)
            here.leader.stop("SIGTERM")
            await all_hear("stop", puppets)
            await here.nothing_is_said_to(*puppets)
            here.leader.lose(puppets[0].me, "exit code 137")
            await all_hear("lost", puppets)
            await here.agree(puppets)
        puppets[1].vanish()
        assert (await puppets[0].hears("lost"))["ranks"] == [1]


@asynchronous
async def test_messages_of_an_earlier_membership_are_dropped():
    async with room() as here:
        puppets = await here.job()
        here.leader.lose(puppets[0].me, "exit code 137")
        await all_hear("lost", puppets)
        await here.agree(puppets)
        puppets[1].send("end", host="", n=1, rank=1, code=0)
        puppets[1].send("lost", n=2, why="a joke")
        puppets[1].send("end", host="", n=2, rank=1, code=3)
        who, said = await here.heard.get()
        assert (who.token, said) == ("token1", {"is": "end", "host": "", "n": 2, "rank": 1, "code": 3})


@asynchronous
async def test_new_leader_counts_on_from_its_members_number():
    async with room() as here:
        puppets = [await here.enter(member(0)), await here.enter(member(1), n=7), await here.enter(member(2), n=6)]
        assert (await here.agree(puppets))["n"] == 8


@asynchronous
async def test_simultaneous_questions_get_one_answer():
    """With a thousand ranks the answer is long."""
    async with room() as here:
        puppets = await here.job()
        for puppet in puppets:
            puppet.link.write(2 * encode("ask"))
        answers = await all_hear("ranks", puppets)
        assert answers == [{"is": "ranks", "ranks": [], "nodes": [], "start": 0, "more": False}] * 3
        await here.nothing_is_said_to(*puppets)


# Silence and time -----------------------------------------------------------------------------------------------------


@asynchronous
async def test_stopped_leader_takes_no_member_for_silent_when_it_wakes():
    async with room() as here:
        puppets = await here.job()
        puppets[1].send("alive", ranks=[{"rank": 1, "ago_s": 7}])
        await here.nothing_is_said_to(*puppets)
        here.now_s += 10 * timing.SILENT_S
        here.leader.tick()
        await here.nothing_is_said_to(*puppets)
        assert here.leader.heartbeats() == [{"rank": 1, "host": "node1", "ago_s": 7 + 10 * timing.SILENT_S}]
        await here.pass_time(timing.SILENT_S - 1, *puppets[:2])
        await here.nothing_is_said_to(*puppets[:2])
        await here.pass_time(2, *puppets[:2])
        await puppets[0].hears("lost")


@asynchronous
async def test_missing_and_late_ranks_are_named_every_ten_seconds():
    async with room() as here:
        puppets = [await here.enter(member(0)), await here.enter(member(2))]
        for waited_s in (10, 20):
            await here.pass_time(10.0, *puppets)
            text = f"rank 1 of 3 has not joined after {waited_s} s (joined: 0 on node0; 2 on node2)"
            assert await all_hear("waiting", puppets) == [{"is": "waiting", "text": text}] * 2
        gone = await here.enter(member(1))
        await all_hear("propose", puppets)
        gone.vanish()
        await until(lambda: len(here.leader.seats.members) == 2)
        await here.pass_time(10.0, *puppets)
        left = " (lost: rank 1 on node1 (pid 1001): its process has ended)"
        assert (await puppets[0].hears("waiting"))["text"].endswith(left)
        await here.enter(member(1))
        for puppet in puppets:
            if puppet is puppets[1]:
                await puppet.hears("waiting")
            await puppet.hears("propose")
        puppets[0].send("ready", n=2, problem="")
        await here.pass_time(10.0, *puppets)
        late = "after 40 s some still import torch or wait for earlier ranks to end (late: 1 on node1; 2 on node2)"
        assert (await puppets[0].hears("waiting"))["text"] == f"all 3 ranks have joined, but {late}"


@asynchronous
async def test_time_to_join_starts_again_after_a_loss():
    async with room(member(0, left_s=20.0)) as here:
        first, lost, last = await here.job()
        await here.pass_time(100.0, first, lost, last)
        await here.nothing_is_said_to(first, last)
        lost.vanish()
        await all_hear("lost", (first, last))
        await here.pass_time(19.0, first, last)
        await all_hear("waiting", (first, last))
        await here.nothing_is_said_to(first, last)
        await here.pass_time(2.0, first, last)
        for puppet in (first, last):
            await puppet.hears("waiting")
            assert "rank 1 of 3 has not joined after 21 s" in (await puppet.hears("over"))["text"]


@asynchronous
async def test_preparation_by_the_leader_has_a_limit_of_its_own():
    """The time to join covers waiting for other nodes. Preparing ranks has a limit of its own."""
    async with room(member(0, left_s=5.0)) as here:
        asked = asyncio.Event()

        async def prepare(n: int) -> Mapping[str, Any]:
            asked.set()
            await asyncio.Event().wait()
            return {}

        here.prepared = prepare
        puppets = await here.three()
        await get_ready(puppets)
        await asked.wait()
        what = "all 3 ranks have joined, but rank 0 still prepares their start"
        for waited_s in range(10, round(timing.PREPARE_S) + 1, 10):
            await here.pass_time(10.0, *puppets)
            assert await all_hear("waiting", puppets) == [{"is": "waiting", "text": f"{what} after {waited_s} s"}] * 3
        await here.pass_time(6.0, *puppets)
        for puppet in puppets:
            assert (await puppet.hears("over"))["text"] == f"{what} after 306 s"


# Texts ----------------------------------------------------------------------------------------------------------------


def test_message_to_all_names_a_limited_number_of_machines():
    said = describe_missing([member(rank, of=1001) for rank in range(1000)], of=1001, waited_s=5)
    assert said.endswith("; 7 on node7; and ranks on 992 more machines)")


def test_setting_that_only_one_rank_knows_is_a_difference():
    said = differences(member(1), member(0, settings={"setting new": "1"}), arguments=True)
    assert said.startswith("rank 1 on node1 (pid 1001) differs from rank 0 on node0 (pid 1000): ")
    assert ": setting new must be 1, got nothing. Start" in said
