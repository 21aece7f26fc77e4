"""Every setting of a run. `show` and `--help` list the settings of the base classes first, from the last base to the
first, and then the settings below, in this order. No torch here."""

from __future__ import annotations

from typing import Any, Literal

from .data import DataSettings
from .method import MethodSettings
from .setting import Count, Natural, free, setting
from .workload import WorkloadSettings

WEEK_S = 7 * 24 * 3600


def _deadline(default: float, what: str) -> Any:
    return free(default, f"Longest time for {what}; then the process ends.", gt=0, le=WEEK_S)


class Config(MethodSettings, DataSettings, WorkloadSettings):
    """All settings of one run. They are immutable. `load_config` also refuses settings that contradict each other."""

    seed: int = setting(0, "Seed of weights, order and augmentation.", ge=0, le=2**32 - 1)
    batch_size: Count = setting(64, "Global batch: samples per step over all processes.")
    accumulate: Count = setting(1, "Micro-batches per step, to fit a large batch in little memory.")
    epochs: Count = free(3, "Passes over the training data; may grow when resumed.")
    max_steps: Natural = free(0, "End after this many steps; 0: after `epochs`.")
    optimizer: Literal["sgd", "adamw"] = setting("sgd", "SGD with momentum, or AdamW.")
    lr: float = setting(0.08, "Learning rate at its peak; schedule lowers it.", gt=0)
    momentum: float = setting(0.9, "Momentum of SGD.", ge=0, lt=1, of="--optimizer sgd")
    weight_decay: float = setting(2e-4, "Weight decay; never on norms and biases.", ge=0)
    schedule: Literal["constant", "step", "cosine"] = setting("cosine", "How lr falls after the warm-up.")
    warmup_steps: Natural = setting(0, "Raise lr linearly over the first steps.")
    step_epochs: Count = setting(1, "Multiply lr by step_gamma every N epochs.", of="--schedule step")
    step_gamma: float = setting(0.1, "The factor for lr each time.", gt=0, le=1, of="--schedule step")
    label_smoothing: float = setting(0.0, "Label smoothing of the loss.", ge=0, lt=1)
    clip_norm: float = setting(0.0, "Clip the global norm of the gradient to this; 0: off.", ge=0)
    precision: Literal["fp32", "bf16", "fp16"] = setting("fp32", "Mixed precision; fp16 scales the loss.")
    deterministic: bool = setting(False, "Refuse operations that are not deterministic.")
    device: str = setting("auto", "auto, cpu, cuda, or another accelerator of torch.", pattern=r"^[a-z]+(:[0-9]+)?$",
                          rule="auto, cpu, cuda or another accelerator's name")
    num_threads: Count = setting(1, "CPU threads of each process. Another number changes the last bits.")

    num_workers: Natural = free(0, "DataLoader workers of each process; data in memory need none.")
    eval_batch_size: Count = free(512, "Samples at a time in evaluation, per process.")

    join_timeout_s: float = _deadline(120.0, "all processes to join")
    setup_timeout_s: float = _deadline(600.0, "fetching and preparing data and model")
    step_timeout_s: float = _deadline(300.0, "one step")
    eval_timeout_s: float = _deadline(900.0, "one evaluation")
    save_timeout_s: float = _deadline(600.0, "saving one checkpoint")

    name: str = free("", "Folder of this run in run_dir; empty: the job's name, else dataset and model, or workload.",
                     pattern=r"^([A-Za-z0-9_][A-Za-z0-9._-]{0,199})?$",
                     rule="at most 200 letters, digits and . _ - beginning with a letter, digit or _")
    run_dir: str = free("runs", "Folder of all runs, which rank 0 finds after a restart, or an address: s3://bucket/runs.",
                        min_length=1, rule="a path or an address")
    mirror: str = free("", "Also keep the newest checkpoints in this folder, or at this address: s3://bucket/runs.",
                       rule="a path or an address")
    save: Literal["auto", "sync"] = free(
        "auto", "auto: a thread writes while training continues, if memory allows; sync: training waits.")
    keep: Count = free(2, "Newest checkpoints kept.")
    save_every_steps: Natural = free(0, "Save every N steps; 0: after each epoch.")
    evaluate_every_epochs: Count = free(1, "Evaluate every N epochs and at the end.")
    log_every_steps: Count = free(50, "Write metrics every N steps; before step N, every 10.")
    tensorboard: bool = free(True, "Write TensorBoard files.")
    on_end: str = free("", "Run this when the job ends, with a line of JSON on its input.", rule="a shell command")
    tracker: Literal["none", "mlflow", "wandb"] = free(
        "none", "Also send metrics, settings and result to a tracker, one run for all attempts.")


# The first setting of each group -> the group's title
GROUPS = {"workload": "what is trained", "parallel": "how it is trained", "num_workers": "loading",
          "join_timeout_s": "deadlines", "name": "the run"}
