"""fsdp: parameters split over the ranks. That it follows one process and resumes to the bit is in test_methods.py."""

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


def test_fsdp_goes_on_with_other_world_sizes(forks: Forks, tmp_path: Path) -> None:
    curves = []
    for name, parts in (("even", ((2, 12),)), ("changing", ((2, 4), (4, 8), (1, 12)))):
        for world_size, steps in parts:
            run = train(forks, tmp_path / name, world_size, "--parallel", "fsdp", "--max-steps", str(steps))
        curves.append([line["train/loss"] for line in metrics(run) if "train/loss" in line])
    assert len(curves[0]) == len(curves[1]) == 12
    assert curves[1] == pytest.approx(curves[0], rel=1e-5)


def test_fsdp_evaluates_exactly_where_ranks_have_different_numbers_of_batches(forks: Forks, tmp_path: Path) -> None:
    """359 samples in three batches on two ranks, and in one batch: one rank has none."""
    for size in ("150", "400"):
        line = ("--parallel", "fsdp", "--max-steps", "4", "--eval-batch-size", size)
        run = train(forks, tmp_path / size, 2, *line)
        output = forks.ends("evaluate", *DIGITS, *line, "--name", run.name, "--run-dir", tmp_path)
        printed = dict(re.findall(r"^ *(accuracy|loss) +([\d.]+)$", output, re.MULTILINE))
        found = [line for line in metrics(run) if "eval/loss" in line][-1]
        assert printed == {"accuracy": f"{found['eval/accuracy']:.4f}", "loss": f"{found['eval/loss']:.4f}"}
        assert re.search(r"^ *samples +359$", output, re.MULTILINE)


def test_fsdp_leaves_pictures_and_plain_weights(forks: Forks, tmp_path: Path) -> None:
    run = train(forks, tmp_path / "run", 2, "--parallel", "fsdp", "--max-steps", "3", "--tensorboard=true")
    assert list((run / "tensorboard").iterdir())
    newest = load_checkpoint(max((run / "checkpoints").iterdir()))
    assert all(type(tensor) is torch.Tensor for tensor in newest.tracked["model"].values())
    assert result(run)["parallel"] == "fsdp"


def test_parts_that_share_a_parameter_stay_together() -> None:
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    assert len(methods.layers_of(tied)) == 2
    tied[1].weight = tied[0].weight
    assert methods.layers_of(tied) == []
    layers = nn.ModuleDict({"stack": nn.ModuleList([nn.Linear(2, 2), nn.ReLU()]), "head": nn.Linear(2, 2)})
    assert len(methods.layers_of(layers)) == 2


class Unmovable(nn.Sequential):
    """A model that refuses to be moved as a whole, as one too large for the device would."""

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        raise AssertionError("the whole model was moved")


def build(config: Config) -> Workload:
    """The recording workload with an unmovable model, whose ranks print the types of what they gather and reduce."""

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
def test_model_is_never_whole_on_the_device_and_gathered_in_its_precision(
    forks: Forks, tmp_path: Path, precision: str, model: str, gathered: set[str]
) -> None:
    output = forks.ends("train", "--workload", f"{__name__}:build", "--options.model", model, "--parallel", "fsdp",
                        "--max-steps", "2", "--precision", precision, "--tensorboard=false", "--run-dir", tmp_path,
                        world_size=2)
    assert set(re.findall(r"AllGather sends torch\.(\w+)", output)) == gathered
    assert set(re.findall(r"ReduceScatter sends torch\.(\w+)", output)) == {"float32"}


@pytest.mark.gpu
def test_gpu_holds_the_shard_and_no_more_than_two_layers_while_the_model_is_split() -> None:
    """The second of four ranks, whose others need not be there: to split a model takes no message."""
    device, layer = torch.device("cuda", torch.cuda.current_device()), 4 * 2**20
    workload: Any = SimpleNamespace(model=nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(16)]))
    group: Any = SimpleNamespace(device=device, world_size=4)
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    try:
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        plain = prepare(workload, Config(parallel="fsdp"), group, split=True)
        methods.FSDP(Config(parallel="fsdp"), group).split(plain)
        gc.collect()  # a process's first call of fully_shard leaves its layer in a cycle
        assert torch.cuda.memory_allocated(device) - before == 16 * layer // 4
        assert torch.cuda.max_memory_allocated(device) - before <= 16 * layer // 4 + 2 * layer
    finally:
        dist.destroy_process_group()
