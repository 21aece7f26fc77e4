"""The doctor on GPUs. Written on a machine without one, and never run so far."""

from pathlib import Path

import pytest
import torch

from tests.rigs.fork_server import Forks

pytestmark = pytest.mark.gpu
JOB = ["--dataset", "digits", "--model", "mlp", "--name", "run"]


def test_doctor_alone_lists_the_gpus(forks: Forks, tmp_path: Path) -> None:
    codes, output = forks.run("doctor", *JOB, "--run-dir", str(tmp_path))
    assert codes[0] in (0, 10), output
    assert f"{torch.cuda.device_count()} CUDA devices, {torch.cuda.get_device_name(0)}" in " ".join(output.split())


def test_doctor_tells_the_health_of_the_gpus(forks: Forks, tmp_path: Path) -> None:
    codes, output = forks.run("doctor", "--alone", *JOB, "--run-dir", str(tmp_path))
    said = [" ".join(line.partition("] ")[2].split()) for line in output.splitlines()]
    assert codes[0] in (0, 10, 20), output
    # A healthy machine: one line for all. Another: at least one that names a GPU
    assert any(line.startswith(("ok gpus", "WARNING gpus GPU", "NOT FIT gpus GPU")) for line in said), output


def test_doctor_refuses_two_ranks_on_one_gpu(forks: Forks, tmp_path: Path) -> None:
    one = {"CUDA_VISIBLE_DEVICES": "0"}
    codes, output = forks.run("doctor", *JOB, "--run-dir", str(tmp_path), world_size=2, env=one)
    assert codes == [20, 20], output
    assert "2 processes on this node, but 1 CUDA devices are visible" in " ".join(output.split())


def test_doctor_on_two_gpus_look_at_nccl(forks: Forks, tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    codes, output = forks.run("doctor", *JOB, "--run-dir", str(tmp_path), world_size=2)
    assert codes in ([0, 0], [10, 10]), output
    assert "all_reduce, broadcast and all_gather give the right numbers" in " ".join(output.split())
