"""Reports how and why this rank ends, to the other ranks and into the run directory."""

import contextlib
import time

from torch.distributed import Store  # type: ignore[attr-defined]

from train.errors import STOPPED
from train.group import keys
from train.process.log import Log
from train.process.status import UNDECIDED, End, state_of
from train.process.status_file import StatusFile

# How long rank 0 stays after the others: its process holds the store in which they look for the cause of their loss.
LINGER_S = 3.0
STOP_LINGER_S = 2.0  # less than stop.FAREWELL_S, after which the process ends anyway


class EndReporter:
    """Reports the end of this rank in the store it shares with the others, and in the files of `status/`.

    Made before the group, so that a rank that ends while it starts or joins is reported too; the store comes later.
    """

    def __init__(self, status: StatusFile, log: Log) -> None:
        self.status, self.log = status, log
        self.rank, self.world_size = status.rank, status.world_size
        self.step = 0  # the last one that this rank finished
        self._store: Store | None = None
        self._hosts_store = False

    def connect(self, store: Store, *, hosts_store: bool) -> None:
        """From now on report to the other ranks too. `hosts_store`: the store ends with this process."""
        self._store, self._hosts_store = store, hosts_store

    def report(
        self, code: int, why: str, suspect: int | None = None, *, linger_s: float = LINGER_S, alone: bool = False
    ) -> None:
        """Say that this rank ends with `code`, and `why`. Blocks for `linger_s` at most where it hosts the store.

        `suspect`: the rank that this one lost, where it knows. `alone`: it stops without the others, which lose a peer
        by that.
        """
        end = End(self.rank, self.log.host, state_of(code), code, why, self.step, suspect)
        if self._store is not None:
            with contextlib.suppress(RuntimeError):  # torch's own errors: the store's process is gone
                self._store.set(keys.end(self.rank), end.to_json())
                if end.state == "failed" or alone:
                    self._store.set(keys.FAILED, str(self.rank))
        self.status.write_end(end)
        if self.rank != 0:
            return
        self.status.write_summary(end.state, self._ends(end))
        # Under torchrun the agent holds the store, and after a failure nobody needs this rank
        if self._store is not None and (self._hosts_store or end.state != "failed"):
            until_s = time.monotonic() + linger_s
            while not self._all_reported(end) and time.monotonic() < until_s:
                time.sleep(0.02)
            self.status.write_summary(end.state, self._ends(end))

    def report_stop(self, why: str) -> None:
        """This rank was asked to stop, and leaves without waiting for the others."""
        self.log.info(why)
        self.report(STOPPED, why, linger_s=STOP_LINGER_S, alone=True)

    def report_overdue(self, code: int, why: str, suspect: int | None) -> int:
        """The watchdog ends this rank. Returns the code to leave with."""
        self.report(code, why, suspect)
        return code

    def _ends(self, own: End) -> list[End]:
        """This rank's end and those that the others have reported so far."""
        ends = [own]
        if self._store is not None:
            with contextlib.suppress(RuntimeError):
                others = [keys.end(rank) for rank in range(self.world_size) if rank != self.rank]
                ends += [End.from_json(self._store.get(key)) for key in others if self._store.check([key])]
        return ends

    def _all_reported(self, own: End) -> bool:
        # A rank that looks for the one it lost has reported a preliminary end, and needs the store still; the lost one
        # reports nothing
        decided = {end.rank for end in self._ends(own) if end.state != UNDECIDED}
        return len(decided | ({own.suspect} - {None})) == self.world_size
