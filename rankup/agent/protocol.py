"""The messages between the members of a job: one JSON object per line, over TCP. Imports no torch.

A member is the agent of a node, or of one rank if another launcher started the ranks. Each member keeps a connection
to the leader until the job ends. `rankup.agent.meeting` says how they meet.

| from a member                                      | from the leader                                            |
|----------------------------------------------------|------------------------------------------------------------|
| hello: a Member, warm, state; age and before: of   | leader(over, ...): the first message on a connection, see  |
|   the newest `votes.Basis` that it knows           |   `leading.knowledge`; over: why it takes no members, or ""|
| leads(..., port): instead of hello, from another   | show: your basis is newer than mine                        |
|   leader of an elastic job, whose number of nodes  | propose(n, basis)                                          |
|   may change; port 0: from a member without leader | commit(n, basis, port, job, restarts, why, store, again,   |
| shown(basis): answers show                         |   change): port is where rank 0's store listens            |
| alive(ranks, warm, state): a heartbeat. ranks: see | basis(basis): this membership's basis has new voters       |
|   `Record.heartbeat`; warm: torch is imported;     | spare(basis): wait, the job runs without you               |
|   state: the newest membership whose state I have  | alive: a heartbeat                                         |
| has(age), lacks: the newest basis that I know; I   |                                                            |
|   don't have the one that you changed              | lost(n, ranks, host, why, node): membership n is over. node|
| ready(n, problem): my ranks have ended, and the    |   says that the whole node of these ranks is lost          |
|   route to the next member works if problem is ""  | stop(signal, change), notice                               |
| standing: see `votes.StopAgreement`                | prepare, confirm                                           |
| ask: where is each rank of the job?                | ranks(ranks, nodes, start, more): see `pages`              |
| end, ending: an End; a rank has ended, or will     | waiting(text): who is missing                              |
| stop(signal), notice: this node got a signal       | left_out(why): leave, because your ranks failed too often  |
| leaving, left: this node must leave; it leaves now |   or another member does not reach you                     |
| cannot(code, text): it can't start its ranks       | over(code, text): there will be no more memberships        |

No receiver unpickles or executes what arrives. A process that sends anything else is disconnected.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from rankup.env.rank_env import holders, ranges

PAGE = 500  # rows of one message; a row has 1,600 bytes at most
MOST_HOSTS = 8  # how many hosts one line names at most
HINT = (
    "gloo and nccl use any high port between the nodes: open them all, or narrow net.ipv4.ip_local_port_range on every "
    "node and open that range; or name another interface in GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME."
)
KILLED = 137  # a shell's exit code for a process that SIGKILL ended
ARGUMENTS, SHARED = "digest of the arguments", "--shared-dir"  # names in `Member.settings`

INT = range(-(2**63), 2**63)
JOB = re.compile(r"[\w.-]{0,200}")  # it becomes a part of file names
NAME = re.compile(r"[\w !-~]{0,255}")  # printable, because it may be logged
SIGNALS = frozenset({"SIGTERM", "SIGINT", "SIGUSR1"})
AGE = (INT, INT, INT, NAME)
TOKENS = [(str, INT, INT)]
BASIS: dict[str, Any] = {  # see `votes.Basis.pack`
    "n": INT, "v": INT, "by": NAME, "job": JOB, "used": TOKENS, "voters": TOKENS, "left": bool,
    "state": INT, "before": [(INT, TOKENS, TOKENS)], "same_arguments": bool,
    "known": {
        "from?": AGE, "gone": [INT],
        "more": [(NAME, str, range(65536), range(65536), NAME, range(2**63), range(1, 2**63))],
    },
}
KNOWLEDGE: dict[str, Any] = {"token": str, "n": INT, "formed": INT, "running": bool, "job": JOB}
END: dict[str, Any] = {
    "rank": INT, "host": str, "code": INT, "why?": str, "step?": INT, "told?": bool, "suspect?": INT,
}
# The forms of messages, see `fits`. A form is a type, a range, a set of texts, a pattern, a list of one form, a tuple
# with a form per item, or a dict of forms by name. A name with ? may be absent or null. A kind of message without a
# form may hold anything. MEMBERS: messages of members to the leader, and of ranks to their agent
MEMBERS: dict[str, dict[str, Any]] = {
    "hello": {
        "token": NAME, "first_rank": range(2**63), "num_ranks": INT, "world_size": INT, "host": NAME, "pid": INT,
        "left_s": float, "restarts": INT, "ip": NAME, "port": range(65536), "serves": range(65536), "settings": dict,
        "age": AGE, "before": [INT], "state": INT, "warm?": bool,
    },
    "leads": {**KNOWLEDGE, "port": range(65536)}, "shown": {"basis": BASIS}, "has": {"age": AGE},
    "ready": {"n": INT, "problem": str},
    "alive": {"ranks?": [{"rank": INT, "ago_s": float}], "warm?": bool, "state?": INT},
    "standing": {"n": INT, "stop": INT, "step": INT}, "cannot": {"code": range(1, 256), "text": str},
    "ending": {"n": INT, **END}, "end": {"n?": INT, **END}, "stop": {"signal": SIGNALS},
}
LEADERS: dict[str, dict[str, Any]] = {
    "leader": {**KNOWLEDGE, "over": str, "at?": (str, range(65536))},
    "waiting": {"text": str}, "spare": {"basis": BASIS}, "basis": {"basis": BASIS},
    "propose": {"n": INT, "basis": BASIS},
    "commit": {
        "n": INT, "port": range(65536), "job": JOB, "restarts": INT, "why?": str, "store?": bool, "again?": bool,
        "change?": str, "basis": BASIS,
    },
    "prepare": {"n": INT, "stop": INT}, "confirm": {"n": INT, "stop": INT}, "stop": {"signal": SIGNALS},
    "lost": {"n": INT, "ranks": [INT], "why": str, "code?": INT},
    "ranks": {"ranks": [{"ago_s": float}], "start": INT, "more": bool},
    "left_out": {"why": str},
    "over": {"code": INT, "text": str},
}


def pages(ranks: Sequence[Any], nodes: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the answer to "ask" as messages of PAGE rows at most: with the rows of 5,000 ranks, one message would be
    too long. `start`: the place of the page's first rows. `more`: whether another page follows."""
    starts = range(0, max(1, len(ranks), len(nodes)), PAGE)
    return [
        {"is": "ranks", "ranks": ranks[start:start + PAGE], "nodes": nodes[start:start + PAGE], "start": start,
         "more": start != starts[-1]}
        for start in starts
    ]


