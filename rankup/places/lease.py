"""Who owns a run, and which attempts its state comes from. No torch here.

An owner gives signs of life; another process may take the run from an owner that is gone or silent. An owner that was
frozen and taken for dead may wake up before any of its writes. So each place refuses that write:

- In a folder a file is written beside its name, then the lease is read, then the file gets its name. The next owner
  first writes the lease, and then removes what others have written beside names. What goes away is moved into a hidden
  folder in the same order, of which the next owner takes the name. To metrics.jsonl lines are added: of an owner that
  may wake up the next one takes the content over into a new file.
- At an address every owner has a number, and writes below that alone (see `rankup.state.second_place`). The store only
  has to know "create unless it exists".

The kernel's lock is exact and instant on one machine. On an NFS mounted with `nolock` every machine gets it, and other
file systems have none: there the signs of life decide, by our own clock. It is fcntl.lockf, because children inherit
the flock of the package filelock: a DataLoader worker would keep the lock of its killed parent.
"""

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from rankup.errors import PeerLost, UserError, disk_errors
from rankup.places.files import Check, read_json, remove_unfinished, staged, write_json
from rankup.places.place import Place
from rankup.timing import LAST_WORD_S, LOCK_S

FILE, RESULT, METRICS = "run.json", "result.json", "metrics.jsonl"
RUN_ID = re.compile(r"[\w-]+")  # it names folders, of which rescues are removed
# What belongs to the run that a directory holds, and is put aside where another one takes its place
OF_RUN = ("checkpoints", "tensorboard", METRICS, RESULT, "config.yaml", "tracker", FILE)
ASIDE = ".aside"  # where it is put together; the next owner gives that another name
Owner = Mapping[str, Any]  # what an owner wrote last, {} where there is none or nothing can be read


