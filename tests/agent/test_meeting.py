"""What the meeting says and refuses, and whom it waits for. No connection, no process, no clock.

`simulator.py` tests what must never happen, whatever fails: two halves that go on, a finished step that is given up, a
job that does not go on. test_peers.py tests connections, test_membership.py kills real processes."""

from dataclasses import replace
from typing import Any

import pytest

from rankup import timing
from rankup.agent.events import Accepted, Claimed, Close, Connected, Dial, Ended, Failed, Heard, Prepared, Send, Tick
from rankup.agent.meeting import Meeting
from rankup.agent.protocol import describe_missing, differences
from rankup.agent.votes import Basis, Node, claims, outvoted, without
from rankup.env.node_env import Limits
from rankup.errors import USER_MISTAKE
from rankup.timing import FOUND_S, NOTICE_S
from tests.rigs.meeting_room import Puppet, Room, Rules, all_hear, get_ready, member


def nodes(count: int) -> tuple[Node, ...]:
    return tuple(Node(f"token{node}", f"10.0.0.{node}", 1, 7, f"node{node}", node, 1) for node in range(count))


def basis(voters: int, used: int, **more: Any) -> Basis:
    known = nodes(voters)
    tokens = tuple(node.token for node in known)
    return Basis(**{"n": 7, "v": 1, "job": "job", "known": known, "used": tokens[:used], "voters": tokens, **more})


# Votes ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("voters", "used", "here", "goes_on"),
    [
        (3, 3, (0,), False), (3, 3, (1, 2), True), (3, 2, (1, 2), True), (2, 2, (0,), True), (2, 2, (1,), False),
        (4, 4, (0, 3), True), (4, 4, (1, 2), False), (5, 2, (2, 3, 4), False), (5, 2, (1, 3, 4), True),
    ],
)
def test_at_most_one_part_of_a_job_continues(voters: int, used: int, here: tuple[int, ...], goes_on: bool):
    """A majority may, or the half with the leader, but never spares alone."""
    why = outvoted(basis(voters, used), {f"token{node}" for node in here}, shared=False)
    reason = "no majority" if 2 * len(here) <= voters else "none of those that trained"
    assert why == "" if goes_on else why.endswith(f"of the {voters} nodes of membership 7 are here, {reason}")


def test_each_half_must_claim_the_next_membership_in_a_shared_folder():
    half = {"token2", "token3"}
    assert outvoted(basis(4, 4), half, shared=True) == ""
    assert claims(basis(4, 4), half) == {7}
    assert not claims(basis(4, 4), {*half, "token1"})
    assert not claims(Basis(), half), "a first job must not claim anything, or no other could follow"
    assert outvoted(basis(4, 4), {"token2"}, shared=True)


def test_node_that_left_has_no_vote_in_the_last_memberships():
    left = without(basis(3, 2, before=((6, ("token0", "token3"), ("token3",)),)), "token0", heirs=())
    assert (left.voters, left.before, left.left) == (("token1", "token2"), ((6, ("token3",), ("token3",)),), True)


@pytest.mark.parametrize(("node", "goes_on"), [(0, True), (1, False), (2, False)])
def test_others_go_on_without_a_node_that_left_only_if_it_trained_last(node: int, goes_on: bool):
    """Membership 7 was only proposed, to use 0 and 1. In 6 nodes 0 and 2 trained. Either may run elsewhere."""
    proposed = basis(5, 2, v=0, before=((6, basis(5, 2).voters, ("token0", "token2")),))
    left = without(proposed, f"token{node}", heirs=())
    assert (outvoted(left, {"token3", "token4", "token9"}, shared=True) == "") == goes_on


def test_newcomers_inherit_the_votes_of_the_last_nodes_that_leave():
    """If nobody had a vote, each newcomer could go on by itself."""
    room = Room(member(0, of=4), Limits(1, 1, wait_s=0.0))
    own, one = room.job(2)
    room.enter(member(2, of=4), warm=False)
    for puppet in (one, own):
        puppet.say("leaving")
        puppet.say("left")
    assert room.leader.basis.voters == ("token2",)
    assert "0 of the 1 nodes" in outvoted(room.leader.basis, {"token3"}, shared=True)


def test_basis_travels_as_a_difference_that_another_basis_refuses():
    old = basis(5, 4)
    new = replace(old, n=8, known=(*old.known[:2], *old.known[3:], Node("new", "ip", 1, 2, "h", 9, 1)),
                  used=("token0", "gone", "new"), before=((7, old.voters, old.used),))
    packed = new.pack(old)
    assert Basis.unpack(packed, old) == Basis.unpack(new.pack(), Basis()) == new
    assert [node.token for node in packed["known"]["more"]] == ["new"]
    with pytest.raises(LookupError):
        Basis.unpack(packed, replace(old, by="another leader"))
    with pytest.raises(LookupError):  # a stranger may send it
        Basis.unpack({**packed, "used": [("", 0, 5)] * 9}, old)


# A number of nodes that may change ------------------------------------------------------------------------------------


