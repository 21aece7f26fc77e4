"""Several ranks train one model. Every method and setting follows the losses of one process and resumes to the bit."""

import types
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rankup.errors import UserError
from tests.rigs.checkpoints import load_checkpoint
from tests.rigs.fork_server import Forks
from tests.rigs.jobs import losses_of, metrics, result
from tests.rigs.recording_workload import records
from train.config import Config, load_config
from train.config.method import METHODS
from train.parallel import method_class, method_name
from train.parallel.methods import Method

# The rate is constant, because a cosine over fewer steps would be another curve. It is small, so that it does not
# magnify differences
DIGITS = ("--dataset", "digits", "--model", "cnn", "--tensorboard=false", "--limit-train", "704", "--lr", "0.02",
          "--schedule", "constant", "--warmup-steps", "5", "--log-every-steps", "1")
STEPS = 22
losses = partial(losses_of, count=STEPS)


def train(forks: Forks, run: Path, world_size: int, *arguments: str) -> Path:
    forks.ends("train", *DIGITS, "--max-steps", str(STEPS), *arguments, "--name", run.name, "--run-dir", run.parent,
               world_size=world_size)
    return run


def largest_difference(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) / b for a, b in zip(one, other, strict=True))


@pytest.fixture(scope="module")
def alone(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of one process in fp32."""
    return losses(train(forks, tmp_path_factory.mktemp("alone") / "run", 1))


# Settings, and the tolerance for the loss against one process in fp32. Another order of sums changes the last of fp32's
# 24 bits. bf16 keeps 8 bits and fp16 keeps 11. A tie in a max pool can change a single step by 1e-3. Variants with
# adamw reach other weights, so their single process has the same settings.
VARIANTS: dict[str, tuple[tuple[str, ...], float]] = {
    "bf16": (("--precision", "bf16"), 3e-2),
    "fp16 accumulated and clipped at 1e9": (("--precision", "fp16", "--accumulate", "2", "--clip-norm", "1e9"), 2e-2),
    "unused parameters looked for": (("--find-unused-parameters",), 1e-3),
    "fsdp in bf16, accumulated": (("--parallel", "fsdp", "--precision", "bf16", "--accumulate", "2"), 3e-2),
    "sent as fp16": (("--compress", "fp16"), 1e-3),
    "sent as bf16": (("--compress", "bf16"), 1e-3),
    "fsdp with adamw, clipped": (
        ("--parallel", "fsdp", "--optimizer", "adamw", "--lr", "0.002", "--clip-norm", "0.5"), 1e-3),
    "everything with adamw": (("--optimizer", "adamw", "--precision", "bf16", "--accumulate", "2", "--clip-norm", "1",
                               "--lr", "0.002", "--label-smoothing", "0.1", "--augment"), 3e-2),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variant_follows_one_process_and_resumes_to_the_bit(
    forks: Forks, alone: list[float], tmp_path: Path, variant: str
) -> None:
    arguments, tolerance = VARIANTS[variant]
    whole = train(forks, tmp_path / "whole", 2, *arguments)
    expected = losses(train(forks, tmp_path / "one", 1, *arguments)) if "adamw" in arguments else alone
    assert largest_difference(losses(whole), expected) < tolerance
    train(forks, tmp_path / "parts", 2, *arguments, "--max-steps", "13")
    parts = train(forks, tmp_path / "parts", 2, *arguments)
    assert result(parts)["digest"] == result(whole)["digest"]
    assert losses(parts) == losses(whole)


def test_training_resumes_with_dropout_to_the_bit(forks: Forks, tmp_path: Path) -> None:
    """fp16 and everything that draws random numbers. Four ranks show the order of DDP's buckets, which two do not."""
    line = ("--precision", "fp16", "--dropout", "0.3", "--augment", "--accumulate", "2", "--num-workers", "1")
    whole = train(forks, tmp_path / "whole", 4, *line)
    train(forks, tmp_path / "parts", 4, *line, "--max-steps", "13")
    assert result(train(forks, tmp_path / "parts", 4, *line))["digest"] == result(whole)["digest"]


def test_scaler_resumes_with_its_scale(forks: Forks, tmp_path: Path) -> None:
    run = train(forks, tmp_path / "run", 1, "--precision", "fp16", "--max-steps", "15")
    scaler = load_checkpoint(run / "checkpoints" / "step-00000015").tracked["scaler"]
    assert scaler["scale"] > 1
    assert scaler["_growth_tracker"] == 15  # steps without overflow, which decide when the scale grows


RECORDED = ("train", "--workload", "tests.rigs.recording_workload:build", "--tensorboard=false", "--batch-size", "12",
       "--max-steps", "4")


def recorded(forks: Forks, tmp_path: Path, world_size: int, *arguments: str, name: str = "run") -> Path:
    folder = tmp_path / f"record-{name}"
    forks.ends(
        *RECORDED, "--options.record", folder, "--name", name, "--run-dir", tmp_path, *arguments, world_size=world_size
    )
    return folder


def test_dropout_differs_by_rank_and_step_and_weights_do_not(forks: Forks, tmp_path: Path) -> None:
    folder = recorded(forks, tmp_path, 3, "--options.model", "dropout")
    masks = [[entry["masks"][0] for entry in rank] for rank in records(folder, "loss")]
    assert [len(rank) for rank in masks] == [4, 4, 4]
    assert len({tuple(mask) for rank in masks for mask in rank}) == 12
    assert len({entry["weights"] for rank in records(folder, "evaluate") for entry in rank}) == 1
    again = recorded(forks, tmp_path, 3, "--options.model", "dropout", name="again")
    assert records(again, "loss") == records(folder, "loss")


@pytest.mark.parametrize("accumulate", [1, 3])
def test_gradients_are_exchanged_once_a_step(forks: Forks, tmp_path: Path, accumulate: int) -> None:
    folder = recorded(forks, tmp_path, 2, "--accumulate", str(accumulate))
    for rank in records(folder, "loss"):
        assert {entry["size"] for entry in rank} == {12 // 2 // accumulate}
        sent = [entry["sent"] for entry in rank]
        # One exchange before the first step, and one at the end of each step, which the next micro-batch sees
        assert sent == [1 + number // accumulate for number in range(4 * accumulate)]
    assert {entry["sent"] for rank in records(folder, "evaluate") for entry in rank} == {5}


def test_compression_changes_the_weights(forks: Forks, tmp_path: Path) -> None:
    hooks = {"none": (), "fp16": ("--compress", "fp16"), "bf16": ("--compress", "bf16")}
    digests = {
        result(train(forks, tmp_path / name, 2, "--max-steps", "6", *more))["digest"] for name, more in hooks.items()
    }
    assert len(digests) == 3


# Unused parameters ----------------------------------------------------------------------------------------------


def test_unused_parameter_gives_torchs_error_and_an_explanation(forks: Forks, tmp_path: Path) -> None:
    output = forks.ends(*RECORDED, "--options.model", "unused", "--run-dir", tmp_path, world_size=2, code=1)
    assert "Expected to have finished reduction in the prior iteration" in output
    assert "this is: some parameters get no gradient" in output


def test_unused_parameter_is_allowed_on_request(forks: Forks, tmp_path: Path) -> None:
    folder = recorded(forks, tmp_path, 2, "--options.model", "unused", "--find-unused-parameters")
    assert len({entry["weights"] for rank in records(folder, "evaluate") for entry in rank}) == 1


def test_sync_bn_on_a_cpu_is_refused(forks: Forks, tmp_path: Path) -> None:
    """tests/config/test_contradictions.py tests contradictions that are refused before anything starts."""
    output = forks.ends("train", *DIGITS, "--sync-bn", "--run-dir", tmp_path, world_size=2, code=2)
    assert "sync_bn must be false on a CPU, got true. torch's SyncBatchNorm needs an accelerator." in output


def test_ddp_with_one_process_trains_as_without_ddp(forks: Forks, alone: list[float], tmp_path: Path) -> None:
    assert losses(train(forks, tmp_path / "run", 1, "--parallel", "ddp")) == alone


# --compile ------------------------------------------------------------------------------------------------------


def say_graphs() -> None:
    """Preloaded. Before each evaluation let a rank print how many graphs dynamo has captured."""
    import train.run.evaluation

    evaluate = train.run.evaluation.evaluate

    def counted(*values: Any, **named: Any) -> Any:
        from torch._dynamo.utils import counters

        print(f"graphs {counters['stats']['unique_graphs']} breaks {len(counters['graph_break'])}", flush=True)
        return evaluate(*values, **named)

    import train.loop

    train.loop.evaluate = counted  # type: ignore[assignment]


def test_compiled_model_is_really_compiled_and_resumes(forks: Forks, tmp_path: Path) -> None:
    line = ("train", *DIGITS, "--model", "mlp", "--run-dir", tmp_path)
    for name, steps, compiled in (("eager", 10, False), ("whole", 10, True), ("parts", 6, True), ("parts", 10, True)):
        output = forks.ends(*line, f"--compile={str(compiled).lower()}", "--name", name, "--max-steps", str(steps),
                            world_size=2, timeout_s=280, preload="tests.parallel.test_methods:say_graphs")
        assert output.count(f"graphs {int(compiled)} breaks 0") == output.count("graphs ") == 2, output
    assert result(tmp_path / "whole")["digest"] == result(tmp_path / "parts")["digest"]
    eager, compiled_, parts = (
        [line["train/loss"] for line in metrics(tmp_path / name) if "train/loss" in line]
        for name in ("eager", "whole", "parts")
    )
    assert parts == compiled_
    assert compiled_ == pytest.approx(eager, rel=1e-4)


def test_compile_without_a_compiler_gives_one_line(forks: Forks, tmp_path: Path) -> None:
    output = forks.ends("train", *DIGITS, "--compile", "--run-dir", tmp_path, env={"PATH": ""}, code=2)
    assert "error: compile needs a C++ compiler" in output


# DataParallel ---------------------------------------------------------------------------------------------------


def test_dp_on_one_device_says_so_and_trains_as_without_dp(forks: Forks, alone: list[float], tmp_path: Path) -> None:
    dp = ("--parallel", "dp", "--device", "cpu")
    output = forks.ends("train", *DIGITS, "--max-steps", str(STEPS), *dp, "--name", "run", "--run-dir", tmp_path)
    assert output.count("dp     one device (cpu): trains as one process does without DataParallel") == 1
    assert losses(tmp_path / "run") == alone


def on_gpus(monkeypatch: pytest.MonkeyPatch, count: int, **settings: Any) -> Method:
    """Return the method dp, set up as on a machine with `count` GPUs."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    log = types.SimpleNamespace(info=lambda text: None)
    group = types.SimpleNamespace(device=torch.device("cuda", 0), world_size=1, log=log)
    with method_class("dp")(Config(parallel="dp", **settings), group).running() as method:  # type: ignore[arg-type]
        return method


@pytest.mark.parametrize("settings", [{"device_ids": "0,2"}, {"device_ids": "1,1"}])
def test_dp_refuses_missing_and_repeated_devices(monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="must name different ones of the 2 visible GPUs"):
        on_gpus(monkeypatch, 2, **settings).wrap(nn.Linear(2, 2))


def test_dp_wraps_a_model_only_for_several_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(on_gpus(monkeypatch, 1).wrap(nn.Linear(2, 2)), nn.Linear)
    assert isinstance(on_gpus(monkeypatch, 3, device_ids="1").wrap(nn.Linear(2, 2)), nn.Linear)
    spread = on_gpus(monkeypatch, 3).wrap(nn.Linear(2, 2))
    assert isinstance(spread, nn.DataParallel)
    assert isinstance(spread.module, nn.Linear)


@pytest.mark.gpu
def test_dp_on_two_gpus_in_any_order_follows_one_process(forks: Forks, alone: list[float], tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    run = train(forks, tmp_path / "run", 1, "--parallel", "dp", "--device-ids", "1,0")
    assert largest_difference(losses(run), alone) < 1e-2


# Choosing -------------------------------------------------------------------------------------------------------


def test_methods_are_the_choices_of_the_setting_parallel() -> None:
    for name in METHODS:
        assert load_config({"parallel": name}).parallel == name
        assert issubclass(method_class(name), Method)
    with pytest.raises(UserError, match=r"^--parallel must be one of auto, none, .*, got"):
        load_config({"parallel": "dpp"})


def test_auto_is_ddp_for_several_processes_and_none_for_one() -> None:
    assert [method_name(Config(), world_size) for world_size in (1, 2)] == ["none", "ddp"]
    assert method_name(Config(parallel="ddp"), 1) == "ddp"
