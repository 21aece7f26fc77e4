"""The methods on GPUs with NCCL. On a machine with one GPU two ranks share it."""

import os
import re
from pathlib import Path

import pytest
import torch

from rankup.group import joining
from tests.rigs.fork_server import Forks
from tests.rigs.jobs import kill, metrics, result

pytestmark = pytest.mark.gpu
LINE = ("--device", "cuda", "--tensorboard=false", "--log-every-steps", "1", "--name", "run", "--deterministic")
DIGITS = ("--dataset", "digits", "--model", "cnn", "--lr", "0.02", "--schedule", "constant", "--save-every-steps", "6")
# A state of 400 MB, which takes a surviving rank a while to write
WIDE = ("--workload", "tests.rigs.faulting_workload:build", "--options.width", "4000000", "--batch-size", "4",
        "--max-steps", "14", "--save-every-steps", "100")


def shared() -> None:
    """Preloaded. Make NCCL take the ranks for ranks of two machines and connect them by sockets."""
    if torch.cuda.device_count() == 1:
        os.environ |= {"NCCL_HOSTID": os.environ.get("RANK", "0"), "NCCL_SOCKET_IFNAME": "lo", "NCCL_NET": "Socket"}
        joining.check_devices = lambda group: None


def run(
    forks: Forks, folder: Path, world_size: int, *more: str, env: dict[str, str] | None = None
) -> tuple[list[int], str]:
    return forks.run("train", *LINE, *more, "--run-dir", folder, world_size=world_size, env=env or {},
                     preload=f"{__name__}:shared", timeout_s=240)


def train(forks: Forks, folder: Path, world_size: int, *more: str, steps: int = 20) -> list[float]:
    codes, output = run(forks, folder, world_size, *DIGITS, *more, "--max-steps", str(steps))
    assert codes == [0] * world_size, output
    return [line["train/loss"] for line in metrics(folder / "run") if "train/loss" in line]


# Settings, and the tolerance for the loss against one GPU in fp32. Another batch shape may get TF32 or other kernels
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
def test_variant_on_two_ranks_follows_one_gpu_and_resumes_exactly(forks: Forks, tmp_path: Path, variant: str) -> None:
    settings, tolerance = VARIANTS[variant]
    alone = train(forks, tmp_path / "alone", 1, "--parallel", "none")
    whole = train(forks, tmp_path / "whole", 2, *settings)
    assert max(abs(a - b) / b for a, b in zip(whole, alone, strict=True)) < tolerance
    train(forks, tmp_path / "parts", 2, *settings, steps=13)
    assert train(forks, tmp_path / "parts", 2, *settings) == whole
    assert result(tmp_path / "parts" / "run")["digest"] == result(tmp_path / "whole" / "run")["digest"]


@pytest.mark.parametrize("settings", [(), ("--precision", "fp16")])
def test_killed_rank_costs_no_finished_step_while_the_other_waits_in_nccl(
    forks: Forks, tmp_path: Path, settings: tuple[str, ...]
) -> None:
    codes, output = run(forks, tmp_path / "whole", 2, *WIDE, *settings)
    assert codes == [0, 0], output
    for rank, left in ((1, 0), (0, 1)):
        codes, output = run(forks, tmp_path / "killed", 2, *WIDE, *settings, env=kill(rank, 5))
        assert (codes[rank], codes[left]) == (-9, 171), output
    codes, output = run(forks, tmp_path / "killed", 2, *WIDE, *settings)
    assert codes == [0, 0], output
    # The host is ahead of the GPU, so the killed host may have been in a step that the GPU had not reached
    assert re.search(r"resumed from step [678], rescued by rank 1 on ", output), output
    assert result(tmp_path / "killed" / "run")["digest"] == result(tmp_path / "whole" / "run")["digest"]
