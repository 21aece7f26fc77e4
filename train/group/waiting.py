"""The time to join, and what it is spent on: one object for every step of meeting the others."""

import contextlib
import time

from rankup.env.rank_env import RankEnv
from rankup.errors import JoinError
from train.process.log import Log

# Between two tries to connect. Short at first: the ranks of one job start within seconds of each other, and after the
# loss of a rank all come back within tenths of a second.
EARLY_PAUSE_S, EARLY_S = 0.01, 3.0
PAUSE_S = 0.1
NOTICE_S = 10.0  # between lines that say what is being waited for
# The longest call that waits in the store. Between two of them rank 0 looks at its clock, and the others look whether
# there is a new rank 0 beside a store that is not its own. A thousand of them look less often.
SLICE_S = 1.0


class Wait:
    """One deadline for all that a rank tries while it joins, and the reason to name when the deadline is over.

    `problem`: what went wrong at the last try. `stuck_in`: what the next call is that nothing can interrupt, and what
    it means if it does not return. The joining thread sets both, `rendezvous.meet` reads them from the main thread.
    """

    def __init__(self, launch: RankEnv, *, timeout_s: float, log: Log) -> None:
        self.launch, self.timeout_s, self.log = launch, timeout_s, log
        self.address = launch.file or f"{launch.master_addr}:{launch.master_port}"
        self.deadline_s = time.monotonic() + timeout_s
        self.problem = self.stuck_in = f"nothing was heard from rank 0 at {self.address}"
        # Closed once the group has formed: until then the process with the store asks no resolver
        self.no_lookups = contextlib.ExitStack()
        self.stage = ""  # "port" or "store" for a problem there, see JoinError
        self._noticed_s = time.monotonic()
        self.hurry()
        # One machine takes the connections of all ranks: a thousand of them try less often
        self._crowd = min(10.0, max(1.0, launch.world_size / 64))

    @property
    def over(self) -> bool:
        return time.monotonic() > self.deadline_s

    @property
    def waited_s(self) -> float:
        return time.monotonic() - self.deadline_s + self.timeout_s

    @property
    def left_s(self) -> float:
        """Seconds until the deadline, at least 1: a call that is begun needs some time to succeed."""
        return max(1.0, self.deadline_s - time.monotonic())

    @property
    def slice_s(self) -> float:
        """How long the next call that waits in the store may take; just beyond the deadline where that is near."""
        longest_s = SLICE_S if self.launch.rank == 0 else SLICE_S * self._crowd
        return min(longest_s, max(0.0, self.deadline_s - time.monotonic()) + 0.001)

    @property
    def notice_due(self) -> bool:
        return time.monotonic() - self._noticed_s > NOTICE_S

    def pause(self) -> None:
        """Between two tries to connect."""
        time.sleep(self._crowd * (EARLY_PAUSE_S if time.monotonic() < self._early_until_s else PAUSE_S))
        self.notice()

    def hurry(self) -> None:
        """Try often again: rank 0 was there a moment ago, and its successor is about to come."""
        self._early_until_s = time.monotonic() + EARLY_S

    def notice(self, *, now: bool = False) -> None:
        """Say what is being waited for every NOTICE_S, once on each node; with `now` at once."""
        if not now and not self.notice_due:
            return
        self._noticed_s = time.monotonic()
        if self.launch.rank == 0:
            self.log.info(f"still waiting: {self.problem}")
        elif self.launch.local_rank == 0:
            self.log.warning(f"still waiting: {self.problem}")

    def failure(self, problem: str) -> JoinError:
        """The error of this rank alone; where the ranks have met, rank 0 finds one for all."""
        if self.launch.file:
            rule = "All ranks have to name the same file."
        else:
            rule = "MASTER_ADDR and MASTER_PORT have to name the machine and port of rank 0 on all ranks."
        who = f"rank {self.launch.rank} of {self.launch.world_size} on {self.log.host}"
        return JoinError(f"{who} could not join within {self.timeout_s:g} s: {problem}. {rule}", stage=self.stage)
