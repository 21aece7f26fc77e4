"""Which rank caused the end: read from the reports and the signs of life that the ranks leave in the shared store."""

import contextlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed import Store  # type: ignore[attr-defined]

from rankup.errors import FINISHED, PEER_LOST, root_cause, worth_restarting
from train.group import keys
from train.group.store import second_connection, wait_for
from train.process.exit import within
from train.process.status import GONE, End

BEAT_S = 0.5
SILENT_S = 2.0  # a rank without a beat for so long, that has reported no end, is lost
SEVERAL_SILENT_S = 4.5  # longer for several: on a machine with too much to do some that are alive seem silent at first
LOOK_AGAIN_S = 0.1
WAIT_S = 3600.0  # torch waits no longer than some weeks at a time
PLACES_S = 2.0
LOOK_S = 7.0  # a store that does not answer within this is in a process that is stopped itself


@dataclass(frozen=True, slots=True)
class Suspect:
    """A rank that may be the cause, and why. `end`: as that rank reported it. `alive`: it keeps the others waiting."""

    rank: int
    why: str
    end: End | None = None
    alive: bool = False

    @property
    def gone(self) -> bool:
        """Whether somebody saw its process end."""
        return self.end is not None and self.end.state == GONE


class FailureDetector:
    """Learns from the store that a rank has failed, and which."""

    def __init__(self, store: Store, rank: int, world_size: int, *, holder: str) -> None:
        """`store`: a connection that no other thread holds for long, made for this group. It breaks with the process
        that holds the store, where a new one would be tried again and again, or meet the store of the next attempt.
        `holder`: whose process that is, for messages."""
        self._store, self._rank, self._world_size, self._holder = store, rank, world_size, holder
        self._waiting_store = second_connection(store)  # who waits holds a connection
        self._reported: list[Suspect] = []

    def wait_for_failure(self) -> None:
        """Return once a rank has reported a failure, its own or another's, or the store is gone."""
        with contextlib.suppress(RuntimeError):  # torch's own error: the process that holds the store has ended
            while not wait_for(self._waiting_store, [keys.FAILED], WAIT_S):
                pass

    def look(self) -> bool:
        """Read what was reported so far. Returns whether a process is gone."""
        try:
            # Kept, because rank 0 may take the store with it before a collective breaks here
            self._reported = named_so_far(self._waiting_store, myself=self._rank) or self._reported
        except RuntimeError:
            if not self._reported:
                return True  # the process that holds the store, without a word
        return any(suspect.gone for suspect in self._reported)

    def places(self) -> dict[int, str]:
        """Where each rank was at its last sign of life, by rank; those that gave none are left out. Takes PLACES_S
        at most: the others have not been told as yet."""

        def read() -> dict[int, str]:
            names = {rank: keys.beat(rank) for rank in range(self._world_size)}
            with contextlib.suppress(RuntimeError):  # the process that holds the store has ended
                there = [rank for rank, name in names.items() if self._store.check([name])]
                beats = self._store.multi_get([names[rank] for rank in there])
                return {rank: json.loads(beat)["place"] for rank, beat in zip(there, beats, strict=True)}
            return {}

        return within(PLACES_S, read) or {}

    def suspects(self, *, waiting: bool, overdue: bool) -> list[Suspect]:
        """The ranks that may be the cause, the most likely first, see `find_suspects`. `overdue`: this rank's own
        deadline has passed. Takes LOOK_S at most, as a store whose process is stopped never answers."""
        found = within(LOOK_S, lambda: self._find(waiting, overdue))
        return found if found is not None else [Suspect(0, f"the store of {self._holder} does not answer")]

    def _find(self, waiting: bool, overdue: bool) -> list[Suspect]:
        try:
            return find_suspects(self._store, self._world_size, myself=self._rank, waiting=waiting)
        except RuntimeError:
            if self._reported:
                return self._reported
            if overdue and not waiting:
                # This rank is the one that takes too long: those that waited for it have left, and the store with them
                return [Suspect(self._rank, "the others have left")]
            return [Suspect(0, f"the store of {self._holder} is gone")]


