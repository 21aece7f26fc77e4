"""What is done with a trained model: evaluate it exactly, and predict."""

import csv
import io
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from train.config import Config
from train.config.options import EvaluateOptions, PredictOptions
from train.data import Samples
from train.data.random_numbers import derive_seed, seed_everything
from train.errors import Stopped, UserError
from train.group.group import Group
from train.group.join import join
from train.group.on_rank0 import on_rank0
from train.parallel.model import prepare
from train.parallel.precision import autocast
from train.process.atomic_file import staged, write_atomically
from train.process.env import Launch
from train.process.log import Log
from train.process.status_file import StatusFile
from train.process.stop import StopRequest
from train.run import weights
from train.run.checkpoint import Checkpoint, load_checkpoint, load_newest
from train.run.evaluation import batches_of_rank, evaluate
from train.run.result import evaluation_table
from train.workloads import Workload, load


def export_command(path: str, output: Path, *, run_dir: Path, log: Log) -> None:
    """Write the weights of a checkpoint, plain or sharded, as one file that `load_state_dict` of the plain module takes.
    Raises UserError."""
    found = load_checkpoint(Path(path)) if path else _newest(run_dir, log)
    state = found.as_plain().model
    buffer = io.BytesIO()
    torch.save(state, buffer)
    try:
        write_atomically(output, buffer.getvalue())
    except OSError as error:
        raise UserError(f"--output must be a file that can be written, got {output}: {error.strerror}.") from None
    size = f"{len(state)} tensors, {len(buffer.getbuffer()) / 1e6:.1f} MB"
    log.info(f"{output}: the weights of step {found.step}, {size}, digest {weights.digest(state)[:16]}")


def _newest(run_dir: Path, log: Log) -> Checkpoint:
    found = load_newest(run_dir / "checkpoints", log.warning)
    if found is None:
        raise UserError(f"checkpoint: {run_dir}/checkpoints must hold one, got none. Train first, or name one.")
    return found


def evaluate_command(
    config: Config, options: EvaluateOptions, launch: Launch, *, run_dir: Path, log: Log, stop: StopRequest
) -> dict[str, Any]:
    """Evaluate a checkpoint and print the table; `evaluation.json` goes beside the run's other outputs."""
    with _opened(config, options, launch, run_dir, log, stop) as (settings, group, workload, earlier):
        result = evaluate(settings, group, workload, workload.model)
        if result is None:
            raise Stopped(f"{stop.signal_name or 'another rank'}: evaluation stopped, nothing to save.")
        digest = weights.digest(workload.model.state_dict())
        outcome = {
            "checkpoint": str(earlier.path), "step": earlier.step, "metrics": result.metrics, "count": result.count,
            "digest": digest, "world_size": group.world_size,
        }
        text, details = workload.report(result.tables) if workload.report else ("", {})
        outcome |= details
        if group.is_rank0:
            (run_dir / "evaluation.json").write_text(json.dumps(outcome, indent=2) + "\n", encoding="utf-8")
            log.info(f"{earlier.path}\n{evaluation_table(result, step=earlier.step, digest=digest)}")
            log.info(text) if text else None
    return outcome


def predict_command(
    config: Config, options: PredictOptions, launch: Launch, *, run_dir: Path, log: Log, stop: StopRequest
) -> int:
    """Write input, label and probability for each sample, in order. Returns their number."""
    output = Path(options.output)
    with _opened(config, options, launch, run_dir, log, stop) as (settings, group, workload, _):
        samples, name = _input(workload, settings, group, options.input)
        rows = _predicted(settings, group, workload, samples)
        merged = sorted(row for part in group.gather(rows) for row in part)
        lines = [(name(index), label, probability) for index, label, probability in merged]
        on_rank0(group, lambda: _write(output, lines))
        log.info(f"{len(merged)} predictions in {output}")
    return len(merged)


def _input(workload: Workload, settings: Config, group: Group, path: str) -> tuple[Samples, Callable[[int], str]]:
    """What to predict: the samples of `path` (-: standard input), or those of the evaluation where it is empty. Raises
    UserError."""
    if workload.predict is None:
        raise UserError(f"workload {settings.workload} must have a predict function, got none. Give its Workload one.")
    if not path:
        return workload.evaluation, workload.input_name
    if workload.open_input is None:
        raise UserError(f"workload {settings.workload} must have open_input for --input, got none. Give its Workload one.")
    if path != "-":
        return workload.open_input(path)
    # Rank 0's alone: launchers give the others none
    content: bytes = on_rank0(group, sys.stdin.buffer.read)
    with tempfile.NamedTemporaryFile() as file:
        file.write(content)
        file.flush()
        try:
            return workload.open_input(file.name)
        except UserError as error:
            raise UserError(str(error).replace(file.name, "standard input")) from None


