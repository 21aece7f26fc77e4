"""Ownership of a run, and the line of attempts that its state comes from. This module does not import torch.

An owner sends heartbeats. Another process may take the run over if the owner is gone or silent. An owner that froze
and was taken for dead may wake up right before any of its writes, so each place must refuse such a write:

- In a folder, an owner writes a file under a hidden name, then reads the lease, then renames the file. The next owner
  first writes the lease and then removes all hidden files, so that a late rename fails. Files are put aside in the same
  way: an owner moves them into a hidden folder, which the next owner renames. metrics.jsonl is appended to: if the
  earlier owner may still wake up and write to its open file, the next owner copies the content to a new file.
- At an address, every owner has a number and writes only below that number (see `rankup.state.second_place`). The
  object store only has to support "create unless it exists".

The kernel's lock is exact and instant on one machine. On an NFS mounted with `nolock` every machine gets the lock, and
some file systems have no locks. There the heartbeats decide, timed by this process's own clock. The lock is
fcntl.lockf: children inherit the flock of the package filelock, so DataLoader workers would keep a killed rank's lock.
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
from rankup.places.files import OwnerCheck, read_json, remove_unfinished, staged, write_json
from rankup.places.object_store import ObjectStore
from rankup.timing import LAST_MESSAGE_S, LOCK_S

FILE, RESULT, METRICS, KEPT = "run.json", "result.json", "metrics.jsonl", "kept.json"
RUN_ID = re.compile(r"[\w-]+")  # a run's id names folders, and folders of rescues are removed by that name
# The files and folders that belong to one run. They are put aside if another run begins in the same directory
OF_RUN = ("checkpoints", "tensorboard", METRICS, RESULT, KEPT, "config.yaml", "tracker", FILE)
ASIDE = ".aside"  # the hidden folder into which they are moved; the next owner renames it
Owner = Mapping[str, Any]  # the newest heartbeat of an owner, {} if there is no owner or its file can't be read


def kernel_id() -> str:
    """Return an id of the running kernel. Containers of one machine have the same id and share the kernel's locks."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return socket.gethostname()


