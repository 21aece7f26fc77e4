"""One live attempt owns a run directory: by a lock where the file system has locks, else by a heartbeat.

A lock of the kernel is exact and instant on one machine, its containers included, and on NFS with a lock service. An
NFS mounted with `nolock` grants every machine the same lock, other file systems have no locks at all. There the
heartbeat decides: an owner on another machine counts as dead only after LIFE_S of silence, measured by our own clock,
because the clocks of two machines differ. An owner that was only frozen, and taken for dead, asks the lease before it
publishes anything.

fcntl.lockf and not the package filelock, which locks by flock: children inherit that, so that a DataLoader worker would
keep the lock of its killed parent, and where the file system has no locks filelock falls back to one of its own.
"""

import contextlib
import errno
import fcntl
import os
import secrets
import threading
import time
from pathlib import Path
from typing import IO, Any

from rankup.agent.logs import host_name
from rankup.errors import PeerLost, UserError
from train.process.status import read_json, write_json

BEAT_S = 2.0
LIFE_S = 10.0  # several beats: a network file system may show another machine's writes seconds later
LOCK_PATIENCE_S = 4.0  # a killed attempt's rank 0 may take this long to end, and holds its lock until then


def _kernel() -> str:
    """The same for two containers of one machine, which share the kernel's locks, and different for two machines."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return host_name()


class Lease:
    """Ownership of `run_dir` for the length of a `with` block. Rank 0 only.

    `attempt`: the id that others see as the owner's. `life_s`: how long an owner without a lock may be silent.
    """

    def __init__(self, run_dir: Path, attempt: str, *, life_s: float = LIFE_S, beat_s: float = BEAT_S) -> None:
        self.run_dir, self.attempt, self.life_s, self.beat_s = run_dir, attempt, life_s, beat_s
        self.path = run_dir / "lease.json"
        self.token = secrets.token_hex(8)  # attempt ids may be given by a launcher, and then given twice
        self._lock: IO[str] | None = None
        self._released = threading.Event()
        self._writing = threading.Lock()  # no beat may be written over the release

    def __enter__(self) -> "Lease":
        """Take the run directory over from an owner that is gone.

        Raises UserError, naming the owner, where another attempt is alive, and OSError where nothing can be written.
        """
        locked = self._take_lock()
        try:
            owner = self._owner()
            # The kernel has freed the lock of its own dead process; about another machine's it may know nothing
            surely_dead = locked and owner.get("kernel") == _kernel()
            if owner and not owner.get("released") and not surely_dead and self._alive(owner):
                raise owned_by(_who(owner), self.run_dir)
            self._write()
        except BaseException:
            self._drop_lock()
            raise
        threading.Thread(target=self._beat, name="lease", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._released.set()
        # The file stays, marked as released: a successor need not watch for a heartbeat before it starts
        with contextlib.suppress(OSError), self._writing:
            if self.is_ours():
                write_json(self.path, {"token": self.token, "attempt": self.attempt, "released": True})
        self._drop_lock()

    def check(self) -> None:
        """Raises PeerLost where another attempt took the run over: this one was frozen for longer than `life_s`."""
        if not self.is_ours():
            raise PeerLost(f"another attempt owns {self.run_dir} by now ({_who(self._owner())})")

    def is_ours(self) -> bool:
        """Whether no other attempt has taken the run directory over: it would have written its token here."""
        owner = self._owner()
        return not owner or owner.get("token") == self.token

    def _owner(self) -> dict[str, Any]:
        """The content of the lease as it was written last, or {} where nothing can be read."""
        owner = read_json(self.path)
        return owner if isinstance(owner, dict) else {}

    def _take_lock(self) -> bool:
        """True if the kernel's lock is ours, False where there are no locks. Raises UserError if another has it."""
        self._lock = (self.run_dir / ".lock").open("a+", encoding="ascii")
        until_s = time.monotonic() + LOCK_PATIENCE_S
        while True:
            try:
                fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except OSError as error:
                if error.errno not in (errno.EACCES, errno.EAGAIN):
                    return False  # ENOLCK, EOPNOTSUPP: this file system has no locks
                if time.monotonic() > until_s:
                    self._drop_lock()
                    raise owned_by(_who(self._owner()), self.run_dir) from None
            time.sleep(0.1)

    def _drop_lock(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _alive(self, owner: dict[str, Any]) -> bool:
        """Watch for up to `life_s` whether the owner writes a new beat."""
        until_s = time.monotonic() + self.life_s
        while time.monotonic() < until_s:
            now = self._owner()
            if now.get("released"):  # it ends normally at this moment
                return False
            if now.get("beat") != owner.get("beat") or now.get("token") != owner.get("token"):
                return True
            time.sleep(0.2)
        return False

    def _write(self, beat: int = 0) -> None:
        write_json(self.path, {
            "token": self.token, "attempt": self.attempt, "host": host_name(), "pid": os.getpid(),
            "kernel": _kernel(), "beat": beat,
        })

    def _beat(self) -> None:
        beat = 0
        while not self._released.wait(self.beat_s):
            beat += 1
            # A full disk: the next save reports it, and may find room again
            with contextlib.suppress(OSError), self._writing:
                if self._released.is_set() or not self.is_ours():
                    return
                self._write(beat)


def owned_by(owner: str, place: Path | str) -> UserError:
    """What to raise where a live attempt owns the run at `place`."""
    return UserError(
        f"run_dir: {place} is owned by a live attempt, {owner}. Wait for it, end it, or set another --name."
    )


def _who(owner: dict[str, Any]) -> str:
    return f"{owner.get('attempt', '?')} on {owner.get('host', '?')} (pid {owner.get('pid', '?')})"
