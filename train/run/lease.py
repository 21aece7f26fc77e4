"""One live attempt owns a run directory: a lock where the file system has them, and signs of life for where it lies.

A lock of the kernel is exact and instant on one machine, its containers included, and on NFS with a lock service. The
heartbeat is for the rest: an owner on another machine counts as dead only after it was silent for LIFE_S, measured by
our own clock (those of two machines differ). An owner that was merely frozen finds out before it publishes anything.
"""

import contextlib
import errno
import os
import secrets
import threading
import time
from pathlib import Path
from typing import IO, Any

from train.errors import PeerLost, UserError
from train.process.log import host_name
from train.process.status import read_json, write_json

BEAT_S = 2.0
LIFE_S = 10.0
# A killed attempt's last processes may still be going, and its lock with them.
LOCK_PATIENCE_S = 4.0


def _kernel() -> str:
    """Tells two machines apart, and not two containers of one: they share the locks of the kernel."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return host_name()


class Lease:
    """Ownership of `run_dir` for the length of a `with` block. Rank 0 only."""

    def __init__(self, run_dir: Path, attempt: str, *, life_s: float = LIFE_S, beat_s: float = BEAT_S) -> None:
        self.run_dir, self.attempt, self.life_s, self.beat_s = run_dir, attempt, life_s, beat_s
        self.path = run_dir / "lease.json"
        self.token = secrets.token_hex(8)
        self._lock: IO[str] | None = None
        self._released = threading.Event()
        self._writing = threading.Lock()
        self._held = False

    def __enter__(self) -> "Lease":
        """Raises UserError, naming the owner, where another attempt is alive."""
        locked = self._take_lock()
        try:
            owner = self._owner()
            if owner is not None and not owner.get("released"):
                same_kernel = owner.get("kernel") == _kernel()
                if not (locked and same_kernel) and self._alive(owner):
                    raise UserError(self._refusal(owner))
            self._write()
        except BaseException:
            self._drop_lock()
            raise
        self._held = True
        threading.Thread(target=self._beat, name="lease", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._released.set()
        with contextlib.suppress(OSError), self._writing:
            if self._held and self.is_ours():
                write_json(self.path, {"token": self.token, "attempt": self.attempt, "released": True})
        self._drop_lock()

    def check(self) -> None:
        """Raises PeerLost where another attempt took the run over: this one was frozen for longer than its life."""
        if not self.is_ours():
            raise PeerLost(f"another attempt owns {self.run_dir} by now ({_who(self._owner() or {})})")

    def is_ours(self) -> bool:
        """Whether no other attempt has taken the run directory over: that would have written its name here."""
        owner = self._owner()
        return owner is None or owner.get("token") == self.token

    def _owner(self) -> dict[str, Any] | None:
        """Who wrote the lease last, or None where nothing can be read."""
        owner = read_json(self.path)
        return owner if isinstance(owner, dict) else None

    def _take_lock(self) -> bool:
        """True if the kernel's lock is ours, False where the file system has none. Raises UserError if it is another's."""
        try:
            import fcntl
        except ImportError:  # Windows
            return False
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
                    raise UserError(self._refusal(self._owner() or {})) from None
            time.sleep(0.1)

    def _drop_lock(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _alive(self, owner: dict[str, Any]) -> bool:
        """Whether the owner beats within its life, watched from here."""
        until_s = time.monotonic() + self.life_s
        while time.monotonic() < until_s:
            now = self._owner() or {}
            if now.get("released"):
                return False
            if now.get("beat") != owner.get("beat") or now.get("token") != owner.get("token"):
                return True
            time.sleep(0.2)
        return False

    def _refusal(self, owner: dict[str, Any]) -> str:
        return (
            f"run_dir: {self.run_dir} is owned by a live attempt, {_who(owner)}. Wait for it, end it, or set another "
            "--name."
        )

    def _write(self, beat: int = 0) -> None:
        write_json(
            self.path,
            {
                "token": self.token, "attempt": self.attempt, "host": host_name(), "pid": os.getpid(),
                "kernel": _kernel(), "beat": beat,
            },
        )

    def _beat(self) -> None:
        beat = 0
        while not self._released.wait(self.beat_s):
            beat += 1
            with contextlib.suppress(OSError), self._writing:  # a full disk is the save's to report
                if self._released.is_set() or not self.is_ours():
                    return
                self._write(beat)


def _who(owner: dict[str, Any]) -> str:
    return f"{owner.get('attempt', '?')} on {owner.get('host', '?')} (pid {owner.get('pid', '?')})"


