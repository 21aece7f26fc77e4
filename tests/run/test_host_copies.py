"""A copy of a state is of the moment it was taken, is saved as the same bytes, and uses its memory again."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.rigs.checkpoints import training_state
from train.group.group import pack
from train.run.host_copies import HostCopies

CPU = torch.device("cpu")


def trained(optimizer: type[torch.optim.Optimizer]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """With buffers, tied weights, a parameter that is a part of another tensor, and a scalar."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    model[2].weight = model[0].weight
    model[2].bias = nn.Parameter(torch.randn(20)[4:20:2])
    model.register_buffer("seen", torch.tensor(3))
    model.register_buffer("empty", torch.zeros(0, 5))
    stepper = optimizer(model.parameters(), lr=0.1)
    model(torch.randn(4, 8)).sum().backward()
    stepper.step()
    return model.state_dict(), stepper.state_dict()


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_copy_is_saved_as_the_same_bytes(optimizer: type[torch.optim.Optimizer]) -> None:
    states = trained(optimizer)
    copied = HostCopies(CPU).take(states)
    assert [pack(part) for part in copied] == [pack(part) for part in states]
    assert copied[0]._metadata == states[0]._metadata  # type: ignore[attr-defined]


def test_copy_keeps_what_the_next_steps_change() -> None:
    weights, plain = torch.ones(4), {"lr": 0.1, "betas": [0.9, 0.99]}
    copied_weights, copied_plain = HostCopies(CPU).take(([weights, weights[1:3]], plain))
    weights.zero_()
    plain["betas"] = []
    assert copied_weights[0].tolist() == [1.0] * 4
    assert copied_weights[1].data_ptr() == copied_weights[0].data_ptr() + 4
    assert copied_plain == {"lr": 0.1, "betas": [0.9, 0.99]}


def test_copy_of_a_training_state_is_saved_as_the_bytes_of_then() -> None:
    momentum = torch.ones(3)
    state = training_state(4, optimizer={"state": {0: {"momentum_buffer": momentum}}})
    before = state.to_files()
    _, copied = HostCopies(CPU).take(({"weight": momentum[:2]}, state))
    momentum.zero_()
    assert state.to_files() != before
    assert copied.to_files() == before


def test_memory_is_used_again_also_where_the_state_has_grown() -> None:
    copies = HostCopies(CPU)
    weights, momentum = torch.ones(1000), torch.ones(500)
    first = copies.take([weights])[0].data_ptr()
    for _ in range(3):
        again = copies.take([momentum, weights])
        assert again[1].data_ptr() == first
    assert len(copies._buffers) == 2
    copies.take([momentum])
    assert len(copies._buffers) == 1


def test_other_kinds_of_tensors_are_copied_as_well() -> None:
    sparse = torch.eye(3).to_sparse()
    conjugated = torch.tensor([1 + 2j]).conj()
    copied = HostCopies(CPU).take({"sparse": sparse, "conjugated": conjugated, "text": "plain"})
    assert torch.equal(copied["sparse"].to_dense(), torch.eye(3))
    assert copied["conjugated"].tolist() == [1 - 2j]
    assert copied["text"] == "plain"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_copy_from_a_gpu_is_of_the_moment_it_was_asked_for() -> None:
    device = torch.device("cuda", 0)
    weights = torch.ones(50_000_000, device=device)
    copies = HostCopies(device)
    for _ in range(2):
        weights.fill_(1.0)
        (copied,) = copies.take([weights])
        weights.fill_(2.0)
        copies.wait()
        assert copied.is_pinned()
        assert copied.device.type == "cpu"
        assert bool((copied == 1.0).all())
