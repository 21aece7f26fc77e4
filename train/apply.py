"""What is done with a trained model: evaluate it exactly, and predict."""

import csv
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from train import checkpoint, parallel
from train.checkpoint import Checkpoint
from train.config import Config, Parsed
from train.data import Feed, evaluation_keys, mix, seed_everything
from train.env import Launch
from train.errors import Stopped, UserError
from train.evaluation import evaluate
from train.finish import evaluation_table
from train.group import Group, join
from train.log import Log
from train.record import on_main
from train.status import new_attempt
from train.stop import StopRequest
from train.workloads import Workload, load
from train.yamltext import read_yaml


def evaluate_command(
    config: Config, parsed: Parsed, launch: Launch, *, run_dir: Path, log: Log, stop: StopRequest
) -> dict[str, Any]:
    """Evaluate a checkpoint and print the table; `evaluation.json` goes beside the run's other outputs."""
    with _opened(config, parsed, launch, run_dir, log, stop) as (settings, group, workload, earlier):
        result = evaluate(settings, group, workload, workload.model)
        if result is None:
            raise Stopped(f"{stop.signal_name}: evaluation stopped, nothing to save.")
        digest = checkpoint.digest(workload.model.state_dict())
        outcome = {
            "checkpoint": earlier.path, "step": earlier.step, "metrics": result.metrics, "count": result.count,
            "digest": digest, "world_size": group.world_size,
        }  # fmt: skip
        if group.is_main:
            (run_dir / "evaluation.json").write_text(json.dumps(outcome, indent=2) + "\n", encoding="utf-8")
            log.say(f"{earlier.path}\n{evaluation_table(result, step=earlier.step, digest=digest)}")
    return outcome


def predict_command(
    config: Config, parsed: Parsed, launch: Launch, *, run_dir: Path, log: Log, stop: StopRequest
) -> int:
    """Write input, label and probability for each sample, in order. Returns their number."""
    output = Path(parsed.extra["output"])
    if output.suffix not in (".csv", ".jsonl"):
        raise UserError(f"--output must end in .csv or .jsonl, got {output}.")
    with _opened(config, parsed, launch, run_dir, log, stop) as (settings, group, workload, _):
        if workload.predict is None:
            raise UserError(f"workload {settings.workload} has no predict function. Give its Workload one.")
        samples, name = workload.evaluation, workload.input_name
        if parsed.extra["input"]:
            if workload.open_input is None:
                raise UserError(f"workload {settings.workload} can't open --input. Give its Workload open_input.")
            samples, name = workload.open_input(parsed.extra["input"])
        numbered = list(evaluation_keys(len(samples), settings.eval_batch_size, group.rank, group.world_size))
        feed = Feed(
            samples, [key for _, key in numbered], device=group.device, stop=stop, num_workers=settings.num_workers,
            prefetch_factor=settings.prefetch_factor,
        )  # fmt: skip
        workload.model.eval()
        rows: list[tuple[int, str, float]] = []
        with torch.no_grad():
            for _, (_, indices) in numbered:
                batch = feed.next()
                if batch is None:
                    raise Stopped(f"{stop.signal_name}: prediction stopped, nothing was written.")
                with parallel.autocast(settings, group.device):
                    labels, probabilities = workload.predict(workload.model, batch)
                for index, label, probability in zip(
                    indices.tolist(), labels.tolist(), probabilities.tolist(), strict=True
                ):
                    known = workload.classes[label] if label < len(workload.classes) else str(label)
                    rows.append((index, known, probability))
        merged = sorted(row for part in group.gather(rows) for row in part)
        if group.is_main:
            _write(output, [(name(int(index)), label, probability) for index, label, probability in merged])
            log.say(f"{len(merged)} predictions in {output}")
    return len(merged)


def _write(path: Path, rows: list[tuple[str, str, float]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        if path.suffix == ".csv":
            writer = csv.writer(file)
            writer.writerow(("input", "label", "probability"))
            writer.writerows((name, label, f"{probability:.6f}") for name, label, probability in rows)
        else:
            for name, label, probability in rows:
                line = {"input": name, "label": label, "probability": round(probability, 6)}
                file.write(json.dumps(line, ensure_ascii=False) + "\n")


@contextmanager
def _opened(
    config: Config, parsed: Parsed, launch: Launch, run_dir: Path, log: Log, stop: StopRequest
) -> Iterator[tuple[Config, Group, Workload, Checkpoint]]:
    """The group, and the workload with the checkpoint's weights, built with the settings that it was trained with."""
    torch.set_num_threads(config.num_threads)
    # Evaluating must not touch the status of the run that it looks at
    with join(config, launch, log=log, stop=stop, run_dir=run_dir / "evaluations", attempt=new_attempt()) as group:
        group.watch.enter("evaluation", config.eval_timeout_s)

        def find() -> Checkpoint:
            if parsed.extra["checkpoint"]:
                return checkpoint.read(Path(parsed.extra["checkpoint"]))
            found = checkpoint.newest_good(run_dir / "checkpoints", log.warn)
            if found is None:
                raise UserError(f"checkpoint: {run_dir}/checkpoints must hold one, got none. Train first, or name one.")
            return found

        earlier: Checkpoint = on_main(group, find)
        given = set(parsed.settings) | set(read_yaml(parsed.config_file) if parsed.config_file else {})
        trained = {k: v for k, v in earlier.state["config"].items() if k in Config.model_fields and k not in given}
        settings = config.model_copy(update=trained)
        seed_everything(mix(settings.seed))
        workload = load(settings)
        try:
            workload.model.load_state_dict(earlier.model_state())
        except RuntimeError as error:
            reason = " ".join(str(error).split())[:300]
            raise UserError(f"{earlier.path} does not fit the model of these settings: {reason}.") from None
        parallel.prepare(workload.model, settings.model_copy(update={"sync_bn": False}), group.device)
        stop.defer()
        yield settings, group, workload, earlier