def test_half_that_cannot_claim_the_next_membership_proposes_nothing_and_says_so():
    room = Room(member(0), Limits(1, 3, wait_s=0.0), shared=True)
    own, one, _ = room.job()
    assert not room.claims
    room.leader.basis = replace(room.leader.basis, voters=(*room.leader.basis.voters, "far"))
    for puppet in room.leader.seats.copy():
        if puppet > 1:
            room.take(Ended(puppet))
    own.hears("lost")
    room.pass_time(1.0, own, one)
    (claim,) = room.claims
    assert (claim.job, claim.n) == ("job", 1)
    own.hears_nothing()
    room.take(Claimed(1, False))
    room.pass_time(NOTICE_S, own, one)
    assert "another part of the job goes on, or --shared-dir does not answer" in room.lines[-1]
    room.pass_time(1.0, own, one)
    room.take(Claimed(1, True))
    assert own.hears("propose")["n"] == 2


def test_node_that_leaves_has_no_vote():
    """It is not asked to be ready, and may find another leader, which would count its vote too."""
    room = Room(member(0, of=4), Limits(1, 4, wait_s=0.0), shared=True)
    own, lost, leaving, last = room.job(4)
    leaving.say("leaving")
    lost.vanish()
    room.pass_time(0.5, own, leaving, last)
    assert [claim.n for claim in room.claims] == [1], "two of four voters are here, so they must claim"


def test_spares_go_on_if_the_leader_is_lost_while_it_replaces_nodes_that_left():
    """The ranks of those that left have ended for good, so nobody needs their state. The leader never committed."""
    room = Room(member(0, of=4), Limits(1, 2, wait_s=0.0))
    own, leaving, two, three = puppets = room.all(4)
    room.pass_time(FOUND_S + 1, *puppets)
    room.agree(puppets)
    room.pass_time(2.0, *puppets)
    for puppet in puppets:  # all know that the spares have a vote
        puppet.say("has", age=room.leader.basis.age)
    room.pass_time(2.0, *puppets)
    leaving.say("leaving")
    leaving.say("left")
    room.leader.lose(leaving.me, "nodes change")
    room.pass_time(1.0, own, two, three)
    proposed = room.leader._next
    assert (room.leader.proposed, proposed.used) == (2, ("token0", "token2"))
    assert outvoted(proposed, {"token2", "token3"}, shared=False) == ""


def test_spares_of_a_membership_do_not_go_on_without_it_after_another_proposal():
    """The second membership runs at one and two. Three, four and five have heard only its proposal, and show it to the
    first leader. That one does not know yet that it has lost one and two."""
    room = Room(member(0, of=6), Limits(1, 6, wait_s=0.0))
    own, *others = room.job(6)
    proposed = Basis(2, 0, "token1", known=room.leader.basis.known, used=("token1", "token2"),
                     voters=room.leader.basis.voters[1:], before=tuple(room.leader.basis.electorates))
    room.leader.lose(own.me, "nodes change")
    for puppet in others[2:]:
        again = room.enter(puppet.me, knows=proposed)
        if room.leader.basis.n == 1:
            again.hears("show")
            again.say("shown", basis=proposed.pack())
    room.pass_time(1.0, own, *others[:2])
    assert room.leader.proposed
    assert outvoted(room.leader._next, {"token0", "token3", "token4", "token5"}, shared=False)


def test_leader_needs_the_voters_of_each_proposal_that_may_be_committed_elsewhere():
    """Two leaders that were cut apart used the same number. Whichever token is larger, both proposals count."""
    for own, other in (("a", "b"), ("b", "a")):
        room = Room(member(0, of=9), Limits(1, 9, wait_s=0.0))
        last = (7, tuple(f"token{node}" for node in range(5)), ("token0",))
        open_ = {"n": 8, "v": 0, "before": (last,)}
        mine = replace(basis(5, 5, by=own, **open_), voters=("token0", "token1", "token2"))
        theirs = replace(basis(5, 5, by=other, **open_), voters=("token2", "token3", "token4"))
        room.leader.basis, room.leader.membership = mine, 8
        third = room.enter(member(3, of=9), knows=theirs)
        third.hears("show")
        third.say("shown", basis=theirs.pack())
        known = {frozenset(voters) for _, voters, _ in room.leader.basis.electorates}
        assert known == {frozenset(mine.voters), frozenset(theirs.voters), frozenset(last[1])}
        assert room.leader.basis.follows == 7


@pytest.mark.parametrize("commit_first", [True, False])
def test_proposal_counts_although_its_leader_did_not_know_that_the_last_one_was_committed(commit_first: bool):
    """Membership 7 was committed. A leader that knew it as a proposal has proposed 8, and may have committed it."""
    room = Room(member(0, of=9), Limits(1, 9, wait_s=0.0))
    committed = basis(5, 5, by="a")
    before = ((7, committed.voters, committed.used), (6, committed.voters[:2], ("token9",)))
    proposed = replace(basis(5, 5, n=8, v=0, by="b", before=before), voters=committed.voters[2:])
    known, shown = (committed, proposed) if commit_first else (proposed, committed)
    room.leader.basis, room.leader.membership = known, 8
    third = room.enter(member(3, of=9), knows=shown)
    third.hears("show")
    third.say("shown", basis=shown.pack())
    assert room.leader.basis == replace(proposed, before=before[:1])
    assert room.enter(member(4, of=9), knows=shown).hears("propose")["n"] == 9


