"""The time to join, and what it is spent on: one object for every step of meeting the others."""

import time

from train.errors import JoinError
from train.process.env import Launch
from train.process.log import Log

POLL_S = 0.1
NOTICE_S = 20.0  # between lines that say what is being waited for


class Wait:
    """One deadline for all that a rank tries while it joins, and the reason to name when the deadline is over.

    `problem`: what went wrong at the last try. `stuck_in`: what the next call is that nothing can interrupt, and what
    it means if it does not return. The joining thread sets both, `rendezvous.meet` reads them from the main thread.
    """

    def __init__(self, launch: Launch, *, timeout_s: float, log: Log) -> None:
        self.launch, self.timeout_s, self.log = launch, timeout_s, log
        self.address = launch.file or f"{launch.master_addr}:{launch.master_port}"
        self.deadline_s = time.monotonic() + timeout_s
        self.problem = self.stuck_in = f"nothing was heard from rank 0 at {self.address}"
        self.stage = ""  # "port" or "store" for a problem there, see JoinError
        self._noticed_s = time.monotonic()
        # One store serves all ranks: a thousand of them ask less often
        self._poll_s = POLL_S * min(10.0, max(1.0, launch.world_size / 64))

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

    def pause(self) -> None:
        """Between two tries; says what is being waited for every NOTICE_S, once on each node."""
        time.sleep(self._poll_s)
        now_s = time.monotonic()
        if now_s - self._noticed_s > NOTICE_S:
            self._noticed_s = now_s
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
