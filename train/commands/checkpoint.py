"""The commands `evaluate` and `predict`, and how they load a trained model from a checkpoint."""

import csv
import io
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import rankup
from rankup import Copy, Group, Program, UserError
from rankup.seeds import derive_seed, seed_everything

from ..config import Config
from ..data import one_line
from ..data.samples import Samples, to_device
from ..group import join_options
from ..parallel.model import autocast, prepare
from ..run import weights
from ..run.evaluation import evaluate, evaluation_loader
from ..run.result import two_columns
from ..run.run_directory import check, check_data
from ..workloads.classification import report
from ..workloads.workload import Workload, load
from . import Evaluate, Predict


@contextmanager
def open_checkpoint(
    config: Config, program: Program, run_dir: Path, path: str
) -> Iterator[tuple[Config, Group, Workload, Copy]]:
    """Join the group, and load a checkpoint on all ranks. `path`: its folder or address; empty: the run's newest good
    checkpoint. Only rank 0 reads it. Flags and the YAML file of this command override the settings of the training.
    Raises UserError, and JoinError and PeerLost as training does."""
    if not path and rankup.urls.is_url(config.run_dir):
        path = f"{config.run_dir.rstrip('/')}/{run_dir.name}"
    # Use another folder, because the run's own status must not change
    with program.join(run_dir / "evaluations", timeout_s=config.join_timeout_s, **join_options(config)) as group:
        group.watch.enter("evaluation", config.eval_timeout_s)
        checkpoint = rankup.open_checkpoint(
            path, run_dir=run_dir, group=group, check=check, timeout_s=config.setup_timeout_s
        )
        given, trained = config.model_fields_set, checkpoint.record["config"]
        update = {name: value for name, value in trained.items() if name in Config.model_fields and name not in given}
        if "options" in given:  # merge single keys
            update["options"] = {**trained["options"], **config.options}
        settings = config.model_copy(update=update)
        torch.set_num_threads(settings.num_threads)
        torch.use_deterministic_algorithms(settings.deterministic)
        seed_everything(derive_seed(settings.seed), group.device)
        workload = load(settings, pretrained=False)
        if settings.workload == "text" or not given & {"dataset", "data_dir", "workload"}:
            check_data(checkpoint, workload.data_name)
        try:
            workload.model.load_state_dict(checkpoint.tracked["model"])
        except RuntimeError as error:
            reason = one_line(error)
            raise UserError(f"{checkpoint.path} does not fit the model of these settings: {reason}.") from None
        # sync_bn has no effect in evaluation: batch norm uses its stored statistics. On a CPU it would be refused
        prepare(workload, settings.model_copy(update={"sync_bn": False}), group)
        yield settings, group, workload, checkpoint


def evaluate_checkpoint(config: Config, program: Program, run_dir: Path, options: Evaluate) -> None:
    """Evaluate a checkpoint, print the table on rank 0, and write `evaluation.json` into the run directory."""
    with open_checkpoint(config, program, run_dir, options.checkpoint) as (settings, group, workload, checkpoint):
        batches = rankup.Workers(evaluation_loader(settings, group, workload.evaluation, own=True))
        result = evaluate(settings, group, workload, workload.model, batches)
        digest = weights.digest(workload.model.state_dict())
        text, details = report(result.tables, workload.classes)
        if group.is_rank0:
            outcome = {
                "checkpoint": str(checkpoint.path), "step": checkpoint.step, "metrics": result.metrics,
                "count": result.count, "digest": digest, "world_size": group.world_size, **details,
            }
            _write(run_dir / "evaluation.json", json.dumps(outcome, indent=2) + "\n")
            rows = {"samples": str(result.count), "step": str(checkpoint.step), "weights digest": digest[:16]}
            table = two_columns(result.metrics, rows)
            program.log.info("\n".join(filter(None, [str(checkpoint.path), table, text])))


def predict(config: Config, program: Program, run_dir: Path, options: Predict) -> None:
    """Write one line for each sample, in the order of the samples, for any number of ranks. Raises UserError."""
    with open_checkpoint(config, program, run_dir, options.checkpoint) as (settings, group, workload, _):
        if workload.predict is None:
            raise UserError(
                f"workload {settings.workload} must have a predict function, got none. Give its Workload one."
            )
        samples, name_of = workload.evaluation, workload.input_name
        if options.input:
            if workload.open_input is None:
                raise UserError(
                    f"workload {settings.workload} must have open_input for --input, got none. Give its Workload one."
                )
            samples, name_of = workload.open_input(options.input)
        own = _predict_share(settings, group, workload, samples)
        rows = [
            {"input": name_of(index), "label": label, "probability": round(probability, 6)}
            for index, label, probability in sorted(row for part in group.gather(own) for row in part)
        ]
        file = io.StringIO()
        writer = csv.DictWriter(file, ("input", "label", "probability"), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        group.on_rank0(lambda: _write(Path(options.output), file.getvalue()))
        program.log.info(f"{len(rows)} predictions in {options.output}")


@torch.no_grad()
def _predict_share(
    config: Config, group: Group, workload: Workload, samples: Samples
) -> list[tuple[int, str, float]]:
    """Return (sample number, label, probability) for each sample of this rank's share."""
    assert workload.predict is not None
    rows: list[tuple[int, str, float]] = []
    workload.model.eval()
    loader: Any = evaluation_loader(config, group, samples, own=True)
    for numbers, batch in zip(loader.batch_sampler, rankup.Workers(loader), strict=True):
        with autocast(config, group.device):
            labels, probabilities = workload.predict(workload.model, to_device(batch, group.device))
        for index, label, probability in zip(numbers, labels.tolist(), probabilities.tolist(), strict=True):
            # A label is the number of a class. In a workload without classes it is the predicted value itself
            is_class = isinstance(label, int) and 0 <= label < len(workload.classes)
            rows.append((index, workload.classes[label] if is_class else str(label), probability))
    return rows


def _write(path: Path, text: str) -> None:
    """Write the whole file or nothing. Raises UserError if that fails."""
    staging = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        staging.write_text(text, encoding="utf-8", newline="")
        staging.replace(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}). Make room for it, or name another.") from None
