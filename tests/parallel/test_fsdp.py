"""fsdp shards parameters over the ranks. test_methods.py tests that it follows one process and resumes to the bit."""

import gc
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.rigs import recording_workload
from tests.rigs.checkpoints import load_checkpoint
from tests.rigs.fork_server import Forks
from tests.rigs.jobs import metrics, result
from train.config import Config
from train.parallel import methods
from train.parallel.model import prepare
from train.workloads import Workload

DIGITS = ("--dataset", "digits", "--model", "cnn", "--tensorboard=false", "--limit-train", "704", "--lr", "0.02",
          "--schedule", "constant", "--log-every-steps", "1")


def train(forks: Forks, run: Path, world_size: int, *arguments: str | Path) -> Path:
    where = ("--name", run.name, "--run-dir", run.parent)
    forks.ends("train", *DIGITS, *arguments, *where, world_size=world_size)
    return run


def test_fsdp_resumes_with_other_world_sizes(forks: Forks, tmp_path: Path) -> None:
    curves = []
    for name, parts in (("even", ((2, 12),)), ("changing", ((2, 4), (4, 8), (1, 12)))):
        for world_size, steps in parts:
            run = train(forks, tmp_path / name, world_size, "--parallel", "fsdp", "--max-steps", str(steps))
        curves.append([line["train/loss"] for line in metrics(run) if "train/loss" in line])
    assert len(curves[0]) == len(curves[1]) == 12
    assert curves[1] == pytest.approx(curves[0], rel=1e-5)


def test_fsdp_evaluates_exactly_with_uneven_numbers_of_batches(forks: Forks, tmp_path: Path) -> None:
    """Two ranks get the 359 samples in three batches, or in one batch, so that one rank has none."""
    for size in ("150", "400"):
        line = ("--parallel", "fsdp", "--max-steps", "4", "--eval-batch-size", size)
        run = train(forks, tmp_path / size, 2, *line)
        output = forks.ends("evaluate", *DIGITS, *line, "--name", run.name, "--run-dir", tmp_path)
        printed = dict(re.findall(r"^ *(accuracy|loss) +([\d.]+)$", output, re.MULTILINE))
        found = [line for line in metrics(run) if "eval/loss" in line][-1]
        assert printed == {"accuracy": f"{found['eval/accuracy']:.4f}", "loss": f"{found['eval/loss']:.4f}"}
        assert re.search(r"^ *samples +359$", output, re.MULTILINE)


def test_fsdp_writes_tensorboard_files_and_plain_weights(forks: Forks, tmp_path: Path) -> None:
    run = train(forks, tmp_path / "run", 2, "--parallel", "fsdp", "--max-steps", "3", "--tensorboard=true")
    assert list((run / "tensorboard").iterdir())
    newest = load_checkpoint(max((run / "checkpoints").iterdir()))
    assert all(type(tensor) is torch.Tensor for tensor in newest.tracked["model"].values())
    assert result(run)["parallel"] == "fsdp"


def test_layers_that_share_a_parameter_are_not_split() -> None:
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    assert len(methods.layers_of(tied)) == 2
    tied[1].weight = tied[0].weight
    assert methods.layers_of(tied) == []
    layers = nn.ModuleDict({"stack": nn.ModuleList([nn.Linear(2, 2), nn.ReLU()]), "head": nn.Linear(2, 2)})
    assert len(methods.layers_of(layers)) == 2


class Unmovable(nn.Sequential):
    """A model that can't be moved as a whole, like a model that is too large for the device."""

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        raise AssertionError("the whole model was moved")


def build(config: Config) -> Workload:
    """Build the recording workload with an unmovable model. Ranks print the dtypes that they gather and reduce."""

    def printed(collective: type) -> None:
        send = collective.__call__  # type: ignore[operator]

        def call(*args: Any, input_tensor: torch.Tensor, **named: Any) -> Any:
            print(collective.__name__, "sends", input_tensor.dtype, flush=True)
            return send(*args, input_tensor=input_tensor, **named)

        collective.__call__ = call  # type: ignore[operator]

    printed(_fsdp_collectives.DefaultAllGather)
    printed(_fsdp_collectives.DefaultReduceScatter)
    workload = recording_workload.build(config)
    return replace(workload, model=Unmovable(*workload.model.children()))


@pytest.mark.parametrize(("precision", "model", "gathered"), [
    ("fp32", "plain", {"float32"}), ("bf16", "plain", {"bfloat16"}), ("bf16", "wide", {"bfloat16", "float32"}),
], ids=["fp32", "bf16", "bf16 with a batch norm, which stays in fp32"])
def test_fsdp_never_has_the_whole_model_and_gathers_in_its_precision(
    forks: Forks, tmp_path: Path, precision: str, model: str, gathered: set[str]
) -> None:
    output = forks.ends("train", "--workload", f"{__name__}:build", "--options.model", model, "--parallel", "fsdp",
                        "--max-steps", "2", "--precision", precision, "--tensorboard=false", "--run-dir", tmp_path,
                        world_size=2)
    assert set(re.findall(r"AllGather sends torch\.(\w+)", output)) == gathered
    assert set(re.findall(r"ReduceScatter sends torch\.(\w+)", output)) == {"float32"}


@pytest.mark.gpu
def test_fsdp_needs_the_shard_and_at_most_two_layers_while_it_splits() -> None:
    """This is rank 1 of 4. The others need not exist, because splitting a model sends no message."""
    device, layer = torch.device("cuda", torch.cuda.current_device()), 4 * 2**20
    workload: Any = SimpleNamespace(model=nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(16)]))
    group: Any = SimpleNamespace(device=device, world_size=4)
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    try:
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        plain = prepare(workload, Config(parallel="fsdp"), group, split=True)
        methods.FSDP(Config(parallel="fsdp"), group).split(plain)
        gc.collect()  # the first fully_shard of a process leaves its layer in a reference cycle
        assert torch.cuda.memory_allocated(device) - before == 16 * layer // 4
        assert torch.cuda.max_memory_allocated(device) - before <= 16 * layer // 4 + 2 * layer
    finally:
        dist.destroy_process_group()
