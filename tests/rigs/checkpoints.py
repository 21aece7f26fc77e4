"""Checkpoints for tests: states in which only one field matters, and files to save, read and damage."""

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from rankup.loop.settings import FORMAT, VERSIONS, check_record
from rankup.observe.metrics import Position
from rankup.state import copies, reading, tree
from rankup.state.copies import STATE, Content, list_copies, to_json
from rankup.state.place import Candidate, Folder
from rankup.state.saver import Options
from rankup.state.second_place import SecondPlace
from train.config import Config
from train.run.run_directory import check

# 8 steps per epoch, 32 in all; checkpoints of 3 to 4 KiB, or of 2 x 1 MiB with --options.width 20000
SETTINGS = ("--workload", "tests.rigs.faulting_workload:build", "--batch-size", "8", "--epochs", "4", "--schedule",
            "constant", "--log-every-steps", "1", "--tensorboard=false", "--join-timeout-s", "30")


def load_checkpoint(path: Path) -> reading.Copy:
    """Read one checkpoint folder as the program does. Raises UserError if it is damaged or not the program's."""
    return reading.read(path, partial(check_record, more=check))


def load_newest(directory: Path, warn: Callable[[str], None]) -> reading.Copy | None:
    """Return the newest checkpoint in `directory` that verifies."""
    return reading.load_newest(directory, warn, partial(check_record, more=check))


def train(run: Path, *more: str) -> tuple[str, ...]:
    """Return the arguments of a short training into the run directory `run`."""
    return ("train", *SETTINGS, "--run-dir", str(run.parent), "--name", run.name, *more)


def training_state(step: int, **fields: Any) -> dict[str, Any]:
    """Return the record of a checkpoint."""
    usual: dict[str, Any] = {
        "format": FORMAT, **asdict(Position(step)), "steps_per_epoch": 8, "data": "made-up points", "seed": 0,
        "config": Config().model_dump(), "world_size": 1, "run": "0123456789abcdef", "versions": VERSIONS,
        "attempt": "20200101T000000-abcdef", "written_by": "rank 0 on node0",
    }
    return usual | fields


def files_of(
    state: dict[str, Any], model: dict[str, torch.Tensor], optimizer: dict[str, Any] | None = None
) -> dict[str, Content]:
    tracked = {"model": model, "optimizer": optimizer or {}, "scaler": {}}
    return {STATE: to_json(state), **tree.files_of(*tree.encode(tracked))}


def save(
    directory: Path, step: int, *, keep: int = 99, value: float | None = None, run: str = "0123456789abcdef",
    attempt: str = "20200101T000000-abcdef", lineage: dict[str, Any] | None = None, **more: Any,
) -> Path:
    """Save a plain checkpoint whose weights are all `step`, or `value`. `lineage`: its attempt's lineage."""
    model = {"weight": torch.full((3, 2), float(step) if value is None else value)}
    state = training_state(step, run=run, attempt=attempt, lineage=lineage)
    optimizer = {"state": {0: {"momentum_buffer": torch.ones(3)}}}
    return Folder(directory, keep=keep, **more).write(step, files_of(state, model, optimizer))


def second_place(url: str, run_dir: Path, name: str, options: Options, *, required: bool = True) -> SecondPlace:
    """Return the second place of the run in `run_dir`, for the attempt `name`, which owns its folder for ever."""
    lease: Any = SimpleNamespace(token=name, predecessor="", attempt=name, agreed=False, check=lambda: None)
    log: Any = SimpleNamespace(info=str, debug=str, warning=str)
    return SecondPlace(url, Folder(run_dir / "checkpoints"), lease, log, options, required=required)


def fetch(place: SecondPlace, stored: str) -> reading.Copy:
    """Fetch a copy from a place, as a run does that resumes from it."""
    with place.open(Candidate.of(Path(stored), {})) as path:
        copy = reading.read(path)
        return replace(copy, path=place.checkpoints.put(path))


def find_problem(path: Path) -> str:
    """Return why a copy is damaged, or "" if it is whole."""
    try:
        copies.verify(path)
    except copies.Damaged as error:
        return error.why
    return ""


def newest(directory: Path) -> tuple[int, list[str]]:
    """Return the step that a resumed run would start from, and the warnings."""
    warnings: list[str] = []
    found = load_newest(directory, warnings.append)
    assert found is not None
    assert float(found.tracked["model"]["weight"][0, 0]) == found.step
    return found.step, warnings


def steps(directory: Path) -> list[int]:
    return [int(path.name[5:13]) for path in list_copies(directory)]


def fingerprint(content: bytes) -> dict[str, Any]:
    """Return a manifest's entry for a file with this content."""
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def flip(path: Path, position: int) -> None:
    """Flip one bit of a file."""
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << (position % 8)
    path.write_bytes(data)


def damaged(content: bytes, others: Sequence[bytes], draw: random.Random) -> bytes | None:
    """Return a damaged file: bits flipped, cut, longer, empty, lost (None), or another file's content."""
    match draw.choice(("flip", "cut", "grow", "empty", "lose", "swap")):
        case "flip":
            data = bytearray(content)
            for _ in range(draw.choice((1, 1, 8))):
                data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
            return bytes(data)
        case "cut":
            return content[: draw.randrange(len(content))]
        case "grow":
            return content + draw.randbytes(draw.randrange(1, 99))
        case "swap":
            return draw.choice(others)
        case "empty":
            return b""
    return None


def damage(path: Path, draw: random.Random) -> bool:
    """Damage a file of a copy in one of these ways. Return whether it has changed."""
    content = path.read_bytes()
    found = damaged(content, [each.read_bytes() for each in sorted(path.parent.iterdir()) if each != path], draw)
    path.unlink()
    if found is not None:
        path.write_bytes(found)
    return found != content
