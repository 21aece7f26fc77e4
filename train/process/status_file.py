"""What one attempt may write of its end into a run directory that other attempts may use too."""

import contextlib
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from rankup.env.rank_env import RankEnv
from rankup.errors import USER_MISTAKE, root_cause
from train.process.last_word import tell_platform
from train.process.status import End, new_attempt, read_json, write_json


class Owner(Protocol):
    """What says whether the run directory still belongs to this attempt: the lease of `rankup.places.lease`."""

    def is_ours(self) -> bool: ...


class StatusFile:
    """`status/<attempt>/rank-N.json` of this rank, and on rank 0 `status.json` over all ranks."""

    def __init__(self, run_dir: Path, launch: RankEnv, *, shared: bool = True) -> None:
        """`shared`: another attempt may be at work in `run_dir`, so that `status.json` may be that one's."""
        self.run_dir, self.shared = run_dir, shared
        self.attempt = launch.attempt or new_attempt()  # the ranks take over rank 0's when they meet
        self.rank, self.world_size = launch.rank, launch.world_size
        self._owner: Owner | None = None
        self._copy: Callable[[Path], None] | None = None
        self.begun = False  # until then a mistake is that of a command, and no end of the run
        self._ended: dict[str, Any] | None = None  # what an earlier attempt left that finished or was stopped

    def claim(self, owner: Owner, *, copy: Callable[[Path], None] | None = None) -> None:
        """The run directory is ours as long as `owner` says so. Rank 0 only.

        `copy`: gets the path of `status.json` each time it was written, and raises nothing.
        """
        self._owner, self._copy = owner, copy
        self.write_summary("running", [])

    def write_end(self, end: End) -> None:
        """How this rank ended."""
        path = self.run_dir / "status" / self.attempt / f"rank-{end.rank}.json"
        with contextlib.suppress(OSError):  # a full disk must not hide the reason that is being reported
            write_json(path, {"attempt": self.attempt, **asdict(end)})
        tell_platform(f"rank {end.rank} of {self.world_size} on {end.host}: {end.why}", end.code)

    def write_summary(self, state: str, ends: list[End]) -> None:
        """Write `status.json`, on rank 0 and where that is allowed: at the start "running", then how each rank ended.

        Its code and reason are those of the rank that ended the run, not of the ranks that lost that rank.
        """
        earlier = read_json(self.run_dir / "status.json") or {} if self.rank == 0 else {}
        if self.rank != 0 or not self._may_write(earlier):
            return
        if earlier.get("state") in ("finished", "stopped") and earlier.get("attempt") != self.attempt:
            self._ended = earlier
        code = root_cause([end.code for end in ends])
        cause = next((end for end in ends if end.code == code), None)
        summary = {
            "attempt": self.attempt, "state": state, "world_size": self.world_size,
            "code": cause.code if cause else None, "why": cause.why if cause else "",
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "ranks": {str(end.rank): asdict(end) for end in sorted(ends, key=lambda end: end.rank)},
        }
        if code == USER_MISTAKE and not self.begun and self._ended is not None:
            summary = self._ended
        with contextlib.suppress(OSError):
            write_json(self.run_dir / "status.json", summary)
            if self._copy is not None:
                self._copy(self.run_dir / "status.json")

    def _may_write(self, earlier: dict[str, Any]) -> bool:
        """Only the owner writes. Before ownership is settled, overwrite only what a finished attempt left: a second
        attempt that is refused must leave no trace in the status of the one that is alive."""
        if self._owner is not None:
            return self._owner.is_ours()
        return not self.shared or earlier.get("state") != "running" or earlier.get("attempt") == self.attempt
