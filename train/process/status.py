"""How each rank ended: `status/<attempt>/rank-N.json`, and `status.json`, which sums them up.

`status.json` has the attempt's id in it. A reader that finds no file, or another attempt's id, takes the run for
failed: yesterday's success must never be read as today's.
"""

import contextlib
import json
import os
import secrets
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rankup import errors
from rankup.places.files import write_atomically

# States in the store only
UNDECIDED = "undecided"  # of a rank that still looks for the rank that it lost
GONE = "gone"  # of a rank that can't report its end: another one saw its process end
# Keeps a victim from being named the root cause: torchrun's summary takes the earliest time, which has whole seconds,
# then the lowest rank; and for a rank that left no file the time at which the others had ended.
VICTIM_LATER_S = 3


@dataclass(frozen=True, slots=True)
class End:
    """How one rank ended. `code` is its exit code, `step` the last step it completed."""

    rank: int
    host: str
    state: str  # finished | stopped | failed, UNDECIDED or GONE
    code: int
    why: str
    step: int
    suspect: int | None = None  # the rank that this one lost, if it knows

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str | bytes) -> "End":
        return End(**json.loads(text))


def state_of(code: int) -> str:
    """The word for an exit code, as status files have it."""
    return {errors.FINISHED: "finished", errors.STOPPED: "stopped"}.get(code, "failed")


def new_attempt() -> str:
    """A new id of an attempt. Ids sort by time, and two made in one second differ."""
    return time.strftime("%Y%m%dT%H%M%S-") + secrets.token_hex(3)


def attempt_of(job: str, restart: int) -> str:
    """The id of restart N of a job: `job` is an id of `new_attempt`."""
    return f"{job}-{restart}"


def job_of(attempt: str) -> str:
    """The job part of an attempt's id, which all its restarts share."""
    return "-".join(attempt.split("-")[:2])


def write_json(path: Path, data: Any) -> None:
    """Write `data` so that a reader sees the old file or the new one, never half. Makes the folder. Raises OSError."""
    write_atomically(path, json.dumps(data, indent=2) + "\n")


def read_json(path: Path) -> Any:
    """The file's content, or None if it is missing or is not whole."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def tell_torchrun(error: BaseException) -> None:
    """Write the error file that torchrun's summary shows; without one it says "error_file: <N/A>" (pytorch 113546)."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    # Only the first error: a failing rank waits for the others, and a later error is a consequence
    if path and not Path(path).exists() and "torch" in sys.modules and isinstance(error, Exception):
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        with contextlib.suppress(OSError):  # a full disk must not hide the error itself
            get_error_handler().record_exception(error)
            victim = isinstance(error, errors.JoinError | errors.PeerLost)
            if victim or error.__traceback__ is None:
                # The summary shall show our text, which names the lost rank or says how the script failed, in place of
                # what torch has recorded: where in this program that was noticed
                record = json.loads(Path(path).read_text(encoding="utf-8"))
                more = record["message"]["extraInfo"]
                more["py_callstack"] = record["message"]["message"]
                more["timestamp"] = str(int(more["timestamp"]) + (VICTIM_LATER_S if victim else 0))
                write_json(Path(path), record)
