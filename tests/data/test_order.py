"""The order of samples and their augmentation are the same for any world size, restart and number of workers."""

import random

import pytest
import torch
from torch.utils.data import Dataset

from rankup.loop.batches import source_of
from train.data.samples import EpochSampler, MapSamples, TensorSamples, load_batches, random_numbers, shift_and_flip


class Numbers:
    """Samples that return the indices and the epoch that were asked for."""

    def __len__(self) -> int:
        return 1000

    def batch(self, indices: torch.Tensor, epoch: int | None) -> tuple[list[int], int | None]:
        return indices.tolist(), epoch


def steps(
    order: EpochSampler, epoch: int, world_size: int = 1, accumulate: int = 1
) -> list[list[tuple[float, list[int]]]]:
    """Return the micro-batches of all ranks for each step of an epoch, each with the divisor of its mean loss."""
    loader = load_batches(Numbers(), order, accumulate=accumulate, num_workers=0, device=torch.device("cpu"))
    ranks = [source_of(loader, rank, world_size, any_order=False) for rank in range(world_size)]
    found: list[list[tuple[float, list[int]]]] = [[] for _ in range(len(order))]
    for rank in ranks:
        for step, (batches, weight) in zip(found, rank.open(1, epoch=epoch, skip=0, state=None), strict=True):
            assert {batch[1] for _, batch in batches} == {epoch}
            step += [(parts / weight, batch[0]) for parts, batch in batches]
    return found


def samples(step: list[tuple[float, list[int]]]) -> list[int]:
    return [sample for _, batch in step for sample in batch]


@pytest.mark.parametrize("epoch", [0, 1, 5])
def test_epoch_takes_each_sample_once_and_drops_the_tail(epoch: int) -> None:
    order = EpochSampler(1000, 30, 0)
    seen = [sample for step in steps(order, epoch) for sample in samples(step)]
    assert len(seen) == len(set(seen)) == 990
    # The samples left out are the end of the epoch's permutation, other samples in each epoch
    assert seen == order.epoch(epoch)[:990].tolist()
    assert sorted(order.epoch(epoch).tolist()) == list(range(1000))


def test_seeds_give_other_orders() -> None:
    # With a sum of seed and epoch, epoch 1 of seed 0 would be epoch 0 of seed 1
    assert not torch.equal(EpochSampler(100, 10, 0).epoch(1), EpochSampler(100, 10, 1).epoch(0))


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_uneven_batch_is_used_whole_and_each_sample_counts_once(
    world_size: int, accumulate: int
) -> None:
    order = EpochSampler(1000, 64, 7)
    for step, alone in zip(steps(order, 1, world_size, accumulate), steps(order, 1), strict=True):
        assert samples(step) == samples(alone)
        sizes = [len(batch) for _, batch in step]
        assert max(sizes) - min(sizes) <= 2
        # A sample's weight is 1 / (size of its micro-batch * divisor), and then the mean over the ranks
        counts = [1 / (len(batch) * divisor * world_size) for divisor, batch in step]
        assert counts == pytest.approx([1 / 64] * len(counts), rel=1e-15)


@pytest.mark.parametrize("accumulate", [1, 3, 7])
def test_equal_micro_batches_are_divided_by_accumulate_exactly(accumulate: int) -> None:
    for world_size in (1, 2, 7):
        order = EpochSampler(1000, 13 * world_size * accumulate, 0)
        assert {divisor for step in steps(order, 0, world_size, accumulate) for divisor, _ in step} == {accumulate}


def test_random_numbers_are_uniform_and_differ_by_epoch_and_seed() -> None:
    found = [random_numbers(seed, epoch, 10_000) for seed, epoch in ((0, 0), (0, 1), (1, 0), (0, 0))]
    assert [torch.equal(numbers, found[0]) for numbers in found] == [True, False, False, True]
    assert found[0].shape == (10_000, 3)
    assert found[0].mean(0).tolist() == pytest.approx([0.5] * 3, abs=0.02)


def test_image_is_shifted_by_whole_pixels_and_mirrored() -> None:
    image = torch.arange(1, 257, dtype=torch.uint8).view(1, 1, 16, 16)
    still, down_right = torch.tensor([[0.5, 0.5, 0.5]]), torch.tensor([[0.0, 0.0, 0.49]])
    assert torch.equal(shift_and_flip(image, still), image)
    moved = shift_and_flip(image, down_right, mirror=False)
    assert torch.equal(moved[..., 2:, 2:], image[..., :-2, :-2])
    assert not moved[..., :2, :].any()
    assert not moved[..., :, :2].any()
    assert torch.equal(shift_and_flip(image, down_right), moved.flip(3))


def test_tensor_samples_augment_only_in_training() -> None:
    images, labels = torch.randint(0, 256, (40, 1, 16, 16), dtype=torch.uint8), torch.arange(40)
    samples = TensorSamples(images, labels, augment=True, seed=1)
    indices = torch.tensor([3, 30, 7])
    assert torch.equal(samples.batch(indices, None)[0], images[indices])
    first, second = samples.batch(indices, 0)[0], samples.batch(indices, 1)[0]
    assert not torch.equal(first, second)
    assert torch.equal(samples.batch(indices.flip(0), 0)[0], first.flip(0))  # the place in the batch does not matter
    assert samples.batch(indices, 0)[1].tolist() == [3, 30, 7]


class Noisy(Dataset[torch.Tensor]):
    """A Dataset that draws from every source of random numbers that a user's Dataset may use."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> torch.Tensor:
        import numpy

        return torch.tensor([index, torch.rand(()), random.random(), numpy.random.rand()], dtype=torch.float64)


def test_map_samples_draw_equal_numbers_for_a_sample_in_any_order() -> None:
    samples = MapSamples(Noisy(), seed=3)
    whole = samples.batch(torch.arange(50), 0)
    some = torch.tensor([20, 4])
    assert torch.equal(samples.batch(some, 0), whole[some])
    for column in (1, 2, 3):
        assert len(set(whole[:, column].tolist())) == 50
        assert not torch.equal(samples.batch(some, 1)[:, column], whole[some, column])  # other numbers each epoch
        assert not torch.equal(MapSamples(Noisy(), seed=4).batch(some, 0)[:, column], whole[some, column])
