"""Which attempts a run's newest state comes from: `run.json` in the run directory. Rank 0 writes it.

A rescue lies in the memory of one node, and a second copy of a checkpoint on its disk, where they may be found long
after the run went on without them. They are taken only where they continue what the run directory holds: written by an
attempt of this run, and of its present line of attempts.
"""

import dataclasses
import os
import re
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from train.process.status import read_json, write_json

FILE = "run.json"
RUN_ID = re.compile(r"[\w-]+")  # it names folders, of which rescues are removed
# What belongs to the run that a directory holds, and is put aside where another one takes its place
OF_RUN = ("checkpoints", "tensorboard", "metrics.jsonl", "result.json", "config.yaml", "tracker", FILE)


@dataclass(slots=True)
class Lineage:
    """`run`: the id of the run. One that was begun anew in the same directory has another.

    `begun_by`: the attempt that began the run, and `start` its launch's, which names the start of a job whose
    containers are started again. `attempts`: the marks of the last attempt that went on from a checkpoint, and of those
    after it, each of which went on from a rescue, or a second copy, of an earlier one. `number` counts all attempts of
    the run: of two nodes that were node 0 in turn, the one with the higher number knows more.
    """

    run: str
    begun_by: str
    start: str
    attempts: list[str]
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
        whole = isinstance(values, dict) and values.keys() == names and RUN_ID.fullmatch(str(values["run"]))
        return cls(**values) if whole else None

    def write(self, run_dir: Path) -> None:
        """Raises OSError."""
        write_json(run_dir / FILE, self.values())

    def values(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def go_on(self, mark: str, *, writer: str | None) -> None:
        """The attempt `mark` goes on from a rescue or a second copy of `writer`, or, if None, from a checkpoint or the
        beginning.

        What later attempts than the writer did is lost, and done again: what they left counts no longer.
        """
        before = self.attempts[: self.attempts.index(writer) + 1] if writer in self.attempts else []
        self.attempts = [*before, mark]
        self.number += 1


def before(run_dir: Path) -> Path:
    """Where --fresh puts what an earlier run has left: a folder of this process's own."""
    return run_dir / f"before-{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}"


def new_mark(attempt: str) -> str:
    """What tells this attempt from all others: ids of attempts may be given by a launcher, and then given twice."""
    return f"{attempt}-{secrets.token_hex(4)}"
