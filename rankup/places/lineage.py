"""Which attempts a run's newest state comes from: `run.json` in the run directory. Rank 0 writes it.

A copy of the state may be found long after the run went on without it: in the memory of a node, on its disk, at another
address. It is taken only where it lies on the run's line of attempts.
"""

import dataclasses
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from rankup.places.files import read_json, write_json

FILE, RESULT = "run.json", "result.json"
RUN_ID = re.compile(r"[\w-]+")  # it names folders, of which rescues are removed
# What belongs to the run that a directory holds, and is put aside where another one takes its place
OF_RUN = ("checkpoints", "tensorboard", "metrics.jsonl", RESULT, "config.yaml", "tracker", FILE)


@dataclass(slots=True)
class Lineage:
    """`run`: the id of the run. One that was begun anew in the same directory has another.

    `begun_by`: the attempt that began the run, and `start` its launch's, which names the start of a job whose
    containers are started again. `attempts`: the line, each with its mark and the step at which it went on, from a copy
    of the attempt before it. `number` counts all attempts of the run: of two nodes that were node 0 in turn, the one
    with the higher number knows more.
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
        names = {field.name for field in dataclasses.fields(cls)}
        try:
            whole = values.keys() == names and RUN_ID.fullmatch(values["run"]) and isinstance(values["number"], int)
            line = [[str(mark), int(step)] for mark, step in values["attempts"]]
        except (AttributeError, LookupError, TypeError, ValueError, OverflowError):
            return None
        return cls(**{**values, "attempts": line}) if whole else None

    def write(self, run_dir: Path, *, check: Callable[[], None] | None = None) -> None:
        """`check`: of an owner, see `rankup.places.files.staged`. Raises OSError."""
        write_json(run_dir / FILE, self.values(), check=check)

    def values(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def has(self, step: int, attempt: str) -> bool:
        """Whether the run's line of attempts goes through the copy that `attempt` wrote at `step`."""
        marks = [mark for mark, _ in self.attempts]
        if attempt not in marks:
            return False
        following = self.attempts[marks.index(attempt) + 1 :]
        return not following or step <= following[0][1]

    def goes_on_from(self, other: Self) -> bool:
        """Whether this is `other`, or what came of it."""
        last = other.attempts[-1][0] if other.attempts else None
        return self.run == other.run and (last is None or last in (mark for mark, _ in self.attempts))

    def go_on(self, mark: str, *, step: int, writer: str | None) -> None:
        """The attempt `mark` goes on from the copy that `writer` wrote at `step`, or, if None, from the beginning.

        What later attempts than the writer did is lost, and done again: what they left counts no longer.
        """
        marks = [mark for mark, _ in self.attempts]
        known = self.attempts[: marks.index(writer) + 1] if writer in marks else [[writer, 0]] if writer else []
        self.attempts = [*known, [mark, step]]
        self.number += 1


def before(run_dir: Path) -> Path:
    """Where --fresh puts what an earlier run has left: a folder of this process's own."""
    return run_dir / f"before-{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}"


def put_aside(run_dir: Path, names: Iterable[str], aside: Path) -> bool:
    """Move what is there of those names into the new folder `aside`. Returns whether anything was. Raises OSError."""
    there = [run_dir / name for name in names if (run_dir / name).exists()]
    if there:
        aside.mkdir()
    for path in there:
        shutil.move(path, aside / path.name)
    return bool(there)


def new_mark(attempt: str) -> str:
    """What tells this attempt from all others: ids of attempts may be given by a launcher, and then given twice."""
    return f"{attempt}-{secrets.token_hex(4)}"