def test_ranks_do_not_stop_for_a_newcomer_that_still_imports():
    room = Room(member(0, of=2), Limits(1, 2, wait_s=0.0))
    room.job(1)
    new = room.enter(member(1, of=2), warm=False)
    room.pass_time(3.0, room.own)
    assert not room.leader.resizing
    new.say("alive", ranks=[], warm=True)
    room.take(Tick())
    assert room.leader.resizing


@pytest.mark.parametrize("most", [1, 3])
def test_node_that_differs_and_comes_during_the_commit_is_turned_away_alone(most: int):
    """It gets no vote, and the ranks do not stop for it."""
    room = Room(member(0, of=2, settings={"script": "a"}), Limits(1, most, wait_s=0.0))
    room.prepares = False
    room.pass_time(FOUND_S + 1)
    get_ready([room.own])
    wrong = room.enter(member(1, of=2, settings={"script": "\x1b" + "b" * 300}))
    room.take(Prepared(1, {"port": 1, "store": True, "again": False}))
    said = wrong.hears("over")
    assert said["code"] == USER_MISTAKE
    assert f"script must be a, got \\x1b{'b' * 199}. Start all" in said["text"]
    room.own.hears("commit")
    room.pass_time(3.0)
    room.own.hears_nothing()
    assert room.leader.basis.voters == ("token0",)
    assert not wrong.closed, "the reason might not arrive"


def test_nodes_without_a_route_are_left_out_and_wait_longer_each_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(timing, "RETURN_S", 10.0)
    room = Room(limits=Limits(2, 3, wait_s=2.0))
    puppets = room.all()
    for puppet, problem in zip(puppets, ("no route to node1", "", "no answer from node0"), strict=True):
        puppet.say("ready", n=puppet.hears("propose")["n"], problem=problem)
    room.pass_time(1.0, *puppets)
    assert puppets[2].hears("left_out")["why"] == "no route to node1"  # never the leader
    assert "node2" in room.lines[0]
    room.pass_time(FOUND_S + 1, *puppets)
    room.agree(puppets[:2])
    assert [row["state"] for row in room.leader.nodes()] == ["in use", "in use", "left out"]
    puppets[2].vanish()
    again = room.enter(member(2, token="again"))
    room.pass_time(timing.RETURN_S - 1, *puppets[:2], again)
    assert not room.leader.resizing
    room.pass_time(2.0, *puppets[:2], again)
    assert room.leader.resizing


def go_on(room: Room, puppets: list[Puppet]) -> None:
    """Let time pass until all these puppets are in a running membership, or the job ends. They answer each proposal."""
    tokens = {puppet.me.token for puppet in puppets}
    while not room.judged and not (
        room.leader.running and tokens <= {each.member.token for each in room.leader.chosen}
    ):
        room.pass_time(0.5, *puppets)
        for puppet in puppets:
            while room.sent[puppet.link]:
                message = room.sent[puppet.link].popleft()
                if message["is"] == "propose":
                    puppet.say("ready", n=message["n"], problem="")
        if room.leader.resizing and room.leader.running:
            room.leader.lose(room.own.me, "nodes change")


def test_node_that_joins_and_dies_again_and_again_stops_the_others_less_and_less():
    room = Room(limits=Limits(1, 3, wait_s=0.0))
    own, one, flaky = room.job()
    waited = []
    for number in range(6):
        flaky.vanish()
        go_on(room, [own, one])
        flaky, came_s = room.enter(member(2, token=f"again{number}")), room.now_s
        go_on(room, [own, one, flaky])
        waited.append(room.now_s - came_s)
    assert [round(wait_s / 15) for wait_s in waited] == [0, 0, 1, 2, 4, 8]


def test_lost_nodes_do_not_use_up_the_restarts_of_an_elastic_job():
    """Its script reports no steps, so nobody knows whether it makes progress."""
    room = Room(limits=Limits(1, 3, wait_s=0.0), max_restarts=1)
    own, one, flaky = room.job()
    for number in range(2):
        flaky.vanish()
        go_on(room, [own, one])
        flaky = room.enter(member(2, token=f"again{number}"))
        go_on(room, [own, one, flaky])
    assert not room.judged


def test_node_that_cannot_start_its_ranks_ends_a_job_that_has_not_begun():
    room = Room()
    puppets = room.all()
    puppets[2].say("cannot", code=137, text="starting the ranks: SIGKILL")
    for puppet in puppets:
        puppet.hears("propose")
        said = puppet.hears("over")
        assert (said["code"], said["text"]) == (137, "rank 2 on node2: starting the ranks: SIGKILL")
    assert [judged.verdict.code for judged in room.judged] == [137]


