"""Buffers are rank 0's on all ranks after each step, and a copy of them outlives a forward pass."""

import copy
from pathlib import Path

import torch
from torch import nn

from tests.rigs.fork_server import Forks
from tests.rigs.jobs import result
from train.parallel.buffers import Buffers

SETTINGS = (
    "train", "--dataset=fake", "--fake-samples=24", "--model=mobilenet_v3_small", "--batch-size=12", "--max-steps=2",
    "--image-size=32", "--eval-batch-size=12", "--tensorboard=false", "--name=run", "--join-timeout-s=60",
)


class Alone:
    """As much of a group of one as Buffers looks at: it has no collectives."""

    world_size = 1


def test_copy_is_that_of_the_last_step_whatever_a_forward_pass_does() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    buffers = Buffers(model, Alone())  # type: ignore[arg-type]
    before = copy.deepcopy(dict(model.named_buffers()))
    model(torch.randn(8, 3))
    assert not torch.equal(model[1].running_mean, before["1.running_mean"])
    assert all(torch.equal(value, before[name]) for name, value in buffers.kept().items())
    buffers.share()  # alone: nothing to do
    buffers.keep()
    assert buffers.kept().keys() == before.keys()
    assert all(torch.equal(value, buffers.kept()[name]) for name, value in model.named_buffers())


def test_buffer_that_a_forward_pass_puts_another_tensor_in_is_copied_too() -> None:
    model = nn.BatchNorm1d(2)
    buffers = Buffers(model, Alone())  # type: ignore[arg-type]
    model.running_mean = torch.tensor([3.0, 4.0])
    buffers.keep()
    assert buffers.kept()["running_mean"].tolist() == [3.0, 4.0]
    model.running_mean = torch.zeros(3)  # of another size too
    buffers.keep()
    assert buffers.kept()["running_mean"].tolist() == [0.0] * 3


def test_all_ranks_hold_rank_0s_statistics(forks: Forks, tmp_path: Path) -> None:
    """Each rank saw other samples: without an exchange the statistics would differ."""
    preload = "tests.parallel.test_buffers:compare_after_each_step"
    codes, output = forks.run(*SETTINGS, f"--run-dir={tmp_path}", world_size=2, preload=preload)
    assert codes == [0, 0], output
    assert result(tmp_path / "run")["step"] == 2


def compare_after_each_step() -> None:
    """Preloaded: end with an error where the buffers of the ranks differ after a step."""
    import train.loop
    from train.run import weights

    step = train.loop.step

    def compared(t: train.loop.Training) -> bool:
        own = weights.digest(dict(t.plain.named_buffers()))
        finished = step(t)
        digests = t.group.gather(weights.digest(dict(t.plain.named_buffers())))
        assert len(set(digests)) == 1, digests
        assert own not in digests  # they do change
        assert weights.digest(t.buffers.kept()) == digests[0]
        return finished

    train.loop.step = compared
