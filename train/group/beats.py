"""Signs of life: each rank says twice a second, in the store, where it stands, and hears those of the next rank."""

import json
import threading
import time
from collections.abc import Callable
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]

from train.group import keys
from train.group.failure_detector import BEAT_S

LOOK_EVERY = 4  # beats of this rank, between two looks at the others'

Sign = dict[str, Any]  # host, phase, step, waiting, for_s, place: see `Watchdog.signs_of_life`


class Beats:
    """Those of one rank. `heard`: counted up with each sign of life of the next rank. `others`: on rank 0, the last one
    of each other rank, with `rank` and `seen`."""

    def __init__(self, store: Store, rank: int, world_size: int, sign: Callable[[], Sign]) -> None:
        """`store`: a connection that no other thread holds for long. `sign`: where this rank stands; any thread."""
        self.heard = 0
        self.others: dict[int, Sign] = {}
        self._store, self._rank, self._sign = store, rank, sign
        self._next = keys.beat((rank + 1) % world_size)
        self._ranks = [other for other in range(world_size) if other != rank]

    def send(self, quiet: threading.Event) -> None:
        """Beat until `quiet` is set or the process that holds the store has ended. For a thread of its own."""
        count, last = 0, b""
        while not quiet.wait(BEAT_S):
            count += 1
            try:
                self._store.set(keys.beat(self._rank), json.dumps({"n": count, **self._sign()}))
                if count % LOOK_EVERY != 0:
                    continue
                if self._store.check([self._next]) and (beat := self._store.get(self._next)) != last:
                    last, self.heard = beat, self.heard + 1
                if self._rank == 0:
                    self._read()
            except RuntimeError:
                break  # who waits for a loss knows

    def _read(self) -> None:
        """Note who has beaten since the last look. By this rank's clock, as clocks of machines differ."""
        names = [keys.beat(rank) for rank in self._ranks]
        if not self._store.check(names):  # one has only just joined: a read would wait for its first beat
            return
        # One request for all: it takes as long as one beat, and 200 bytes a rank
        for rank, beat in zip(self._ranks, map(json.loads, self._store.multi_get(names)), strict=True):
            if beat["n"] != self.others.get(rank, {}).get("n"):
                self.others[rank] = {**beat, "rank": rank, "seen": time.time()}