@pytest.mark.parametrize("change", ["a node joins", "a node is asked to leave", "a rank fails", "a node is lost"])
def test_job_waits_only_for_nodes_that_were_lost(change: str):
    """It has fewer nodes than it may have. After another change, no time has to pass until the next proposal."""
    room = Room(member(0, of=4), Limits(1, 4, wait_s=8.0))
    puppets = room.all()
    room.pass_time(8.0, *puppets)
    room.agree(puppets)
    if change == "a node joins":
        puppets.append(room.enter(member(3, of=4)))
    elif change == "a node is asked to leave":
        puppets[2].say("leaving")
    elif change == "a node is lost":
        puppets.pop().vanish()
    room.sent.clear()
    room.leader.lose(room.own.me, "nodes change")
    room.take(Tick())
    if change == "a node is lost":
        room.pass_time(7.0, *puppets)
        assert not room.leader.proposed
        room.pass_time(1.5, *puppets)
    assert room.leader.proposed == 2


def test_nodes_that_still_import_are_not_waited_for_after_a_loss():
    """If too few nodes are left, the importing nodes wait too, and hear what is missing."""
    room = Room(limits=Limits(2, 3, wait_s=0.0))
    own, lost = room.job(2)
    new = room.enter(member(2), warm=False)
    room.pass_time(0.25, own, lost)
    new.hears("spare")
    lost.vanish()
    own.hears("lost"), new.hears("lost")
    for _ in range(5):
        new.say("alive", ranks=[], warm=False)
        room.pass_time(NOTICE_S / 5, own)
    text = "2 of at least 2 nodes are here, 1 of them still importing torch (lost: rank 1 on node1 (pid 1001): "
    assert new.hears("waiting")["text"].startswith(text)
    new.say("alive", ranks=[], warm=True)
    room.pass_time(1.0, own, new)
    n = new.hears("propose")["n"]
    own.say("ready", n=n, problem="")
    room.pass_time(NOTICE_S, own, new)
    late = "all 2 ranks have joined, but after 20 s some still import torch or wait for earlier ranks to end"
    assert new.hears("waiting")["text"] == f"{late} (late: 1 on node2)"


def test_job_stops_when_all_nodes_are_asked_to_leave():
    room = Room(limits=Limits(1, 3, wait_s=0.0))
    puppets = room.job()
    for puppet in puppets:
        puppet.say("leaving")
    assert puppets[1].hears("stop")["signal"] == "SIGTERM"
    room.leader.lose(room.own.me, "SIGTERM")
    room.take(Tick())
    assert room.leader.proposed, "the last membership has the nodes that left, so that they report how they ended"


# Who leads ------------------------------------------------------------------------------------------------------------


class Seeker:
    """A member that looks for its leader. `asked`: the addresses that it dials now."""

    def __init__(self, node: int, known: Basis) -> None:
        self.now_s = 0.0
        self.meeting = Meeting(member(node, of=64), Rules(limits=Limits(1, 64)), now_s=0.0, master=("10.0.0.0", 1))
        self.meeting.basis = known
        self.asked = list[Dial]()
        self.sent = list[Send]()

    def take(self, event: Any) -> None:
        for output in self.meeting.take(self.now_s, event):
            if isinstance(output, Dial):
                self.asked.append(output)
            elif isinstance(output, Send):
                self.sent.append(output)

    def answer(self, alive: dict[str, dict[str, Any]]) -> int:
        """Let all that are asked answer or refuse. Returns how many were asked."""
        self.take(Tick())
        count = 0
        while self.asked:
            dial = self.asked.pop()
            count += 1
            assert dial.address is not None
            if (said := alive.get(dial.address[0])) is None:
                self.take(Failed(dial.link, "refused", refused=True))
            else:
                greeting = {"is": "leader", "over": "", "n": 7, "formed": 7, "running": False, "job": "job", **said}
                self.take(Connected(dial.link, dial.address, "10.0.0.9"))
                self.take(Heard(dial.link, greeting))
        return count


def test_only_the_next_leader_asks_all_members():
    """When 64 members look for a leader at once, each of the others asks only a few."""
    alive = {f"10.0.0.{node}": {"token": f"token{node}", "over": "this node does not lead"} for node in range(2, 64)}
    for node in (3, 63):
        seeker = Seeker(node, basis(64, 64))
        assert seeker.answer(alive) <= 5
        assert seeker.meeting.problem == "node 2 on node2 should lead, but does not lead yet"
        assert {send.message["port"] for send in seeker.sent} == {0}, "a new node 0 must learn that the job exists"
    seeker = Seeker(2, basis(64, 64))
    assert seeker.answer(alive) == 63
    assert seeker.meeting.leading is not None


@pytest.mark.parametrize(("said", "leads"), [
    ({}, True), ({"formed": 6, "n": 9}, False), ({"job": "another"}, False), ({"token": "token1"}, False),
])
def test_leader_of_another_job_or_with_an_older_membership_is_not_followed(said: dict[str, Any], leads: bool):
    seeker = Seeker(1, basis(2, 2))
    seeker.answer({"10.0.0.0": {"token": "new", **said}})
    assert (seeker.meeting.at == ("10.0.0.0", 1)) == leads
    if leads:
        assert seeker.sent[-1].message["is"] == "hello"


