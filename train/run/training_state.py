"""What a checkpoint says of the training beside the tracked state: one typed record, `state.json`."""

import dataclasses
import json
import platform
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError

from rankup.errors import UserError
from rankup.state import reading
from rankup.state.copies import to_json
from rankup.state.reading import Copy

# Raise it when a field is added, removed or changes its meaning. A checkpoint of another format is refused, because
# guessing what a missing field was would change the weights of the resumed run without a word.
FORMAT = 4
WAY_OUT = "Go on with the version of this program that wrote it, or set --fresh to start anew, or another --name."
# How random numbers are drawn. No generator's state is saved: each step, epoch and sample derives its own seed. So a
# run that is resumed under another scheme would draw other numbers and end with other weights.
RANDOM_SCHEME = (
    "blake2b(seed, step, rank) each step; blake2b(seed, epoch) orders; splitmix64(seed, epoch, sample) augments"
)
ITEMS = ("model", "optimizer", "scaler")  # see `train.run.training.tracked`


def versions() -> dict[str, str]:
    return {"torch": torch.__version__, "python": platform.python_version()}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingState:
    """All that an attempt needs, beside model, optimizer and scaler, to go on with the same bits as if nothing had
    happened.

    To add a field: declare it here, raise FORMAT, and set it in `train.run.training.state_of`.
    """

    # Where the run stands, see `train.run.metrics.Progress`.
    step: int
    evaluated: int
    metrics: dict[str, float] | None
    line: dict[str, Any] | None
    steps_per_epoch: int
    # What it was trained with: a resumed run compares these with its own.
    data: str
    config: dict[str, Any]
    world_size: int
    versions: dict[str, str] = field(default_factory=versions)
    random: str = RANDOM_SCHEME
    # Who wrote it: the run and the mark of the attempt, see `rankup.places.lineage`, and which rank on which host.
    run: str = ""
    attempt: str
    written_by: str

    def to_file(self) -> bytes:
        """The contents of `state.json`."""
        return to_json({"format": FORMAT, **dataclasses.asdict(self)})

    @staticmethod
    def of(path: Path, record: dict[str, Any], tracked: dict[str, Any] | None = None) -> "TrainingState":
        """The state in the record of the checkpoint `path`. Raises UserError where it is of another format, and
        ValueError where a field or a tracked item is missing or of another type."""
        if (found := record.get("format")) != FORMAT:
            raise UserError(f"checkpoint: {path} must be of format {FORMAT}, got format {found}. {WAY_OUT}")
        of_ours = tracked is None or {k for k, v in tracked.items() if isinstance(v, dict)} == {*ITEMS} == {*tracked}
        if tracked is not None and not of_ours:
            raise ValueError(f"it holds {', '.join(tracked)} in place of {', '.join(ITEMS)}")
        try:
            return _adapter().validate_json(json.dumps(record), strict=True)
        except ValidationError as error:
            first = error.errors()[0]
            raise ValueError(f"state.json: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None

    def check_random_scheme(self, path: Path) -> None:
        """Raises UserError where a run that goes on from the checkpoint `path` would draw other random numbers."""
        if self.random != RANDOM_SCHEME:
            raise UserError(
                f"checkpoint: {path} must draw random numbers by the scheme of this program ({RANDOM_SCHEME}), got "
                f"another scheme ({self.random}). {WAY_OUT}"
            )


@cache
def _adapter() -> TypeAdapter[TrainingState]:
    return TypeAdapter(TrainingState)


def load_checkpoint(path: Path) -> Copy:
    """Read one checkpoint folder. Raises UserError where it is damaged, of another format, or no checkpoint."""
    return reading.load(path, TrainingState.of)


def load_newest(directory: Path, warn: Callable[[str], None]) -> Copy | None:
    """The newest checkpoint in `directory` that verifies, see `rankup.state.reading.load_newest`."""
    return reading.load_newest(directory, warn, TrainingState.of)