class Lease:
    """Ownership of the folder `run_dir`, held through the file `lease.json` in it for the length of a `with` block.

    `agreed`: most nodes of the job take part in this attempt, so it may take the run from an earlier attempt of the
    same job at once. `life_s`: how long an owner may stay silent. `predecessor`: the token of the previous owner.
    """

    def __init__(
        self, run_dir: Path, attempt: str, *, agreed: bool = False, life_s: float = 10.0, beat_s: float = 2.0
    ) -> None:
        # `life_s` covers several beats, because a network file system may show another machine's writes seconds late
        self.path, self.where, self.predecessor = run_dir / "lease.json", str(run_dir), ""
        self.attempt, self.agreed, self.life_s, self.beat_s = attempt, agreed, life_s, beat_s
        self.token = secrets.token_hex(8)  # the attempt's id won't do: a launcher may give the same id twice
        self._lock = contextlib.ExitStack()  # the kernel's lock
        self._may_wake = False  # whether the previous owner may only be frozen, and wake up
        self._released = threading.Event()
        self._beats = threading.Thread(target=self._beat, name="lease", daemon=True)

    def __enter__(self) -> Self:
        """Take ownership of the run. Raises UserError, which names the owner, if another owner is alive."""
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
        self._beats.join()  # no beat may overwrite the release
        # The file stays, marked as released: the next owner then starts without watching for heartbeats
        with contextlib.suppress(OSError, UserError, PeerLost):
            self._write(0)
        self._lock.close()

    def check(self) -> None:
        """Raise PeerLost if another attempt took the run over because this one was frozen for longer than `life_s`."""
        self._compare(self._owner())

    def _compare(self, owner: Owner) -> None:
        if owner and owner.get("token") != self.token:
            raise PeerLost(f"another attempt owns {self.where} now ({_who(owner)})")

    def _begin(self) -> Owner:
        """Try to lock, and return the present owner, or {} if there is none or it is certainly dead.

        Raises UserError if another attempt holds the kernel's lock, and OSError if nothing can be written.
        """
        lock = self._lock.enter_context((self.path.parent / ".lock").open("a+", encoding="ascii"))
        until_s, locked = time.monotonic() + LOCK_S, False
        while not locked:
            try:
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                locked = True
            except OSError as error:
                # This file system has no locks (ENOLCK, EOPNOTSUPP), or we follow an owner that is frozen or cut off
                if error.errno not in (errno.EACCES, errno.EAGAIN) or self._follows(self._owner()):
                    break
                if time.monotonic() > until_s:
                    raise self._owned_by(self._owner()) from None
                time.sleep(0.1)
        owner = self._owner()
        self.predecessor = str(owner.get("token", ""))
        # We got the lock, so an owner under this kernel is dead. The lock may say nothing about another machine's owner
        dead = locked and owner.get("kernel") == kernel_id()
        # An owner that died at its first beat may not have copied metrics.jsonl, which its predecessor may have open
        self._may_wake = bool(owner) and not owner.get("released") and not (dead and owner.get("beat") != 1)
        return {} if dead else owner

    def _take(self) -> None:
        def check() -> None:
            if str((owner := self._owner()).get("token", "")) != self.predecessor:
                raise self._owned_by(owner)  # this process was frozen after `_begin`

        write_json(self.path, self._heartbeat(1), check=check)
        remove_unfinished(self.path.parent)
        with contextlib.suppress(OSError):  # usually there is no such folder
            self.path.with_name(ASIDE).rename(aside_folder(self.path.parent))
        path = self.path.with_name(METRICS)
        if self._may_wake and path.is_file():  # copied only if needed, because it may be large
            with staged(path, check=self.check) as new:
                shutil.copyfile(path, new)

    def _owner(self) -> Owner:
        return read_json(self.path)

    def _write(self, beat: int) -> None:
        """Send a heartbeat if this attempt still owns the run. A `beat` of 0 releases the run."""
        write_json(self.path, self._heartbeat(beat), check=self.check)

    def _follows(self, owner: Owner) -> bool:
        """Return whether this attempt is `agreed`, and `owner` is an earlier attempt of the same job."""
        (job, _, number), (its, _, before) = self.attempt.rpartition("-"), str(owner.get("attempt", "")).rpartition("-")
        return self.agreed and job == its and before.isdecimal() and int(before) < int(number)

    def _alive(self, owner: Owner) -> bool:
        """Watch for up to `life_s`, and return whether the owner sends a new heartbeat."""
        until_s, pause_s = time.monotonic() + self.life_s, min(0.2, self.beat_s / 2)
        while (looked_s := time.monotonic()) < until_s:
            now = self._owner()
            if now.get("released"):  # the owner is just ending normally
                return False
            if now.get("beat") != owner.get("beat") or now.get("token") != owner.get("token"):
                return True
            time.sleep(pause_s)
            # A longer pause does not count as silence: this process or its whole machine was stopped itself
            until_s += max(0.0, time.monotonic() - looked_s - self.beat_s)
        return False

    def _beat(self) -> None:
        beat = 1
        while not self._released.wait(self.beat_s):
            beat += 1
            # The next save reports a full disk, a store that does not answer, or a next owner
            with contextlib.suppress(OSError, UserError, PeerLost):
                self._write(beat)

    def _heartbeat(self, beat: int) -> dict[str, Any]:
        host = socket.gethostname().split(".")[0]
        return {"token": self.token, "attempt": self.attempt, "host": host, "pid": os.getpid(), "kernel": kernel_id(),
                "beat": beat, "released": beat == 0}

    def _owned_by(self, owner: Owner) -> UserError:
        way_out = "Wait for it, end it, or set another --name."
        return UserError(f"run_dir: {self.where} is owned by a live attempt, {_who(owner)}. {way_out}")


class StoreLease(Lease):
    """Ownership of the run at `place`: the attempt that creates the next number, as `lease/00000007.json`, owns it.

    Each owner writes its heartbeats into its own file, and looks for the next number. The files are never removed.
    `folder`: the lease of the local folder. The owner that held the local folder before is certainly dead.
    """

    def __init__(self, place: ObjectStore, folder: Lease, *, life_s: float = 30.0, beat_s: float = 5.0) -> None:
        # Each beat is one small write. On S3 these writes cost 0.4 US cents an hour
        super().__init__(Path(), folder.attempt, agreed=folder.agreed, life_s=life_s, beat_s=beat_s)
        self.place, self.where, self.folder, self.number = place, place.url, folder, 0
        self.token, self.predecessor = folder.token, folder.predecessor
        self._next: Owner = {}  # the next owner, once it has been seen

    def claim(self, number: int) -> None:
        """Take this number without starting heartbeats. The earlier owner notices at its next `look`. Raises
        UserError if another attempt has the number, and raises as `ObjectStore` does."""
        if not self.place.create(_name(number), self._encoded(1)):
            raise self._owned_by(self.place.read_json(_name(number)))
        self.number = number

    def look(self, *, once: bool = False) -> None:
        """Ask the place for a next owner, then `check`. Called before something is published there; costs one small
        request. `once`: do not ask again if the place does not answer. Raises as `ObjectStore` does."""
        place = self.place.once(LAST_MESSAGE_S) if once else self.place.within(self.life_s)
        self._next = place.read_json(_name(self.number + 1))
        self.check()

    def check(self) -> None:
        """Raise PeerLost if a next owner is known, of the folder or of the place. Sends no request to the store."""
        self.folder.check()
        self._compare(self._next)

    def _begin(self) -> Owner:
        self.number = max(map(number_of, self.place.names()), default=0)  # the owner to watch
        owner = self._owner()
        return {} if self.predecessor and owner.get("token") == self.predecessor else owner

    def _take(self) -> None:
        self.claim(self.number + 1)
        self.place.must_refuse(_name(self.number), option="run_dir")

    def _owner(self) -> Owner:
        return self.place.read_json(_name(self.number))

    def _write(self, beat: int) -> None:
        self.look(once=True)
        self.place.once(LAST_MESSAGE_S).write(_name(self.number), self._encoded(beat))

    def _encoded(self, beat: int) -> bytes:
        return json.dumps(self._heartbeat(beat)).encode()