def test_leader_of_an_older_membership_asks_members_where_the_newer_leader_is():
    """It was cut off while it had heard only a proposal. It may know no node that leads now."""
    seeker = Seeker(3, Basis())
    seeker.answer({"10.0.0.0": {"token": "token0"}})
    proposed = basis(4, 4, n=8, v=0, by="token0", before=((7, ("token0", "token1"), ("token0",)),))
    link = seeker.meeting._link
    seeker.take(Heard(link, {"is": "propose", "n": 8, "basis": proposed.pack()}))
    seeker.take(Ended(link))
    seeker.now_s += 1.0
    seeker.answer({})
    assert seeker.meeting.leading is not None
    at = {"over": "this node does not lead", "at": ("10.0.0.9", 1), "n": 9, "formed": 9}
    leader = {"token": "new", "n": 9, "formed": 9, "running": True}
    for _ in range(3):
        seeker.now_s += timing.CALL_S
        seeker.answer({"10.0.0.2": {"token": "token2", **at}, "10.0.0.9": leader})
    assert seeker.meeting.at == ("10.0.0.9", 1)


# Members that do not fit ---------------------------------------------------------------------------------------------


def test_member_that_does_not_fit_is_named_and_ends_no_complete_job():
    newcomer, text = member(1, of=9, token="new"), "rank 1 on node1 (pid 1001) was started with WORLD_SIZE=9, rank 0 on"
    room = Room()
    for puppet in (room.enter(newcomer), room.own):
        said = puppet.hears("over")
        assert (said["code"], said["text"][: len(text)]) == (170, text)
    room = Room()
    puppets = room.job()
    room.enter(newcomer).hears("over")
    for puppet in puppets:
        puppet.hears_nothing()
    assert room.leader.running


def test_new_leader_that_differs_leaves_the_job_to_the_others():
    room = Room()
    other = room.enter(member(1, settings={"rankup's code": "newer"}), knows=Basis(3, 1, "token0"))
    assert room.own.hears("over")["code"] == USER_MISTAKE
    said = other.hears("waiting")["text"]
    assert said.startswith("rank 0 on node0 was turned away: rank 0 on node0 (pid 1000) differs from rank 1 ")
    assert other.closed


@pytest.mark.parametrize("wrong", [{"num_ranks": 3}, {"settings": {"a": 3}}])
def test_hello_that_makes_no_sense_is_disconnected(wrong: dict[str, Any]):
    room = Room()
    assert room.enter(member(1, **wrong)).closed
    room.agree(room.all())


def test_stranger_that_says_nothing_is_disconnected():
    room = Room()
    room.take(Accepted(99, "10.0.0.9", "10.0.0.0"))
    room.pass_time(timing.HELLO_S + 1)
    assert 99 in room.closed


# Two processes with one rank ------------------------------------------------------------------------------------------


def test_restarted_member_takes_the_place_of_its_frozen_process():
    room = Room()
    first, frozen, last = room.job()
    again = room.enter(member(1, token="again", pid=77))
    room.pass_time(timing.SILENT_S + 2, first, last, again)
    assert frozen.closed
    for puppet in (first, last):
        assert puppet.hears("lost")["why"].startswith("sent no heartbeat for ")
    room.agree([first, again, last])


def test_newcomer_that_was_lost_while_it_waited_for_its_ranks_holds_them_no_longer():
    room = Room()
    first, frozen, last = room.job()
    lost = room.enter(member(1, token="lost", pid=77))
    again = room.enter(member(1, token="again", pid=78))
    room.pass_time(timing.SILENT_S + 3, first, last, again)
    assert frozen.closed
    assert lost.closed
    all_hear("lost", [first, last])
    room.agree([first, again, last])


def test_member_that_reconnects_does_not_wait_for_its_old_connection():
    room = Room()
    first, cut, last = room.job()
    again = room.enter(cut.me)
    for puppet in (first, last):
        assert puppet.hears("lost")["why"] == "its connection was cut"
    room.agree([first, again, last])


def test_member_that_comes_back_with_a_newer_proposal_shows_it_before_it_votes():
    """Others have made that proposal, and may have committed it. Here the membership before it still runs."""
    room = Room(limits=Limits(2, 3, wait_s=0.0))
    first, cut, last = room.job()
    again = room.enter(cut.me, knows=Basis(2, 0, "token9", before=((1, (), ()),)))
    for puppet in (first, last):
        assert puppet.hears("lost")["why"] == "its connection was cut"
    again.hears("show")
    again.hears_nothing()


