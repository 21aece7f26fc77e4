"""What goes into the meeting and what comes out, see `rankup.agent.meeting`. No I/O.

A link is the number of a connection in this process; `Meeting.new_link` draws one. Messages are as in `protocol`.
Nobody changes an event or a message: they are not frozen only because that would make them three times as slow."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from rankup import timing
from rankup.agent.ends import End, Verdict
from rankup.agent.votes import Address
from rankup.env.node_env import Limits

LOCAL = 0  # the link between a leader and the member in its own process


# Out: what the shell must do ------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Send:
    """Send a message to each of these links."""

    links: Collection[int]
    message: Mapping[str, Any]


@dataclass(slots=True)
class Dial:
    """Connect `link` to an address; None: where the launcher says that rank 0 is. Then say `Connected` or `Failed`."""

    link: int
    address: Address | None
    timeout_s: float


@dataclass(slots=True)
class Close:
    """Close a link. No more may come from it. `at_once`: drop what was not sent yet: a stopped process never reads."""

    link: int
    at_once: bool


@dataclass(slots=True)
class Hear:
    """Act on a message of the leader: propose, commit, spare, lost, gone, prepare, confirm, stop, notice, ranks,
    left_out, over."""

    message: Mapping[str, Any]


@dataclass(slots=True)
class Beat:
    """Say "alive" with the heartbeats of this node's ranks."""


@dataclass(slots=True)
class Claim:
    """Claim the right to form the membership after `n` in `--shared-dir`. Then say `Claimed`."""

    job: str
    n: int


@dataclass(slots=True)
class Prepare:
    """Prepare the commit of membership `n`. Then say `Prepared`."""

    n: int
    size: int
    job: str
    restarts: int


@dataclass(slots=True)
class Judged:
    """Write how the job ended."""

    verdict: Verdict
    ends: list[End]


@dataclass(slots=True)
class Log:
    text: str


@dataclass(slots=True)
class Fail:
    """This member could not join: leave."""

    text: str


Output = Send | Dial | Close | Hear | Beat | Claim | Prepare | Judged | Log | Fail


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What the user decided. `limits`: None if the job is not elastic. `shared`: there is a `--shared-dir`. `once`: the
    members belong to one membership, because another launcher restarts them. `job`: the id of a job that begins here.
    `epoch_s`: `time.time()` minus the meeting's clock."""

    limits: Limits | None = None
    shared: bool = False
    once: bool = False
    max_restarts: int = 3
    max_failures: int | None = None
    restart_on: Collection[int] = ()
    job: str = ""
    epoch_s: float = 0.0

    @property
    def silent_s(self) -> float:
        return timing.SILENT_S if self.limits is None else self.limits.silent_s

    @property
    def frozen_s(self) -> float:
        """After a longer pause between two ticks, this process was stopped itself, and could receive nothing."""
        return timing.ALIVE_S + min(timing.FROZEN_S - timing.ALIVE_S, self.silent_s / 2)


# In: what has happened ------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Accepted:
    """A process has connected to this one, from `ip` to `own_ip`."""

    link: int
    ip: str
    own_ip: str


@dataclass(slots=True)
class Connected:
    """A process has accepted this one's connection at `address`; `own_ip` is this side's."""

    link: int
    address: Address
    own_ip: str


@dataclass(slots=True)
class Failed:
    """A connection could not be made. `why`: for users. `refused`: the machine answered."""

    link: int
    why: str
    refused: bool = False


@dataclass(slots=True)
class Heard:
    """A message came. It has the form of its kind, see `protocol`."""

    link: int
    message: Mapping[str, Any]


@dataclass(slots=True)
class Ended:
    """No more will come. `why`: "" if the other side has ended the connection, else what was wrong."""

    link: int
    why: str = ""


@dataclass(slots=True)
class Said:
    """This node says something to its leader."""

    message: Mapping[str, Any]


@dataclass(slots=True)
class Claimed:
    n: int
    ok: bool


@dataclass(slots=True)
class Prepared:
    """A commit is prepared. `more`: what it says, or None if that failed, with the exit code and the reason."""

    n: int
    more: Mapping[str, Any] | None
    code: int = 0
    why: str = ""


@dataclass(slots=True)
class Tick:
    """Time has passed, see `Meeting.wake_s`."""


Event = Accepted | Connected | Failed | Heard | Ended | Said | Claimed | Prepared | Tick
