"""Reports how and why this rank ends, to the other ranks and into the run directory."""

import contextlib
import time

from torch.distributed import Store  # type: ignore[attr-defined]

from rankup.errors import PEER_LOST, STOPPED
from train.group import keys
from train.group.failure_detector import Suspect, is_cause
from train.group.network import no_name_lookups
from train.process.exit import within
from train.process.log import Log
from train.process.status import GONE, UNDECIDED, End, state_of
from train.process.status_file import StatusFile

# How long rank 0 stays after the others: its process holds the store in which they look for the cause of their loss.
LINGER_S = 3.0
STORE_S = 2.0  # how long a store may take to answer: that of a stopped process never does
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
        self._no_lookups = contextlib.ExitStack()  # never closed: this process is about to end

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
        within(STORE_S, lambda: self._tell_others(end, end.state == "failed" or alone))
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

    def report_loss(self) -> None:
        """Say that this rank lost a peer and looks for it. The others, which may not have noticed, wake up by that."""
        end = End(self.rank, self.log.host, UNDECIDED, PEER_LOST, "a peer was lost", self.step).to_json()

        if self._hosts_store:
            # The lost rank's successor is about to connect. Its name is of no use, and to look it up may take seconds,
            # in the thread that serves the others' last words
            self._no_lookups.enter_context(no_name_lookups())

        def tell() -> None:
            if self._store is not None:
                with contextlib.suppress(RuntimeError):
                    self._store.set(keys.end(self.rank), end)
                    self._store.compare_set(keys.FAILED, "", end)

        within(STORE_S, tell)

    def report_stop(self, why: str) -> None:
        """This rank was asked to stop, and leaves without waiting for the others."""
        self.log.info(why)
        self.report(STOPPED, why, linger_s=STOP_LINGER_S, alone=True)

    def report_from_outside(self, code: int, why: str, suspect: Suspect | None) -> int:
        """The watchdog ends this rank. Returns the code to leave with."""
        self.report(code, why, suspect.rank if suspect else None)
        return code

    def _tell_others(self, end: End, failed: bool) -> None:
        if self._store is None:
            return
        with contextlib.suppress(RuntimeError):  # torch's own errors: the store's process is gone
            self._store.set(keys.end(self.rank), end.to_json())
            if is_cause(end):
                self._store.append(keys.CAUSES, f"{self.rank}\n")  # type: ignore[attr-defined]
            if failed:
                self._store.set(keys.FAILED, end.to_json())
            self._store.add(keys.DECIDED, 1)

    def _ends(self, own: End) -> list[End]:
        """This rank's end and those that the others have reported so far."""
        ends = [own]
        if self._store is not None:
            with contextlib.suppress(RuntimeError):
                others = [keys.end(rank) for rank in range(self.world_size) if rank != self.rank]
                ends += [End.from_json(self._store.get(key)) for key in others if self._store.check([key])]
        return [end for end in ends if end.state != GONE]  # the files hold what a rank says of itself

    def _all_reported(self, own: End) -> bool:
        """Whether no other rank needs the store any more: one that is gone or that nobody hears of needs none."""
        assert self._store is not None
        missing = self.world_size - self._store.add(keys.DECIDED, 0)
        if missing == 1 and own.suspect not in (None, self.rank):
            # One that looks for the rank that it lost has reported a preliminary end, and needs the store still
            return not self._store.check([keys.end(own.suspect)])
        return missing <= 0