@pytest.mark.parametrize("all_here", [True, False])
def test_running_job_makes_room_for_members_of_a_proposal_that_was_made_in_vain(all_here: bool):
    """If others have committed it, members that run here are gone, and then this membership must end by itself."""
    room = Room(member(0, of=4), Limits(2, 4, wait_s=0.0))
    first, second = room.job(2)
    vain = Basis(3, 0, "token9", before=((2, (), ()), (1, (), ())), job="job")
    room.leader.basis = replace(room.leader.basis, n=2)
    again = room.enter(member(3, of=4), knows=vain)
    room.pass_time(2.0, first, *[second] * all_here)
    assert room.leader.resizing == all_here
    again.hears_nothing()
    room.leader.lose(second.me, "nodes change")
    room.pass_time(1.0, first, second)
    again.hears("show")
    again.say("shown", basis=vain.pack())
    assert again.hears("propose")["n"] == 4


def test_nodes_that_have_not_restored_the_state_wait_for_one_that_has_it():
    """Both took part in the last membership, but it ended before their ranks had begun a step."""
    room = Room(member(0, of=4), Limits(1, 2, wait_s=0.0))
    puppets = room.job(2)
    room.leader.basis = replace(room.leader.basis, state=5)
    room.leader.lose(puppets[1].me, "nodes change")
    room.pass_time(NOTICE_S + 1, *puppets)
    all_hear("lost", puppets)
    assert puppets[1].hears("waiting")["text"].startswith("none of the nodes here has the state of membership 5")
    third = room.enter(member(2, of=4), state=5)
    room.pass_time(1.0, *puppets)
    proposed = Basis.unpack(third.hears("propose")["basis"], Basis())
    assert (proposed.used, proposed.state) == (("token0", "token2"), 5)


@pytest.mark.parametrize("step", [0, 7])
def test_node_has_the_state_once_a_rank_has_begun_a_step(step: int):
    room = Room(member(0, of=2), Limits(1, 2, wait_s=0.0))
    puppets = room.job(2)
    room.own.say("alive", ranks=[{"rank": 0, "ago_s": 0.0, "step": step}], warm=True)
    room.leader.lose(puppets[1].me, "nodes change")
    room.take(Tick())
    all_hear("lost", puppets)
    room.agree(puppets)
    assert room.leader.basis.state == (1 if step else 0)


def test_second_process_with_a_rank_is_turned_away_while_the_first_is_alive():
    room = Room()
    first, one, last = room.job()
    again = room.enter(member(1, token="again", pid=77))
    room.pass_time(2.0, first, one, last)
    text = "rank 1 was claimed twice: by rank 1 on node1 (pid 1001) and by rank 1 on node1 (pid 77). Give each process"
    assert again.hears("over")["text"].startswith(text)


# Loss and the next membership -----------------------------------------------------------------------------------------


def test_loss_is_told_to_all_and_a_successor_completes_the_next_membership():
    room = Room()
    first, lost, last = room.job()
    lost.vanish()
    for puppet in (first, last):
        said = puppet.hears("lost")
        why = "its process has ended"
        assert said == {"is": "lost", "n": 1, "ranks": [1], "host": "node1", "why": why, "node": True, "code": 137}
    assert not room.leader.running
    again = room.enter(member(1, token="again"))
    commit = room.agree([first, again, last])
    assert (commit["n"], commit["restarts"], commit["again"]) == (2, 1, True)


def test_members_may_leave_an_ended_job_and_nobody_may_join_it():
    room = Room()
    puppets = room.job()
    room.leader.end("", code=0)
    room.leader.end("too late", code=1)
    room.take(Tick())
    puppets[1].vanish()
    all_hear("over", (puppets[0], puppets[2]))
    for puppet in (puppets[0], puppets[2]):
        puppet.hears_nothing()
    assert room.leader.closed == "the job at this address has just ended"
    assert room.enter(member(1, token="late")).closed


def test_ended_job_prepares_no_membership():
    """The job was stopped while ranks were still ending: its end would be judged and written twice."""
    room = Room()
    puppets = room.all()
    all_hear("propose", puppets)
    room.leader.end("", code=143)
    room.take(Tick())
    all_hear("over", puppets)
    for puppet in puppets:
        puppet.say("ready", n=1, problem="")
        puppet.hears_nothing()


@pytest.mark.parametrize("code", [2, 170])
def test_all_members_end_when_the_leader_cannot_prepare(code: int):
    room = Room()
    room.prepares = False
    puppets = room.all()
    get_ready(puppets)
    room.take(Prepared(1, None, code, "no"))
    for puppet in puppets:
        said = puppet.hears("over")
        assert (said["code"], said["text"]) == (code, "no")


def test_missing_route_to_a_member_that_ends_refuses_nobody():
    room = Room()
    puppets = room.all()
    for puppet, problem in zip(puppets, ["1 refuses", "", ""], strict=True):
        puppet.say("ready", n=puppet.hears("propose")["n"], problem=problem)
    puppets[1].vanish()
    puppets[1] = room.enter(member(1, token="again"))
    room.agree(puppets)


def test_member_whose_ranks_have_all_finished_may_leave():
    room = Room(member(0, of=4, num_ranks=2))
    puppets = [room.own, room.enter(member(2, of=4)), room.enter(member(3, of=4))]
    assert room.agree(puppets)["n"] == 1
    for rank in (2, 0):
        puppets[rank and 1].say("end", host="", n=1, rank=rank, code=0)
    puppets[1].vanish()
    assert room.leader.running
    puppets[2].vanish()  # rank 3 has not finished
    assert not room.leader.running


