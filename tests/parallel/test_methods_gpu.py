"""The methods on GPUs, by nccl. Written on a machine without GPUs; the tests skip where there are not two."""

from pathlib import Path

import pytest
import torch

from tests.rigs.fork_server import Forks
from tests.rigs.jobs import metrics, result

pytestmark = pytest.mark.gpu
LINE = ("train", "--dataset", "digits", "--model", "cnn", "--device", "cuda", "--tensorboard=false", "--lr", "0.02",
        "--schedule", "constant", "--log-every-steps", "1", "--save-every-steps", "6", "--name", "run")


def train(forks: Forks, folder: Path, world_size: int, *more: str, steps: int = 20) -> list[float]:
    line = (*LINE, *more, "--max-steps", str(steps), "--run-dir", folder)
    forks.ends(*line, world_size=world_size, timeout_s=240)
    return [line["train/loss"] for line in metrics(folder / "run") if "train/loss" in line]


# How far the loss may be from that of one GPU in fp32; TF32 and other kernels may be taken for another shape of batch
VARIANTS: dict[str, tuple[tuple[str, ...], float]] = {
    "ddp": ((), 1e-2),
    "fp16 with its scaler": (("--precision", "fp16"), 3e-2),
    "bf16": (("--precision", "bf16"), 5e-2),
    "sent as fp16": (("--compress", "fp16"), 1e-2),
    "sent as bf16": (("--compress", "bf16"), 1e-2),
    "fsdp": (("--parallel", "fsdp"), 1e-2),
    "fsdp in bf16, sharded": (("--parallel", "fsdp", "--precision", "bf16", "--checkpoint-format", "sharded"), 5e-2),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variant_on_two_gpus_follows_one_and_resumes_to_the_bit(forks: Forks, tmp_path: Path, variant: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    settings, tolerance = VARIANTS[variant]
    alone = train(forks, tmp_path / "alone", 1, "--parallel", "none")
    whole = train(forks, tmp_path / "whole", 2, *settings, "--deterministic")
    assert max(abs(a - b) / b for a, b in zip(whole, alone, strict=True)) < tolerance
    train(forks, tmp_path / "parts", 2, *settings, "--deterministic", steps=13)
    assert train(forks, tmp_path / "parts", 2, *settings, "--deterministic") == whole
    assert result(tmp_path / "parts" / "run")["digest"] == result(tmp_path / "whole" / "run")["digest"]