def find_suspects(store: Store, world_size: int, *, myself: int, waiting: bool) -> list[Suspect]:
    """The suspects, most likely first: ranks that ended by themselves, then silent ones, then those that are behind.

    `waiting`: this rank waits in a collective itself. Returns at once where a rank reported its end, or its neighbour
    in the ring did (`peer_watch`); else as soon as the cause is clear from the beats, at the latest after
    SEVERAL_SILENT_S: every survivor of a lost peer reports its end at once, which leaves the lost ones. Empty where all
    ranks wait for each other. Raises RuntimeError where the store's process ends meanwhile.
    """
    others = [rank for rank in range(world_size) if rank != myself]
    first_beats: dict[int, str] = {}
    began_s = time.monotonic()
    while True:
        # The ring reports within milliseconds: not before that are all ranks' ends and beats worth reading
        if wait_for(store, [keys.CAUSES], LOOK_AGAIN_S):
            if named := _causes(store, myself):
                return named
            time.sleep(LOOK_AGAIN_S)
        ends = _ends_of(store, others)
        silent = []
        for rank in (rank for rank in others if ends[rank] is None):
            beat = store.get(keys.beat(rank)).decode() if store.check([keys.beat(rank)]) else ""
            if first_beats.setdefault(rank, beat) == beat:
                silent.append(rank)
        waited_s = time.monotonic() - began_s
        # One rank is silent, and all others have reported: two missed beats are enough
        settled = waited_s > 2 * BEAT_S and len(silent) == 1 and all(ends[r] for r in others if r not in silent)
        if settled or waited_s > (SEVERAL_SILENT_S if len(silent) > 1 else SILENT_S):
            break
    if silent:
        return [Suspect(rank, "gave no sign of life") for rank in silent]
    for end in ends.values():
        if end is not None and end.suspect is not None:
            return [_suspected_by(end)]
    return _behind(store, others) or ([] if waiting else [Suspect(myself, "the others wait for it", alive=True)])


def _behind(store: Store, others: list[int]) -> list[Suspect]:
    """Where all are alive: a rank that is not waiting in a collective keeps the rest waiting."""
    beats = {r: json.loads(store.get(keys.beat(r))) for r in others if store.check([keys.beat(r)])}
    busy = [r for r, beat in beats.items() if not beat["waiting"]]
    return [Suspect(r, f"is alive, in {beats[r]['phase']} at step {beats[r]['step']}", alive=True) for r in busy]


def _ends_of(store: Store, others: list[int]) -> dict[int, End | None]:
    """What those ranks have reported of their end so far, None for one that has not."""
    reported = {rank: store.check([keys.end(rank)]) for rank in others}
    return {rank: End.from_json(store.get(keys.end(rank))) if there else None for rank, there in reported.items()}


def named_so_far(store: Store, *, myself: int) -> list[Suspect]:
    """The suspects as the reports name them up to now; read with a few requests, whatever the number of ranks."""
    if store.check([keys.CAUSES]) and (named := _causes(store, myself)):
        return named
    last = End.from_json(store.get(keys.FAILED)) if store.check([keys.FAILED]) else None
    return [_suspected_by(last)] if last is not None and last.suspect is not None else []


def is_cause(end: End) -> bool:
    """Whether that end is of the rank's own making. One that only lost another rank names that one as its suspect, and
    may end with that one's code."""
    return end.state == GONE or (end.code not in (FINISHED, PEER_LOST) and end.suspect in (None, end.rank))


def _causes(store: Store, myself: int) -> list[Suspect]:
    """The other ranks that ended by themselves; first those whose code forbids a restart."""
    ranks = {int(line) for line in store.get(keys.CAUSES).split()} - {myself}
    ends = [End.from_json(store.get(keys.end(rank))) for rank in ranks]
    found = [Suspect(end.rank, end.why, end) for end in ends if is_cause(end)]
    return sorted(found, key=lambda s: (s.end.code if s.end else 0, s.rank))


def _suspected_by(end: End) -> Suspect:
    assert end.suspect is not None
    why = "says that the others wait for it" if end.suspect == end.rank else f"is suspected by rank {end.rank}"
    return Suspect(end.suspect, why, alive=True)


def root_exit_code(suspects: list[Suspect], otherwise: int) -> int:
    """The exit code of a rank that lost others: the code of the likeliest suspect where that forbids a restart.

    A mistake or a fault on one rank ends all ranks so, and so does a rank that was asked to stop and left without them.
    """
    reported = [suspect.end.code for suspect in suspects[:1] if suspect.end is not None]
    code = root_cause([*reported, otherwise])
    return otherwise if worth_restarting(code) else code


def describe(suspects: list[Suspect], hosts: Sequence[str]) -> str:
    """One clause: "suspected: rank 3 on node1 (gave no sign of life)"; without the word where its end is known."""
    if not suspects:
        return "suspected: nobody, all ranks wait for each other"
    named = ", ".join(f"rank {s.rank} on {hosts[s.rank]} ({s.why})" for s in suspects[:4])
    return named if suspects[0].end is not None else f"suspected: {named}"