def kernel_id() -> str:
    """The same for two containers of one machine, which share the kernel's locks, and different for two machines."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return socket.gethostname()


class Lease:
    """Ownership of the folder `run_dir`, by `lease.json` in it, for the length of a `with` block.

    `agreed`: most nodes of the job have begun this attempt, so that an owner of an earlier one of that job has nothing
    to say. `life_s`: how long a machine may give no sign of life. `predecessor`: the token of the owner before.
    """

    def __init__(
        self, run_dir: Path, attempt: str, *, agreed: bool = False, life_s: float = 10.0, beat_s: float = 2.0
    ) -> None:
        # `life_s`, several beats: a network file system may show another machine's writes seconds later
        self.path, self.where, self.predecessor = run_dir / "lease.json", str(run_dir), ""
        self.attempt, self.agreed, self.life_s, self.beat_s = attempt, agreed, life_s, beat_s
        self.token = secrets.token_hex(8)  # attempt ids may be given by a launcher, and then given twice
        self._lock = contextlib.ExitStack()  # the kernel's
        self._may_wake = False  # the owner before
        self._released = threading.Event()
        self._beats = threading.Thread(target=self._beat, name="lease", daemon=True)

    def __enter__(self) -> Self:
        """Take the run over from an owner that is gone. Raises UserError, naming the owner, where another is alive."""
        try:
            owner = self._begin()
            if owner and not self._follows(owner) and self._alive(owner):
                raise self._owned_by(owner)
            self._take()
        except BaseException:
            self._lock.close()
            raise
        self._beats.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._released.set()
        self._beats.join()  # no beat may be written over the release
        # It stays, marked as released: a successor need not watch for a sign of life before it starts
        with contextlib.suppress(OSError, UserError, PeerLost):
            self._write(0)
        self._lock.close()

    def check(self) -> None:
        """Raises PeerLost where another attempt took the run over: this one was frozen for longer than `life_s`."""
        self._compare(self._owner())

    def _compare(self, owner: Owner) -> None:
        if owner and owner.get("token") != self.token:
            raise PeerLost(f"another attempt owns {self.where} by now ({_who(owner)})")

    def _begin(self) -> Owner:
        """The owner that is there, {} where there is none, or one that is surely dead.

        Raises UserError where another attempt has the kernel's lock, and OSError where nothing can be written.
        """
        lock = self._lock.enter_context((self.path.parent / ".lock").open("a+", encoding="ascii"))
        until_s, locked = time.monotonic() + LOCK_S, False
        while not locked:
            try:
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                locked = True
            except OSError as error:
                # ENOLCK, EOPNOTSUPP: this file system has no locks. Or the owner is frozen, or on a lost machine
                if error.errno not in (errno.EACCES, errno.EAGAIN) or self._follows(self._owner()):
                    break
                if time.monotonic() > until_s:
                    raise self._owned_by(self._owner()) from None
                time.sleep(0.1)
        owner = self._owner()
        self.predecessor = str(owner.get("token", ""))
        # The kernel has freed the lock of its own dead process; about another machine's it may know nothing
        dead = locked and owner.get("kernel") == kernel_id()
        # One that was killed before its second beat may not have taken over what the one before has open
        self._may_wake = bool(owner) and not owner.get("released") and not (dead and owner.get("beat") != 1)
        return {} if dead else owner

    def _take(self) -> None:
        def check() -> None:
            if str((owner := self._owner()).get("token", "")) != self.predecessor:
                raise self._owned_by(owner)  # this process was frozen since it looked

        write_json(self.path, self._sign(1), check=check)
        remove_unfinished(self.path.parent)
        with contextlib.suppress(OSError):  # there is none
            self.path.with_name(ASIDE).rename(before(self.path.parent))
        path = self.path.with_name(METRICS)
        if self._may_wake and path.exists():  # not always: it may be large
            with staged(path, check=self.check) as new:
                shutil.copyfile(path, new)

    def _owner(self) -> Owner:
        return read_json(self.path)

    def _write(self, beat: int) -> None:
        """Give a sign of life, if the run is ours; the last one, with `beat` 0, releases it."""
        write_json(self.path, self._sign(beat), check=self.check)

    def _follows(self, owner: Owner) -> bool:
        """Whether this attempt is a later one of the same job, and `agreed`."""
        (job, _, number), (its, _, before) = self.attempt.rpartition("-"), str(owner.get("attempt", "")).rpartition("-")
        return self.agreed and job == its and before.isdecimal() and int(before) < int(number)

    def _alive(self, owner: Owner) -> bool:
        """Watch for up to `life_s` whether the owner gives a new sign of life."""
        until_s, pause_s = time.monotonic() + self.life_s, min(0.2, self.beat_s / 2)
        while (looked_s := time.monotonic()) < until_s:
            now = self._owner()
            if now.get("released"):  # it ends normally at this moment
                return False
            if now.get("beat") != owner.get("beat") or now.get("token") != owner.get("token"):
                return True
            time.sleep(pause_s)
            # A pause that took longer was no look at the owner: this process was stopped itself, or its whole machine
            until_s += max(0.0, time.monotonic() - looked_s - self.beat_s)
        return False

    def _beat(self) -> None:
        beat = 1
        while not self._released.wait(self.beat_s):
            beat += 1
            # A full disk, a store that does not answer, or a next owner: the next save reports it
            with contextlib.suppress(OSError, UserError, PeerLost):
                self._write(beat)

    def _sign(self, beat: int) -> dict[str, Any]:
        host = socket.gethostname().split(".")[0]
        return {"token": self.token, "attempt": self.attempt, "host": host, "pid": os.getpid(), "kernel": kernel_id(),
                "beat": beat, "released": beat == 0}

    def _owned_by(self, owner: Owner) -> UserError:
        way_out = "Wait for it, end it, or set another --name."
        return UserError(f"run_dir: {self.where} is owned by a live attempt, {_who(owner)}. {way_out}")


class StoreLease(Lease):
    """Ownership of the run at `place`, by `lease/00000007.json`: whoever creates the next number owns it.

    Each owner writes its signs of life into its own file, and sees that there is a next number. None is ever removed.
    `folder`: the lease of the folder here. An owner that held that before is dead for certain.
    """

    def __init__(self, place: Place, folder: Lease, *, life_s: float = 30.0, beat_s: float = 5.0) -> None:
        # Each beat is one small write: 0.4 US cents an hour on S3
        super().__init__(Path(), folder.attempt, agreed=folder.agreed, life_s=life_s, beat_s=beat_s)
        self.place, self.where, self.folder, self.number = place, place.url, folder, 0
        self.token, self.predecessor = folder.token, folder.predecessor
        self._next: Owner = {}  # the owner after this one, as soon as it was seen

    def claim(self, number: int) -> None:
        """Take this number, without signs of life. The earlier owner notices at its next `look`. Raises UserError if
        another attempt has the number, and as `Place` does."""
        if not self.place.create(_name(number), self._encoded(1)):
            raise self._owned_by(self.place.read_json(_name(number)))
        self.number = number

    def look(self, *, once: bool = False) -> None:
        """`check` by a look at the place, before something is published there: one small request. `once`: it is not
        asked again where it does not answer. Raises as `Place`."""
        place = self.place.once(LAST_WORD_S) if once else self.place.within(self.life_s)
        self._next = place.read_json(_name(self.number + 1))
        self.check()

    def check(self) -> None:
        """Raises PeerLost where another attempt has been seen to take the run over, here or there. Asks no store."""
        self.folder.check()
        self._compare(self._next)

    def _begin(self) -> Owner:
        self.number = max(map(number_of, self.place.names()), default=0)  # the owner to watch
        owner = self._owner()
        return {} if self.predecessor and owner.get("token") == self.predecessor else owner

    def _take(self) -> None:
        self.claim(self.number + 1)
        if self.place.create(_name(self.number), self._encoded(2)):
            self.place.warn(
                f"{self.where} knows no conditional writes: two attempts that begin in the same second may both train"
            )
            time.sleep(self.beat_s)
            if (owner := self._owner()).get("token") != self.token:
                raise self._owned_by(owner)

    def _owner(self) -> Owner:
        return self.place.read_json(_name(self.number))

    def _write(self, beat: int) -> None:
        self.look(once=True)
        self.place.once(LAST_WORD_S).write(_name(self.number), self._encoded(beat))

    def _encoded(self, beat: int) -> bytes:
        return json.dumps(self._sign(beat)).encode()


def number_of(name: str) -> int:
    """Which owner has written what has this name at an address, 0 for a name without a number."""
    found = re.match(r"(?:lease/)?(\d{8,})[/.]", name)
    return int(found[1]) if found else 0


def folder_of(number: int) -> str:
    """The folder of all that the owner of that number has written."""
    return f"{number:08d}"


def _name(number: int) -> str:
    return f"lease/{folder_of(number)}.json"


def _who(owner: Owner) -> str:
    return f"{owner.get('attempt', '?')} on {owner.get('host', '?')} (pid {owner.get('pid', '?')})"


# The line of attempts -------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Lineage:
    """Which attempts the state of a run comes from, in `run.json`. A copy that is found long after the run went on
    without it, in the memory of a node or at another address, is taken only where it lies on this line.

    `run`: its id; one that was begun anew in the same directory has another. `begun_by`: the attempt that began it, and
    `start` its launch's. `attempts`: each with its mark and the step at which it went on, from a copy of the one before
    it. `number` counts all attempts: of two nodes that were node 0 in turn, the one with the higher number knows more.
    """

    run: str
    begun_by: str
    start: str
    attempts: list[list[Any]]
    number: int = 0

    @classmethod
    def new(cls, attempt: str, start: str) -> Self:
        return cls(secrets.token_hex(8), attempt, start, [])

    @classmethod
    def read(cls, run_dir: Path) -> Self | None:
        """What the run directory holds, None where it holds no run or a damaged file."""
        return cls.of(read_json(run_dir / FILE))

    @classmethod
    def of(cls, values: Any) -> Self | None:
        """What the file of a run holds, None where that is damaged."""
        try:
            found = cls(**values)
            found.attempts = [[str(mark), int(step)] for mark, step in found.attempts]
            return found if RUN_ID.fullmatch(found.run) and isinstance(found.number, int) else None
        except (TypeError, ValueError, OverflowError):
            return None

    @property
    def _marks(self) -> list[str]:
        return [mark for mark, _ in self.attempts]

    def write(self, run_dir: Path, *, check: Check | None = None) -> None:
        """`check`: of an owner, see `rankup.places.files.staged`. Raises OSError."""
        write_json(run_dir / FILE, self.values(), check=check)

    def values(self) -> dict[str, Any]:
        return asdict(self)

    def has(self, step: int, attempt: str) -> bool:
        """Whether the run's line of attempts goes through the copy that `attempt` wrote at `step`."""
        if attempt not in self._marks:
            return False
        following = self.attempts[self._marks.index(attempt) + 1 :]
        return not following or step <= following[0][1]

    def goes_on_from(self, other: Self) -> bool:
        """Whether this is `other`, or what came of it."""
        return self.run == other.run and {*other._marks[-1:]} <= {*self._marks}

    def go_on(self, mark: str, *, step: int, writer: str | None) -> None:
        """The attempt `mark` goes on from the copy that `writer` wrote at `step`, or, if None, from the beginning.

        What later attempts than the writer did is lost, and done again: what they left counts no longer.
        """
        known = [[writer, 0]] if writer else []
        if writer in self._marks:
            known = self.attempts[: self._marks.index(writer) + 1]
        self.attempts = [*known, [mark, step]]
        self.number += 1


def before(run_dir: Path) -> Path:
    """Where what is put aside goes: a folder of this process's own."""
    return run_dir / f"before-{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}"


def put_aside(run_dir: Path, *, check: Check) -> Path | None:
    """Move what belongs to the run there into a new folder. Returns that, None where nothing was there.
    Raises UserError, and what `check` raises, see `rankup.places.files.staged`."""
    there = [path for name in OF_RUN if (path := run_dir / name).exists()]
    if not there:
        return None
    with disk_errors("run_dir", run_dir, check):
        (aside := run_dir / ASIDE).mkdir()
        check()
        for path in there:
            path.rename(aside / path.name)
        return aside.rename(before(run_dir))