def number_of(name: str) -> int:
    """Return the number of the owner that wrote the object `name` at an address, 0 for a name without a number."""
    found = re.match(r"(?:lease/)?(\d{8,})[/.]", name)
    return int(found[1]) if found else 0


def folder_of(number: int) -> str:
    """Return the name of the folder in which the owner with this number writes."""
    return f"{number:08d}"


def _name(number: int) -> str:
    return f"lease/{folder_of(number)}.json"


def _who(owner: Owner) -> str:
    return f"{owner.get('attempt', '?')} on {owner.get('host', '?')} (pid {owner.get('pid', '?')})"


# The line of attempts -------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Lineage:
    """The line of attempts that a run's state comes from, as kept in `run.json`. The memory of a node or another place
    may hold a copy that the run has long left behind. A copy from there is used only if it is on this line.

    `run`: the run's id; a run begun anew in the same directory gets a new id. `begun_by`: the attempt that began the
    run. `start`: the id of that attempt's launch. `attempts`: [mark, step] of each attempt, which resumed at that step
    from a copy of the attempt before. `number` counts all attempts; of two lines, the higher number knows more.
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
        """Return the lineage of the run in `run_dir`, or None if there is no run or its file is damaged."""
        return cls.of(read_json(run_dir / FILE))

    @classmethod
    def of(cls, values: Any) -> Self | None:
        """Return the lineage with these `values`, as `values()` returns them, or None if they are damaged."""
        try:
            found = cls(**values)
            found.attempts = [[str(mark), int(step)] for mark, step in found.attempts]
            return found if RUN_ID.fullmatch(found.run) and isinstance(found.number, int) else None
        except (TypeError, ValueError, OverflowError):
            return None

    @property
    def _marks(self) -> list[str]:
        return [mark for mark, _ in self.attempts]

    def write(self, run_dir: Path, *, check: OwnerCheck | None = None) -> None:
        """Write `run.json`. `check`: as in `rankup.places.files.staged`. Raises OSError, and what `check` raises."""
        write_json(run_dir / FILE, self.values(), check=check)

    def values(self) -> dict[str, Any]:
        return asdict(self)

    def has(self, step: int, attempt: str) -> bool:
        """Return whether the copy that `attempt` wrote at `step` is on this line of attempts."""
        if attempt not in self._marks:
            return False
        following = self.attempts[self._marks.index(attempt) + 1 :]
        return not following or step <= following[0][1]

    def continues(self, other: Self) -> bool:
        """Return whether this lineage equals `other` or continues it."""
        return self.run == other.run and {*other._marks[-1:]} <= {*self._marks}

    def add_attempt(self, mark: str, *, step: int, writer: str | None) -> None:
        """Add the attempt `mark`, which resumes from the copy that `writer` wrote at `step`, or begins if that is None.

        Attempts later than `writer` leave the line: their steps are lost and done again, and their copies don't count.
        """
        known = [[writer, 0]] if writer else []
        if writer in self._marks:
            known = self.attempts[: self._marks.index(writer) + 1]
        self.attempts = [*known, [mark, step]]
        self.number += 1


def aside_folder(run_dir: Path) -> Path:
    """Return a new folder name for what is put aside, unique to this process."""
    return run_dir / f"before-{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}"


def put_aside(run_dir: Path, *, check: OwnerCheck) -> Path | None:
    """Move all that belongs to the run in `run_dir` into a new folder. Returns that folder, or None if nothing was
    there. Raises UserError, and what `check` raises, see `rankup.places.files.staged`."""
    there = [path for name in OF_RUN if (path := run_dir / name).exists()]
    if not there:
        return None
    with disk_errors("run_dir", run_dir, check):
        (aside := run_dir / ASIDE).mkdir()
        check()
        for path in there:
            path.rename(aside / path.name)
        return aside.rename(aside_folder(run_dir))
