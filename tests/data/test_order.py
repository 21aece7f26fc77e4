"""The order of samples and their augmentation: the same for any world size, restart and number of workers."""

import random
from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import Dataset

from rankup.seeds import derive_seed
from train.data import MapSamples, TensorSamples
from train.data.order import Order, evaluation_batches, num_batches
from train.data.samples import random_numbers, shift_and_flip


def steps(order: Order, first: int, last: int) -> list[list[int]]:
    """The sample numbers of each micro-batch."""
    return [indices.tolist() for _, indices in order.batches(first, last)]


def world(num_samples: int, batch_size: int, world_size: int, accumulate: int = 1) -> list[Order]:
    return [Order(num_samples, batch_size, 7, rank, world_size, accumulate) for rank in range(world_size)]


# Epochs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("epoch", [0, 1, 5])
def test_epoch_takes_each_sample_once_and_drops_the_tail(epoch: int) -> None:
    order = Order(103, 10, 0)
    seen = [sample for batch in steps(order, epoch * 10, epoch * 10 + 10) for sample in batch]
    assert order.steps_per_epoch == 10
    assert len(seen) == len(set(seen)) == 100
    # what is left out is the end of that epoch's permutation, other samples each time
    assert seen == order.epoch(epoch)[:100].tolist()
    assert sorted(order.epoch(epoch).tolist()) == list(range(103))


def test_seeds_give_other_orders() -> None:
    assert steps(Order(100, 10, 0), 0, 10) != steps(Order(100, 10, 1), 0, 10)
    # a sum of seed and epoch would collide: epoch 1 of seed 0 is not epoch 0 of seed 1
    assert not torch.equal(Order(100, 10, 0).epoch(1), Order(100, 10, 1).epoch(0))


# World size -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 12])
@pytest.mark.parametrize(("batch_size", "accumulate"), [(120, 1), (120, 5), (64, 1), (64, 3)])
def test_ranks_together_take_the_global_batch_and_each_sample_counts_once(
    batch_size: int, accumulate: int, world_size: int
) -> None:
    ranks = world(1000, batch_size, world_size, accumulate)
    parts = [steps(order, 0, 3) for order in ranks]
    for step, expected in enumerate(steps(Order(1000, batch_size, 7), 0, 3)):
        taken = [part for rank in parts for part in rank[step * accumulate : (step + 1) * accumulate]]
        assert [sample for part in taken for sample in part] == expected
        assert [len(part) for part in taken] == [size for order in ranks for size in order.micro_sizes]
    # A sample's weight: 1 / (its micro-batch's size and divisor), and the mean over ranks
    pairs = [pair for order in ranks for pair in zip(order.micro_sizes, order.divisors, strict=True)]
    counts = [1 / (size * divisor * world_size) for size, divisor in pairs]
    assert counts == pytest.approx([1 / batch_size] * len(counts), rel=1e-15)
    sizes = ranks[0].samples_by_rank
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    if batch_size % (world_size * accumulate) == 0:  # exactly, for the bits of jobs that divide evenly
        assert {divisor for _, divisor in pairs} == {accumulate}


@pytest.mark.parametrize("first", [0, 1, 8, 9, 25])
def test_keys_from_the_middle_are_those_of_the_whole_run(first: int) -> None:
    for order in [*world(100, 12, 2, accumulate=3), *world(100, 11, 3, accumulate=3)]:
        assert steps(order, first, 30) == steps(order, 0, 30)[first * 3 :]


# Evaluation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 15])
@pytest.mark.parametrize("num_samples", [1, 10, 100, 101, 109])
def test_evaluation_takes_each_sample_once_in_the_same_batches(num_samples: int, world_size: int) -> None:
    batches_of_rank: dict[int, list[int]] = {}
    for rank in range(world_size):
        for number, (epoch, indices) in evaluation_batches(num_samples, 10, rank, world_size):
            assert epoch is None
            assert number not in batches_of_rank
            batches_of_rank[number] = indices.tolist()
    assert sorted(batches_of_rank) == list(range(num_batches(num_samples, 10)))
    in_order = [sample for number in sorted(batches_of_rank) for sample in batches_of_rank[number]]
    assert in_order == list(range(num_samples))
    assert all(len(batch) == 10 for number, batch in batches_of_rank.items() if number < len(batches_of_rank) - 1)


# Augmentation ---------------------------------------------------------------------------------------------------


def splitmix64(start: int, count: int) -> Iterator[float]:
    """The reference, in whole numbers: https://prng.di.unimi.it/splitmix64.c"""
    for _ in range(count):
        start = (start + 0x9E3779B97F4A7C15) % 2**64
        z = start
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        yield ((z ^ (z >> 31)) >> 11) / 2**53


def test_random_numbers_are_splitmix64() -> None:
    numbers = random_numbers(3, 5, torch.arange(50), 3)
    assert numbers.flatten().tolist() == list(splitmix64(derive_seed(3, 5), 150))


def test_image_is_shifted_by_whole_pixels_filled_with_black_and_mirrored_unless_told_not_to() -> None:
    image = torch.arange(1, 257, dtype=torch.uint8).view(1, 1, 16, 16)
    still, down_right = torch.tensor([[0.5, 0.5, 0.5]]), torch.tensor([[0.0, 0.0, 0.49]])
    assert torch.equal(shift_and_flip(image, still), image)
    moved = shift_and_flip(image, down_right, mirror=False)
    assert torch.equal(moved[..., 2:, 2:], image[..., :-2, :-2])
    assert not moved[..., :2, :].any()
    assert not moved[..., :, :2].any()
    assert torch.equal(shift_and_flip(image, down_right), moved.flip(3))


def test_tensor_samples_augment_in_training_alone() -> None:
    images, labels = torch.randint(0, 256, (40, 1, 16, 16), dtype=torch.uint8), torch.arange(40)
    samples = TensorSamples(images, labels, augment=True, seed=1)
    indices = torch.tensor([3, 30, 7])
    assert torch.equal(samples.batch(indices, None)[0], images[indices])
    first, second = samples.batch(indices, 0)[0], samples.batch(indices, 1)[0]
    assert not torch.equal(first, second)
    assert torch.equal(samples.batch(indices.flip(0), 0)[0], first.flip(0))  # its place in the batch changes nothing
    assert samples.batch(indices, 0)[1].tolist() == [3, 30, 7]


class Noisy(Dataset[torch.Tensor]):
    """Draws from every source of random numbers that a user's Dataset may draw from."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> torch.Tensor:
        import numpy

        return torch.tensor([index, torch.rand(()), random.random(), numpy.random.rand()], dtype=torch.float64)


def test_map_samples_draw_the_same_for_a_sample_whatever_came_before() -> None:
    samples = MapSamples(Noisy(), seed=3)
    whole = samples.batch(torch.arange(50), 0)
    some = torch.tensor([20, 4])
    assert torch.equal(samples.batch(some, 0), whole[some])
    for column in (1, 2, 3):
        assert len(set(whole[:, column].tolist())) == 50
        assert not torch.equal(samples.batch(some, 1)[:, column], whole[some, column])  # other numbers each epoch
        assert not torch.equal(MapSamples(Noisy(), seed=4).batch(some, 0)[:, column], whole[some, column])
