"""Reports how and why this rank ends, to the other ranks and into the run directory."""

import logging
from collections.abc import Sequence

from rankup.agent.ends import End
from rankup.agent.logs import host_name
from rankup.agent.status import StatusFile
from rankup.errors import STOPPED
from rankup.group.line import Line
from rankup.group.losses import Losses, Suspect


class EndReporter:
    """Reports the end of this rank over its line, and in the files of `status/`.

    Made before the group, so that a rank that ends while it starts or joins is reported too; the line comes later.
    """

    def __init__(self, status: StatusFile, log: logging.Logger) -> None:
        self.status, self.log = status, log
        self.rank, self.world_size = status.rank, status.world_size
        self.step = 0  # the last one that this rank finished
        self._line: Line | None = None
        self._hosts: Sequence[str] = [host_name()] * self.world_size
        self._losses: Losses | None = None

    def connect(self, line: Line, hosts: Sequence[str], losses: Losses) -> None:
        """From now on report to the other ranks too. `hosts`: by rank. `losses`: what others report."""
        self._line, self._hosts, self._losses = line, hosts, losses

    def report(self, code: int, why: str, suspect: int | None = None, *, together: bool = False) -> None:
        """Say that this rank ends with `code`, and `why`. `suspect`: the rank that this one lost, where it knows.
        `together`: all ranks end so."""
        end = End(self.rank, host_name(), code, why, self.step, suspect=suspect)
        if self._line is not None:
            self._line.say("end", rank=self.rank, code=code, cause=why, suspect=suspect)
        self.status.write_end(end)
        ends = [end]
        if self._losses is not None:
            ends += [
                End(each.rank, self._hosts[each.rank], each.code, each.why, self.step)
                for each in self._losses.reported() if each.code is not None and each.rank != self.rank
            ]
        if together:
            ends = [End(rank, host, code, why, self.step) for rank, host in enumerate(self._hosts)]
        self.status.write_summary(ends)

    def report_stop(self, why: str) -> None:
        """This rank was asked to stop, and leaves without waiting for the others."""
        self.log.info(why)
        self.report(STOPPED, why)

    def report_from_outside(self, code: int, why: str, suspect: Suspect | None) -> int:
        """The watchdog ends this rank. Returns the code to leave with."""
        self.report(code, why, suspect.rank if suspect is not None else None)
        return code