def test_messages_of_an_earlier_membership_are_dropped():
    room = Room()
    puppets = room.job()
    room.leader.lose(puppets[0].me, "exit code 137")
    room.take(Tick())
    all_hear("lost", puppets)
    room.agree(puppets)
    puppets[1].say("end", host="", n=1, rank=1, code=3)
    puppets[1].say("lost", n=2, why="a joke")
    assert room.leader.running
    puppets[1].say("end", host="", n=2, rank=1, code=3)
    assert puppets[2].hears("lost")["ranks"] == [1]


def test_end_that_comes_twice_does_not_end_the_next_membership():
    """The ranks of membership 1 stopped for a newcomer. Those of the second lose each other."""
    room = Room(member(0, of=3), Limits(1, 3, wait_s=0.0))
    puppets = [*room.job(2), room.enter(member(2, of=3))]
    room.pass_time(2.0, *puppets)
    room.sent.clear()
    for rank, puppet in enumerate(puppets[:2]):
        puppet.say("end", n=1, rank=rank, host="", code=143)
    room.take(Tick())
    all_hear("lost", puppets)
    room.prepares = False
    get_ready(puppets)
    puppets[1].say("end", n=1, rank=1, host="", code=143)
    room.take(Prepared(2, {"port": 1, "store": True, "again": False}))
    all_hear("commit", puppets)
    room.prepares = True
    for rank, puppet in enumerate(puppets):
        puppet.say("end", n=2, rank=rank, host="", code=171)
    room.take(Tick())
    all_hear("lost", puppets)
    assert room.agree(puppets)["n"] == 3


def test_simultaneous_questions_get_one_answer():
    """With a thousand ranks the answer is long."""
    room = Room()
    puppets = room.job()
    for puppet in puppets:
        puppet.say("ask"), puppet.say("ask")
    room.pass_time(0.1)
    assert all_hear("ranks", puppets) == [{"is": "ranks", "ranks": [], "nodes": [], "start": 0, "more": False}] * 3
    for puppet in puppets:
        puppet.hears_nothing()


@pytest.mark.parametrize(("job", "restarts"), [("", 0), ("earlier", 2)])
def test_first_membership_is_no_restart_even_after_a_failed_proposal(job: str, restarts: int):
    """Otherwise the script would get the arguments of a restart, but find nothing to resume."""
    room = Room(member(0, of=2), Limits(1, 2, wait_s=0.0))
    room.leader.basis, room.leader.membership = Basis(job=job), 2
    room.pass_time(5.0)
    commit = room.agree([room.own])
    assert (commit["n"], commit["restarts"], commit["again"]) == (3, restarts, restarts > 0)


# Silence and time -----------------------------------------------------------------------------------------------------


def test_stopped_leader_takes_no_member_for_silent_when_it_wakes():
    room = Room()
    first, one, _ = room.job()
    one.say("alive", ranks=[{"rank": 1, "ago_s": 7}], warm=True)
    room.now_s += 10 * timing.SILENT_S
    room.take(Tick())
    assert room.leader.heartbeats() == [{"rank": 1, "host": "node1", "ago_s": 7 + 10 * timing.SILENT_S}]
    room.pass_time(timing.SILENT_S - 1, first, one)
    first.hears_nothing()
    room.pass_time(3, first, one)
    first.hears("lost")


def follower(**rules: Any) -> tuple[Meeting, list[Any]]:
    """Return a member of a job with a fixed number of nodes that is in a membership, and what it was told to do."""
    me, out = member(1, left_s=50.0), list[Any]()
    meeting = Meeting(me, Rules(**rules), now_s=0.0, master=("10.0.0.0", 1))
    meeting_takes(meeting, out, 0.0, Tick())
    (dial,) = [each for each in out if isinstance(each, Dial)]
    known = {"token": "token0", "n": 0, "formed": 0, "running": False, "job": ""}
    meeting_takes(meeting, out, 0.0, Connected(dial.link, ("10.0.0.0", 1), "10.0.0.1"))
    meeting_takes(meeting, out, 0.0, Heard(dial.link, {"is": "leader", "over": "", **known}))
    meeting_takes(meeting, out, 0.0, Heard(dial.link, {"is": "commit", "n": 1, "basis": basis(2, 2, n=1).pack()}))
    return meeting, out


def meeting_takes(meeting: Meeting, out: list[Any], now_s: float, event: Any) -> None:
    out += meeting.take(now_s, event)


def test_silent_leader_is_lost_and_a_stopped_member_does_not_take_it_for_silent():
    meeting, out = follower()
    now_s = 0.0
    for _ in range(3):  # this process is stopped
        now_s += 10 * timing.SILENT_S
        meeting_takes(meeting, out, now_s, Tick())
        assert meeting.has_leader
    for _ in range(round(timing.SILENT_S) + 2):
        now_s += 1.0
        meeting_takes(meeting, out, now_s, Tick())
    assert not meeting.has_leader
    gone = [each.message for each in out if not isinstance(each, Send) and getattr(each, "message", {"is": ""})["is"]
            == "gone"]
    assert gone[0]["why"].startswith("sent no heartbeat for ")
    assert [each for each in out if isinstance(each, Close) and each.at_once]


