"""The command `predict`: input, label and probability of each sample, in a CSV or JSONL file."""

import contextlib
import csv
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from rankup import Stopped, UserError

from ..config.options import PredictOptions
from ..data import Samples
from ..parallel.model import autocast
from ..run.evaluation import batches_of_rank
from .checkpoint import CheckpointModel, open_checkpoint
from .context import Context


def predict(context: Context, options: PredictOptions) -> None:
    """Write a line for each sample, in the samples' order, whatever the number of ranks.

    Raises UserError for input or output that can't be used, Stopped, and what `open_checkpoint` raises.
    """
    output = Path(options.output)
    with (
        open_checkpoint(context, options.checkpoint) as opened,
        _open_samples(opened, options.input) as (samples, name_of),
    ):
        own = _predict_share(opened, samples)
        rows = sorted(row for part in opened.group.gather(own) for row in part)
        lines = [(name_of(index), label, probability) for index, label, probability in rows]
        opened.group.on_rank0(lambda: _write(output, lines))
        context.log.info(f"{len(rows)} predictions in {output}")


@contextlib.contextmanager
def _open_samples(opened: CheckpointModel, path: str) -> Iterator[tuple[Samples, Callable[[int], str]]]:
    """The samples in `path` ("-": standard input, "": the test data), and the name of each by its number."""
    workload, name = opened.workload, opened.config.workload
    if workload.predict is None:
        raise UserError(f"workload {name} must have a predict function, got none. Give its Workload one.")
    if not path:
        yield workload.evaluation, workload.input_name
        return
    if workload.open_input is None:
        raise UserError(f"workload {name} must have open_input for --input, got none. Give its Workload one.")
    if path != "-":
        yield workload.open_input(path)
        return
    # Launchers connect standard input to rank 0 only
    content = opened.group.broadcast_bytes(sys.stdin.buffer.read() if opened.group.is_rank0 else b"")
    with tempfile.NamedTemporaryFile() as file:
        file.write(content)
        file.flush()
        try:
            # An image is read when a batch asks for it: the file is there until the caller's block ends
            samples, name_of = workload.open_input(file.name)
            yield samples, lambda index: name_of(index).replace(file.name, "-")
        except UserError as error:
            raise UserError(str(error).replace(file.name, "standard input")) from None


@torch.no_grad()
def _predict_share(opened: CheckpointModel, samples: Samples) -> list[tuple[int, str, float]]:
    """(sample number, label, probability) of this rank's share. Raises Stopped if any rank was asked to stop."""
    group, workload = opened.group, opened.workload
    assert workload.predict is not None
    rows: list[tuple[int, str, float]] = []
    workload.model.eval()
    for _, indices, batch in batches_of_rank(opened.config, group, samples):
        if batch is None:
            raise Stopped(f"{group.stop.signal_name or 'another rank'}: prediction stopped, nothing was written.")
        with autocast(opened.config, group.device):
            labels, probabilities = workload.predict(workload.model, batch)
        for index, label, probability in zip(indices.tolist(), labels.tolist(), probabilities.tolist(), strict=True):
            # A label is the number of a class, or, in a workload without classes, the predicted value itself
            is_class = isinstance(label, int) and 0 <= label < len(workload.classes)
            rows.append((index, workload.classes[label] if is_class else str(label), probability))
    return rows


def _write(path: Path, rows: list[tuple[str, str, float]]) -> None:
    """The complete file or none. Raises UserError if it can't be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        staging = path.with_name(f".{path.name}.{os.getpid()}")
        with staging.open("w", encoding="utf-8", newline="") as file:
            if path.suffix == ".csv":
                writer = csv.writer(file, lineterminator="\n")
                writer.writerow(("input", "label", "probability"))
                writer.writerows((name, label, f"{probability:.6f}") for name, label, probability in rows)
            else:
                for name, label, probability in rows:
                    line = {"input": name, "label": label, "probability": round(probability, 6)}
                    file.write(json.dumps(line, ensure_ascii=False) + "\n")
        staging.replace(path)
    except OSError as error:
        raise UserError(f"--output must be a file that can be written, got {path}: {error.strerror}.") from None
