"""Every setting: its type, default, range, a line of help, and whether it affects the result: then it must stay
the same when a run is resumed. `show` and `--help` keep the order below. No torch here."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, JsonValue

# `dataset` -> module in train/data/sources, and the function (config) -> (training half, test half) in it. A new
# data set is a function and a line in this table.
SOURCES = {
    "fashion-mnist": "in_memory:of_torchvision",
    "mnist": "in_memory:of_torchvision",
    "cifar10": "in_memory:of_torchvision",
    "imagefolder": "imagefolder:load",
    "digits": "in_memory:of_torchvision",
    "fake": "in_memory:fake",
    "hf:PATH_OR_NAME": "huggingface:load",
}
NAMES = ", ".join(SOURCES)
WEEK_S = 7 * 24 * 3600
Natural = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
Augment = bool | Literal["imagenet", "trivial"]


def setting(default: Any, help: str, *, result: bool = False, rule: str = "", of: str = "", **limits: Any) -> Any:
    """A field of Config, or of a command's options.

    `result`: it affects the trained weights. `rule`: what it must be, in place of pydantic's words. `of`: the choice of
    another setting that alone has it, a data set, workload, method, optimizer or schedule, or several with "or" between
    them. `limits`: pydantic's own (ge, lt, ...).
    """
    facts: dict[str, Any] = {"affects_result": result, "rule": rule, "of": of}
    return Field(default, description=help, json_schema_extra=facts, **limits)


_result = partial(setting, result=True)
_path = partial(setting, min_length=1, rule="a path")
_of_hf = partial(setting, result=True, min_length=1, rule="a name", of="hf")
_SEVERAL = "ddp or fsdp or horovod"  # the methods of several processes


def _deadline(default: float, what: str) -> Any:
    return setting(default, f"Longest time for {what}; then the process ends.", gt=0, le=WEEK_S)


class Config(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """All settings of one run, each checked by itself, and immutable. `load_config` also refuses contradictions."""

    workload: str = _result("images", "What is trained: images, text, or your own module:function.",
                            pattern=r"^(images|text|[A-Za-z_][\w.]*:[A-Za-z_][\w.]*)$",
                            rule='"images", "text" or module:function')
    dataset: str = _result("fashion-mnist", f"The data: {NAMES}.",
                           pattern=f"^({'|'.join(SOURCES).replace('PATH_OR_NAME', '.+')})$", rule=f"one of {NAMES}")
    hf_config: str | None = _of_hf(None, "Which configuration of the data set; null: the only or default one.")
    input_column: str | None = _of_hf(None, "Column of the images or texts; null: image, or text.")
    label_column: str = _of_hf("label", "Column of the labels.")
    hf_train_split: str = _of_hf("train", "Rows to train on: a split, or part of one such as train[:90%].")
    hf_eval_split: str | None = _of_hf(
        None, "Rows to evaluate on; null: validation or test, as eval_split says.", result=False)
    hf_download: bool = setting(False, "hf:NAME may be a name at the Hugging Face hub, downloaded once.", of="hf")
    data_dir: str | None = _path(None, "Folder of the data; null: look in the usual places, then download.")
    model: str = _result("cnn", "cnn, mlp, or a torchvision classifier such as resnet18.", pattern=r"^[A-Za-z]\w*$",
                         rule="cnn, mlp or the name of a torchvision classifier", of="images")
    image_size: int | None = _result(None, "Height and width of images in pixels; null: theirs.", ge=8, of="images")
    max_seq_len: int = _result(128, "Longer texts are cut to so many tokens.", ge=4, of="text")
    bert_dir: str | None = _path(None, "A BERT's folder: config, vocabulary, weights; null: small encoder.", of="text")
    eval_split: Literal["dev", "test"] = setting(
        "dev", "Which part to evaluate on, where there are both.", of="text or hf")
    init_from: str | None = _path(None, "Start from these weights: a checkpoint or a state dict, or its address.",
                                  result=True)
    dropout: float = _result(0.0, "Share of activations dropped in training.", ge=0, lt=1)
    augment: Augment = _result(
        False, "Change the training images at random. true: shift and flip; imagenet: its random crops and flips; "
        "trivial: TrivialAugmentWide besides. The last two are for imagefolder and hf.",
        rule="true, false, imagenet or trivial", of="images")
    limit_train: Natural = _result(0, "Use only the first so many training samples; 0: all.")
    limit_eval: Natural = _result(0, "Evaluate on only the first so many samples; 0: all.")
    fake_samples: Count = _result(1024, "How many images it has.", of="fake")
    fake_classes: int = _result(10, "How many classes it has.", ge=2, of="fake")
    # Only what YAML and JSON both hold: the options are saved with the run and compared when it is resumed
    options: dict[str, JsonValue] = _result(
        {}, "Free settings: --options.key value.", of="your own workload",
        rule="a mapping of words to finite numbers, texts, true, false, null, lists or mappings")

    parallel: Literal["auto", "none", "ddp", "dp", "fsdp", "horovod"] = setting(
        "auto",
        "auto: ddp where there are several processes; dp: one process, all its GPUs; fsdp: parameters split too.")
    device_ids: str = _result("", "The GPUs, in this order; empty: all that are visible.",
                              pattern=r"^(\d+(,\d+)*)?$", rule="numbers of GPUs, such as 1,0", of="dp")
    seed: int = _result(0, "Seed of weights, order and augmentation.", ge=0, le=2**32 - 1)
    batch_size: Count = _result(64, "Global batch: samples per step over all processes.")
    accumulate: Count = _result(1, "Micro-batches per step, to fit a large batch in little memory.")
    epochs: Count = setting(3, "Passes over the training data; may grow when resumed.")
    max_steps: Natural = setting(0, "End after so many steps in all; 0: by epochs.")
    optimizer: Literal["sgd", "adamw"] = _result("sgd", "SGD with momentum, or AdamW.")
    lr: float = _result(0.08, "Learning rate at its peak; schedule lowers it.", gt=0)
    momentum: float = _result(0.9, "Momentum of SGD.", ge=0, lt=1, of="sgd")
    weight_decay: float = _result(2e-4, "Weight decay; never on norms and biases.", ge=0)
    schedule: Literal["constant", "step", "cosine"] = _result("cosine", "How lr falls after the warm-up.")
    warmup_steps: Natural = _result(0, "Raise lr linearly over the first steps.")
    step_epochs: Count = _result(1, "Multiply lr by step_gamma each so many epochs.", of="step")
    step_gamma: float = _result(0.1, "The factor of each step.", gt=0, le=1, of="step")
    label_smoothing: float = _result(0.0, "Label smoothing of the loss.", ge=0, lt=1)
    clip_norm: float = _result(0.0, "Clip the global norm of the gradient to this; 0: off.", ge=0)
    precision: Literal["fp32", "bf16", "fp16"] = _result("fp32", "Mixed precision; fp16 scales the loss.")
    compile: bool = _result(False, "torch.compile the model, in the first step.", of="auto or none or ddp")
    sync_bn: bool = _result(False, "Batch norm over all processes; needs an accelerator.", of="none or ddp or fsdp")
    find_unused_parameters: bool = _result(False, "Some parameters may get no gradient.", of="none or ddp or dp")
    compress: Literal["none", "fp16", "bf16"] = _result(
        "none", "What the processes send of gradients; horovod: none, fp16.", of="none or ddp or horovod")
    deterministic: bool = _result(False, "Refuse operations that are not deterministic.")
    device: str = _result("auto", "auto, cpu, cuda, or another accelerator of torch.", pattern=r"^[a-z]+(:[0-9]+)?$",
                          rule="auto, cpu, cuda or another accelerator's name")
    num_threads: Count = _result(1, "CPU threads of each process; part of what makes runs equal to the bit.")

    num_workers: Natural = setting(0, "DataLoader workers of each process; data in memory need none.")
    eval_batch_size: Count = setting(512, "Samples at a time in evaluation, per process.")

    join_timeout_s: float = _deadline(120.0, "all processes to join")
    setup_timeout_s: float = _deadline(600.0, "fetching and preparing data and model")
    step_timeout_s: float = _deadline(300.0, "one step")
    eval_timeout_s: float = _deadline(900.0, "one evaluation")
    save_timeout_s: float = _deadline(600.0, "saving one checkpoint")

    name: str = setting("", "Folder of this run in run_dir; empty: the job's name, or dataset and model, or workload.",
                        pattern=r"^([A-Za-z0-9_][A-Za-z0-9._-]{0,199})?$",
                        rule="at most 200 letters, digits and . _ - beginning with a letter, digit or _")
    run_dir: str = setting("runs", "Folder of all runs, where rank 0 finds it again, or an address: s3://bucket/runs.",
                           min_length=1, rule="a path or an address")
    mirror: str = setting("", "Also keep the newest checkpoints in this folder, or at this address: s3://bucket/runs.",
                          rule="a path or an address")
    checkpoint_format: Literal["plain", "sharded"] = setting(
        "plain", "plain: rank 0 writes all; sharded: each rank its part, on storage that all nodes share.", of="fsdp")
    save: Literal["auto", "sync"] = setting(
        "auto", "auto: train on while a thread writes, where memory allows; sync: wait for it.")
    keep: Count = setting(2, "Newest checkpoints kept.")
    save_every_steps: Natural = setting(0, "Save each so many steps; 0: after each epoch.")
    memory_every_steps: int | None = setting(
        None, "Each rank keeps its part in its node's memory each so many steps; null: as often as it costs half a "
        "percent; 0: never.", ge=0, of="fsdp")
    evaluate_every_epochs: Count = setting(1, "Evaluate each so many epochs and at the end.")
    log_every_steps: Count = setting(50, "Write metrics each so many steps; until then, each 10.")
    compare_every_steps: int | None = setting(
        None, "Compare the ranks' states each so many steps; 0: never; null: in half a percent of the time.", ge=0,
        of=_SEVERAL)
    recompute_every_steps: Natural = setting(
        0, "Each so many steps let all ranks compute one batch, which costs about a step, and compare; 0: never.",
        of=_SEVERAL)
    tensorboard: bool = setting(True, "Write TensorBoard files.")
    tracker: Literal["none", "mlflow", "wandb"] = setting(
        "none", "Also send metrics, settings and result to a tracker, one run for all attempts.")


# The first setting of each group -> the group's title
GROUPS = {"workload": "what is trained", "parallel": "how it is trained", "num_workers": "loading",
          "join_timeout_s": "deadlines", "name": "the run"}