def test_time_to_join_starts_with_the_loss_and_the_reason_is_named():
    meeting, out = follower()
    now_s = 1000.0
    meeting_takes(meeting, out, now_s, Ended(1))
    while not meeting.has_leader and now_s < 2000 and not any(type(each).__name__ == "Fail" for each in out):
        now_s = max(now_s, meeting.wake_s)
        meeting_takes(meeting, out, now_s, Tick())
        for dial in [each for each in out if isinstance(each, Dial)]:
            meeting_takes(meeting, out, now_s, Failed(dial.link, "10.0.0.0:1 refuses. Why. ", refused=True))
    assert 1050 <= now_s <= 1055
    (fail,) = [each for each in out if type(each).__name__ == "Fail"]
    text = "rank 1 of 3 on node1 could not join within 50 s: 10.0.0.0:1 refuses. Why. . On all ranks, MASTER_ADDR"
    assert fail.text.startswith(text.replace(". .", ".  .") if ".  ." in fail.text else text)


def test_step_to_stop_before_only_grows():
    meeting, out = follower()
    out.clear()
    for stop in (0, 4, 0):
        meeting_takes(meeting, out, 0.0, Heard(1, {"is": "prepare", "n": 1, "stop": stop}))
    assert [each.message["stop"] for each in out] == [0, 4]


def test_member_that_lacks_the_last_basis_gets_the_whole_one():
    meeting, out = follower()
    out.clear()
    old, new = basis(2, 2, n=3), basis(3, 3, n=4)
    meeting_takes(meeting, out, 0.0, Heard(1, {"is": "propose", "n": 4, "basis": new.pack(old)}))
    assert [each.message for each in out] == [{"is": "lacks"}]
    room = Room()
    puppets = room.all()
    puppets[1].say("lacks")
    first, whole = puppets[1].hears("propose"), puppets[1].hears("propose")
    assert (first["basis"]["known"].get("from") is None, whole["basis"]["known"].get("from")) == (False, None)


def test_missing_and_late_ranks_are_named_every_ten_seconds():
    room = Room()
    puppets = [room.own, room.enter(member(2))]
    for waited_s in (10, 20):
        room.pass_time(10.0, *puppets)
        text = f"rank 1 of 3 has not joined after {waited_s} s (joined: 0 on node0; 2 on node2)"
        assert puppets[1].hears("waiting")["text"] == text
    gone = room.enter(member(1))
    all_hear("propose", puppets)
    gone.vanish()
    room.pass_time(10.0, *puppets)
    left = " (lost: rank 1 on node1 (pid 1001): its process has ended)"
    assert puppets[1].hears("waiting")["text"].endswith(left)
    room.enter(member(1))
    room.own.say("ready", n=puppets[1].hears("propose")["n"], problem="")
    room.pass_time(10.0, *puppets)
    late = "after 40 s some still import torch or wait for earlier ranks to end (late: 1 on node1; 2 on node2)"
    assert puppets[1].hears("waiting")["text"] == f"all 3 ranks have joined, but {late}"


def test_time_to_join_starts_again_after_a_loss():
    room = Room(member(0, left_s=20.0))
    first, lost, last = room.job()
    room.pass_time(100.0, first, lost, last)
    lost.vanish()
    last.hears("lost")
    room.pass_time(19.0, first, last)
    last.hears("waiting")
    last.hears_nothing()
    room.pass_time(2.0, first, last)
    last.hears("waiting")
    assert "rank 1 of 3 has not joined after 20 s" in last.hears("over")["text"]


def test_preparation_by_the_leader_has_a_limit_of_its_own():
    """The time to join covers waiting for other nodes. Preparing ranks has a limit of its own."""
    room = Room(member(0, left_s=5.0))
    room.prepares = False
    puppets = room.all()
    get_ready(puppets)
    what = "all 3 ranks have joined, but rank 0 still prepares their start"
    for waited_s in range(10, round(timing.PREPARE_S) + 1, 10):
        room.pass_time(10.0, *puppets)
        assert puppets[1].hears("waiting")["text"] == f"{what} after {waited_s} s"
    room.pass_time(6.0, *puppets)
    assert puppets[1].hears("over")["text"] == f"{what} after 305 s"


# Texts ----------------------------------------------------------------------------------------------------------------


def test_message_to_all_names_a_limited_number_of_machines():
    said = describe_missing([member(rank, of=1001) for rank in range(1000)], of=1001, waited_s=5)
    assert said.endswith("; 7 on node7; and ranks on 992 more machines)")


def test_setting_that_only_one_rank_knows_is_a_difference():
    said = differences(member(1), member(0, settings={"setting new": "1"}), arguments=True)
    assert said.startswith("rank 1 on node1 (pid 1001) differs from rank 0 on node0 (pid 1000): ")
    assert ": setting new must be 1, got nothing. Start" in said
