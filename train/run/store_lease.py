"""One live attempt owns a run in a store of objects: by writes that succeed only where there is no such object yet.

`lease/00000007.json` is the seventh attempt's. Whoever creates the next number owns the run; its beats overwrite its
own object alone. So the one condition that is needed is "create unless it exists" (If-None-Match on S3, a generation of
0 on GCS, overwrite=False on Azure), and an owner that was frozen, and taken for dead, sees that there is a next number.
No number is ever removed, or given twice: `lease/newest.json` is a hint where to begin to look. What an owner writes of
the run lies below its number, see `train.run.run_store`, so that who wakes up late overwrites nothing.
"""

import contextlib
import json
import re
import secrets
import threading
import time
from pathlib import Path
from typing import Any

from rankup.agent.logs import host_name
from rankup.errors import PeerLost, UserError
from train.process.exit import within
from train.process.status import read_json, write_json
from train.run.lease import owned_by
from train.run.objects import Objects, parse

BEAT_S = 5.0  # each beat is one small write: 0.4 US cents an hour on S3
LIFE_S = 30.0
HINT = "lease/newest.json"
LAST_WORD_S = 2.0  # how long the end of an attempt may wait for a store that does not answer
OWN = ".store-lease.json"  # in the run's folder on this machine: the token that this folder wrote last


class StoreLease:
    """Ownership of the run at `store` for the length of a `with` block. Rank 0 only.

    `folder`: the run's on this machine. Its own lease, which must be held already, shows that an earlier owner with the
    same folder is dead. `life_s`: how long any other owner may be silent, by our own clock.
    """

    def __init__(
        self, store: Objects, folder: Path, attempt: str, *, life_s: float = LIFE_S, beat_s: float = BEAT_S
    ) -> None:
        self.store, self.folder, self.attempt, self.life_s, self.beat_s = store, folder, attempt, life_s, beat_s
        self.token = secrets.token_hex(8)
        self.number = 0  # from `claim` on
        self._lost = False
        self._released = threading.Event()
        self._writing = threading.Lock()  # no beat may be written over the release

    def __enter__(self) -> "StoreLease":
        """Take the run over from an owner that is gone.

        Raises UserError, naming the owner, where another attempt is alive, and as `Objects` does.
        """
        number = highest_number(self.store) + 1
        owner = parse(self.store.read(_name(number - 1)))
        mine = owner.get("token") == (read_json(self.folder / OWN) or {}).get("token")
        if owner and not owner.get("released") and not mine and self._alive(number - 1, owner):
            raise owned_by(_who(owner), self.store.url)
        write_json(self.folder / OWN, {"token": self.token})
        self.claim(number)
        self._look_for_conditions()
        threading.Thread(target=self._beat, name="store lease", daemon=True).start()
        return self

    def claim(self, number: int) -> None:
        """Be the owner of that number, without beats. Raises UserError where another attempt is, and as `Objects` does.

        Who owns the run up to now, dead or alive, notices that at its next `check`.
        """
        if not self.store.create(_name(number), self._content(0)):
            raise owned_by(_who(parse(self.store.read(_name(number)))), self.store.url)
        self.number = number
        self.store.write(HINT, json.dumps({"number": number}).encode())

    def __exit__(self, *_: object) -> None:
        self._released.set()

        def release() -> None:
            with self._writing:
                if not self._lost:
                    self._quiet.write(_name(self.number), self._content(0, released=True))

        within(LAST_WORD_S, release)

    def check(self) -> None:
        """Raises PeerLost where another attempt took the run over, and as `Objects` does. Costs one small request."""
        if self._released.is_set():  # a thread that still copies must not publish any more
            raise PeerLost(f"{self.store.url} was given back")
        following = self.store.within(self.life_s).read(_name(self.number + 1))
        if following is not None:
            self._lost = True
            raise PeerLost(f"another attempt owns {self.store.url} by now ({_who(parse(following))})")

    def followed(self) -> bool:
        """Whether another attempt has begun since, be it after this one's end. Raises as `Objects` does."""
        return self._quiet.read(_name(self.number + 1)) is not None

    def is_ours(self) -> bool:
        """Whether no other attempt has been seen to take the run over, by the last beat or check."""
        return not self._lost

    def _alive(self, number: int, owner: dict[str, Any]) -> bool:
        """Watch for up to `life_s` whether the owner writes a new beat."""
        until_s = time.monotonic() + self.life_s
        while time.monotonic() < until_s:
            time.sleep(min(1.0, self.beat_s / 2))
            now = parse(self.store.read(_name(number)))
            if now.get("released"):  # it ends normally at this moment
                return False
            if now.get("beat") != owner.get("beat"):
                return True
        return False

    def _look_for_conditions(self) -> None:
        """Say it where the store does not know "unless it exists", and look a second time then."""
        if not self.store.create(_name(self.number), self._content(1)):
            return
        self.store.warn(
            f"{self.store.url} knows no conditional writes: two attempts that begin in the same second may both train"
        )
        time.sleep(self.beat_s)
        if (owner := parse(self.store.read(_name(self.number)))).get("token") != self.token:
            raise owned_by(_who(owner), self.store.url)

    def _content(self, beat: int, *, released: bool = False) -> bytes:
        values = {"token": self.token, "attempt": self.attempt, "host": host_name(), "beat": beat, "released": released}
        return json.dumps(values).encode()

    def _beat(self) -> None:
        beat = 1
        while not self._released.wait(self.beat_s):
            beat += 1
            # A store that does not answer: the next upload reports it
            with contextlib.suppress(UserError, PeerLost), self._writing:
                if self._released.is_set():
                    return
                if self.followed():
                    self._lost = True
                    return
                self._quiet.write(_name(self.number), self._content(beat))

    @property
    def _quiet(self) -> Objects:
        """The store without its warnings, which each beat would repeat, and without another try."""
        return Objects(self.store.url, self.store.fs, self.store.root, lambda text: None)


def highest_number(store: Objects) -> int:
    """The number of the last owner, 0 where there is none. Raises as `Objects` does."""
    number = int(parse(store.read(HINT)).get("number", 0))
    while store.read(_name(number + 1)) is not None:
        number += 1
    # Leases may be lost, or left out of a copy, and a list may lag behind
    return max(number, *(split(name)[0] for name in store.names()), 0)


def folder_of(number: int) -> str:
    """The folder of all that the owner of that number has written."""
    return f"{number:08d}"


def split(name: str) -> tuple[int, str]:
    """Whose object `name` is, 0 where it carries no number, and its name below that owner's folder."""
    number, _, rest = name.partition("/")
    return (int(number), rest) if re.fullmatch(r"\d{8,}", number) and rest else (0, name)


def _name(number: int) -> str:
    return f"lease/{number:08d}.json"


def _who(owner: dict[str, Any]) -> str:
    return f"{owner.get('attempt', '?')} on {owner.get('host', '?')}"
