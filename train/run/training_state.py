"""What a checkpoint holds beside the weights: one typed record with a format version. It is written and read here only.

Two files hold it: `state.json` what a person may want to read, `training.pt` what holds tensors.
"""

import dataclasses
import json
import platform
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch

from rankup.errors import UserError
from rankup.places.lineage import RUN_ID
from train.group.group import pack, unpack

# Raise it when a field is added, removed or changes its meaning. A checkpoint of another format is refused, because
# guessing what a missing field was would change the weights of the resumed run without a word.
FORMAT = 3
WAY_OUT = "Go on with the version of this program that wrote it, or set --fresh to start anew, or another --name."
# How random numbers are drawn. No generator's state is saved: each step, epoch and sample derives its own seed. So a
# run that is resumed under another scheme would draw other numbers and end with other weights.
RANDOM_SCHEME = (
    "blake2b(seed, step, rank) each step; blake2b(seed, epoch) orders; splitmix64(seed, epoch, sample) augments"
)
# The fields that go to training.pt: JSON can't hold tensors, and would round their numbers.
TENSOR_FIELDS = ("optimizer", "scaler")


def versions() -> dict[str, str]:
    return {"torch": torch.__version__, "python": platform.python_version()}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingState:
    """All that an attempt needs, beside the weights, to go on with the same bits as if nothing had happened.

    To add a field: declare it here (in TENSOR_FIELDS too if it holds tensors), raise FORMAT, and set it where
    `train.run.training.save` makes a TrainingState.
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
    run: str
    attempt: str
    written_by: str
    # State dicts of torch on the CPU. In a sharded checkpoint `optimizer` holds only what is not a tensor.
    optimizer: dict[str, Any]
    scaler: dict[str, Any]

    def to_files(self) -> dict[str, bytes]:
        """The contents of `state.json` and `training.pt`."""
        values = {entry.name: getattr(self, entry.name) for entry in dataclasses.fields(self)}
        tensors = {name: values.pop(name) for name in TENSOR_FIELDS}
        return {"training.pt": pack(tensors), "state.json": to_json({"format": FORMAT, **values})}

    @classmethod
    def from_files(cls, path: Path, files: dict[str, bytes]) -> Self:
        """The state in verified files of the checkpoint `path`. Raises UserError where it is of another format."""
        values = json.loads(files["state.json"])
        found = values.pop("format", None)
        if found != FORMAT:
            raise UserError(f"checkpoint: {path} must be of format {FORMAT}, got format {found}. {WAY_OUT}")
        run = str(values.get("run", ""))
        if not RUN_ID.fullmatch(run):
            raise UserError(f'checkpoint: {path} must be of a run with an id, got "{run}".')
        return cls(**values, **unpack(files["training.pt"]))

    def check_random_scheme(self, path: Path) -> None:
        """Raises UserError where a run that goes on from the checkpoint `path` would draw other random numbers."""
        if self.random != RANDOM_SCHEME:
            raise UserError(
                f"checkpoint: {path} must draw random numbers by the scheme of this program ({RANDOM_SCHEME}), got "
                f"another scheme ({self.random}). {WAY_OUT}"
            )


def to_json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()