@dataclass(frozen=True)
class Member:
    """A member's description of itself. `ip` and `port`: where it listens for the route test of another member."""

    token: str  # a random id of this process
    first_rank: int
    num_ranks: int
    world_size: int
    host: str
    pid: int
    left_s: float  # how long it looks for the leader, or waits for members as the leader, at the start and after a loss
    restarts: int = 0
    ip: str = ""  # the address of the interface that the user chose, else of the one that routes to the leader
    port: int = 0
    serves: int = 0  # in an elastic job, the port where it serves members or says who leads; otherwise 0
    settings: dict[str, str] = field(default_factory=dict)  # must be equal for all members, see `differences`

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.num_ranks)

    @property
    def name(self) -> str:
        last = self.first_rank + self.num_ranks - 1
        which = f"rank {last}" if self.num_ranks == 1 else f"ranks {self.first_rank}-{last}"
        return f"{which} on {self.host}"

    @property
    def who(self) -> str:
        return f"{self.name} (pid {self.pid})"

    @staticmethod
    def read(message: Mapping[str, Any]) -> "Member":
        """Return the member that a hello describes. Raises ValueError if its ranks or settings are impossible."""
        member = Member(**{each.name: message[each.name] for each in fields(Member)})
        if not 1 <= member.num_ranks <= member.world_size - member.first_rank:
            raise ValueError("ranks beyond the world size")
        if not all(isinstance(text, str) for text in member.settings.values()):
            raise ValueError("settings")
        return member


# Texts about members, for users ---------------------------------------------------------------------------------------


def describe_missing(present: list[Member], *, of: int, waited_s: float) -> str:
    """Say who is missing: "rank 3 of 4 has not joined after 120 s (joined: 0-1 on node0; 2 on node1)"."""
    missing = sorted(set(range(of)) - {rank for member in present for rank in member.ranks})
    which = f"rank {missing[0]} of {of} has" if len(missing) == 1 else f"ranks {ranges(missing)} of {of} have"
    return f"{which} not joined after {waited_s:g} s (joined: {by_host(present) or 'none'})"


def by_host(members: Iterable[Member]) -> str:
    """Name the ranks of each host: "0-1 on node0; 2 on node1"."""
    ranks = holders((rank, member.host) for member in members for rank in member.ranks)
    named = [f"{ranges(numbers)} on {host}" for host, numbers in sorted(ranks.items(), key=lambda item: min(item[1]))]
    more = [f"and ranks on {len(named) - MOST_HOSTS} more machines"] if len(named) > MOST_HOSTS else []
    return "; ".join(named[:MOST_HOSTS] + more)


def differences(member: Member, model: Member, *, arguments: bool) -> str:
    """Say in one line how the settings of `member` differ from those of `model`; "" if they are equal. `arguments`:
    whether to compare the arguments of the script too.

    Ranks with different code or settings get wrong numbers instead of errors: an all-reduce of tensors with different
    sizes silently returned garbage on one rank.
    """
    theirs, ours = member.settings, model.settings
    if theirs == ours:  # the fast path, because each new member causes a check of all members
        return ""
    names = {*theirs, *ours} - (set() if arguments else {ARGUMENTS})
    found = []
    for name in sorted(name for name in names if theirs.get(name) != ours.get(name))[:8]:
        row = name, ours.get(name, "absent"), theirs.get(name, "nothing")
        # The values come from another node, and may contain any text of any length
        found.append("{} must be {}, got {}".format(*(text[:200].encode("unicode_escape").decode() for text in row)))
    way_out = "Start all nodes of a job with the same program, arguments and settings, and another job at another port."
    return f"{member.who} differs from {model.who}: {'; '.join(found)}. {way_out}" if found else ""
