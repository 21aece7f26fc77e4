"""A copy of tensors is of the moment it was taken, and uses its memory again."""

import pytest
import torch

from rankup.state.saver import HostCopies

CPU = torch.device("cpu")


def test_copy_keeps_what_the_next_steps_change_and_its_memory_format() -> None:
    weights = {
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "every second": torch.ones(9)[::2],
        "scalar": torch.tensor(3), "empty": torch.zeros(0, 5), "conjugated": torch.tensor([1 + 2j]).conj(),
    }
    before = {name: tensor.clone() for name, tensor in weights.items()}
    copied = HostCopies(CPU).take(weights)
    for tensor in weights.values():
        tensor.zero_()
    assert all(torch.equal(copied[name], before[name]) for name in before)
    assert copied["channels last"].stride() == weights["channels last"].stride()


def test_memory_is_used_again_also_where_the_state_has_grown() -> None:
    copies = HostCopies(CPU)
    weights, momentum = torch.ones(1000), torch.ones(500)
    first = copies.take({"weights": weights})["weights"].data_ptr()
    for _ in range(3):
        assert copies.take({"momentum": momentum, "weights": weights})["weights"].data_ptr() == first
    assert len(copies._buffers) == 2
    copies.take({"momentum": momentum})
    assert len(copies._buffers) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_copy_from_a_gpu_is_of_the_moment_it_was_asked_for() -> None:
    device = torch.device("cuda", 0)
    weights = torch.ones(50_000_000, device=device)
    copies = HostCopies(device)
    for _ in range(2):
        weights.fill_(1.0)
        copied = copies.take({"weights": weights})["weights"]
        weights.fill_(2.0)
        copies.wait()
        assert copied.is_pinned()
        assert copied.device.type == "cpu"
        assert bool((copied == 1.0).all())