@torch.no_grad()
def _predicted(settings: Config, group: Group, workload: Workload, samples: Samples) -> list[tuple[int, str, float]]:
    """This rank's (sample number, label, probability). Raises Stopped where any rank was asked to stop."""
    assert workload.predict is not None
    rows: list[tuple[int, str, float]] = []
    workload.model.eval()
    for _, indices, batch in batches_of_rank(settings, group, samples):
        if batch is None:
            raise Stopped(f"{group.stop.signal_name or 'another rank'}: prediction stopped, nothing was written.")
        with autocast(settings, group.device):
            labels, probabilities = workload.predict(workload.model, batch)
        for index, label, probability in zip(indices.tolist(), labels.tolist(), probabilities.tolist(), strict=True):
            known = isinstance(label, int) and 0 <= label < len(workload.classes)
            rows.append((index, workload.classes[label] if known else str(label), probability))
    return rows


def _write(path: Path, rows: list[tuple[str, str, float]]) -> None:
    """The whole file or none. Raises UserError where it can't be written."""
    try:
        with staged(path) as staging, staging.open("w", encoding="utf-8", newline="") as file:
            if path.suffix == ".csv":
                writer = csv.writer(file, lineterminator="\n")
                writer.writerow(("input", "label", "probability"))
                writer.writerows((name, label, f"{probability:.6f}") for name, label, probability in rows)
            else:
                for name, label, probability in rows:
                    line = {"input": name, "label": label, "probability": round(probability, 6)}
                    file.write(json.dumps(line, ensure_ascii=False) + "\n")
    except OSError as error:
        raise UserError(f"--output must be a file that can be written, got {path}: {error.strerror}.") from None


@contextmanager
def _opened(
    config: Config, options: EvaluateOptions | PredictOptions, launch: Launch, run_dir: Path, log: Log, stop: StopRequest
) -> Iterator[tuple[Config, Group, Workload, Checkpoint]]:
    """The group, and the workload with the checkpoint's weights, built with the settings that it was trained with."""
    # Evaluating must not touch the status of the run that it looks at
    status = StatusFile(run_dir / "evaluations", launch, shared=False)
    with join(config, launch, log=log, stop=stop, status=status) as group:
        group.watch.enter("evaluation", config.eval_timeout_s)

        def find() -> Checkpoint:
            if options.checkpoint:
                return load_checkpoint(Path(options.checkpoint)).as_plain()
            return _newest(run_dir, log).as_plain()

        earlier: Checkpoint = on_rank0(group, find)
        given = config.model_fields_set
        trained = {k: v for k, v in earlier.state.config.items() if k in Config.model_fields and k not in given}
        if "options" in given:  # the user's keys outrank those of the training, one by one
            trained["options"] = {**earlier.state.config["options"], **config.options}
        settings = config.model_copy(update=trained)
        torch.set_num_threads(settings.num_threads)
        torch.use_deterministic_algorithms(settings.deterministic)
        seed_everything(derive_seed(settings.seed))
        workload = load(settings, pretrained=False)
        for note in workload.notes:
            log.info(note)
        # Where the default fell back to other data, then or now, the classes would be those of the wrong set; texts would become
        # the numbers of another vocabulary
        texts = settings.workload == "text"
        if earlier.state.data != workload.data_name and (texts or not given & {"dataset", "workload"}):
            raise UserError(
                f"{earlier.path} was trained on {earlier.state.data}, got {workload.data_name} now. Set --data-dir or "
                f"--{'bert-dir' if texts else 'dataset'}."
            )
        try:
            workload.model.load_state_dict(earlier.model)
        except RuntimeError as error:
            reason = " ".join(str(error).split())[:300]
            raise UserError(f"{earlier.path} does not fit the model of these settings: {reason}.") from None
        prepare(workload.model, settings.model_copy(update={"sync_bn": False}), group.device)
        stop.finish_step_first()
        yield settings, group, workload, earlier
