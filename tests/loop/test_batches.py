"""Batches of a user's loader are split among ranks and resume in the middle. Inexact loaders are refused."""

import gc
import multiprocessing
import random
from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from torch.utils import data
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset, RandomSampler

from rankup.errors import UserError
from rankup.loop.batches import evaluation_batches, source_of
from rankup.loop.generators import AHEAD
from rankup.loop.order import part_of
from rankup.loop.trace import Trace, digest_of, last_traced


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> int:
        return index


class Noise(Numbers):
    """Samples with random numbers of Python and torch, as augmentation draws them."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, random.random(), torch.rand(()).item()])


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        waiting: list[int] = []
        for number in range(40):  # a shuffle buffer
            waiting.append(number)
            if len(waiting) > 8:
                yield waiting.pop(random.randrange(len(waiting)))
        yield from waiting


class Remembering:
    """A loader that has a state_dict. It can't be skipped by iteration, because it yields nothing twice."""

    def __init__(self) -> None:
        self.next = 0

    def __iter__(self) -> Iterator[int]:
        while self.next < 12:
            self.next += 1
            yield self.next

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


class Foreign:
    """A user's own sampler, which draws batches of different sizes from Python's random numbers."""

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(10):
            yield [random.randrange(50) for _ in range(random.randint(3, 8))]


class Unsized:
    """A sampler without a length."""

    def __iter__(self) -> Iterator[int]:
        return iter(random.sample(range(50), 50))


class Curriculum(Foreign):
    """A sampler that draws other batches in each iteration."""

    asked = 0

    def __iter__(self) -> Iterator[list[int]]:
        self.asked += 1
        yield [self.asked, 1, 2]


class Prefetching(DataLoader[int]):
    """A loader with its own __iter__, which therefore must split samples among ranks itself."""

    def __iter__(self) -> Any:
        return super().__iter__()


class Telling(DataLoader[int]):
    """A loader with a state_dict, like torchdata's StatefulDataLoader."""

    state_dict = load_state_dict = dict  # type: ignore[assignment]


def flat(batches: list[Any]) -> list[Any]:
    return [torch.stack(each).tolist() if isinstance(each, list | tuple) else torch.as_tensor(each).tolist()
            for each in batches]


def read(
    loader: Any, *, rank: int = 0, world_size: int = 1, skip: int = 0, state: Any = None, seed: int = 5
) -> list[Any]:
    source = source_of(loader, rank, world_size, any_order=False)
    pairs = source.open(seed, epoch=0, skip=skip * source.stride, state=state)
    return [batch if weight else [] for batch, weight in zip(*map(flat, zip(*pairs, strict=True)), strict=True)]


LOADERS = {
    "shuffled": lambda: DataLoader(Numbers(), batch_size=8, shuffle=True),
    "last left out": lambda: DataLoader(Numbers(), batch_size=8, shuffle=True, drop_last=True),
    "own generator": lambda: DataLoader(Numbers(), batch_size=8, shuffle=True, generator=torch.Generator()),
    "with replacement": lambda: DataLoader(Numbers(), batch_size=8, sampler=RandomSampler(Numbers(), replacement=True)),
    "weighted": lambda: DataLoader(Numbers(), batch_size=8, sampler=data.WeightedRandomSampler([1.0] * 50, 70)),
    "own sampler": lambda: DataLoader(Numbers(), batch_sampler=Foreign()),  # type: ignore[arg-type]
    "own sampler of samples": lambda: DataLoader(Numbers(), batch_size=8, sampler=Unsized()),
    "workers": lambda: DataLoader(Noise(), batch_size=8, shuffle=True, num_workers=2),
    "batched by the sampler": lambda: DataLoader(
        data.TensorDataset(torch.arange(50)), batch_size=None, sampler=BatchSampler(RandomSampler(Numbers()), 8, False)
    ),
    "iterable": lambda: DataLoader(Stream(), batch_size=3),
    "iterable with workers": lambda: DataLoader(Stream(), batch_size=3, num_workers=2),
    "distributed": lambda: DataLoader(
        Numbers(), batch_size=3, sampler=DistributedSampler(Numbers(), num_replicas=3, rank=1)
    ),
    "own iteration": lambda: Prefetching(Numbers(), batch_size=8, shuffle=True),
    "list": lambda: [1, 2, 3, 4, 5, 6],
}


@pytest.mark.parametrize("kind", LOADERS)
def test_batches_resumed_in_the_middle_are_those_of_a_whole_epoch(kind: str) -> None:
    whole = read(LOADERS[kind]())
    random.seed(1)
    torch.manual_seed(1)  # earlier draws must not matter
    assert len(whole) > 4
    assert read(LOADERS[kind](), skip=3) == whole[3:]
    if kind not in ("list", "distributed"):  # DistributedSampler has its own seed
        assert read(LOADERS[kind](), seed=6) != whole


@pytest.mark.parametrize(
    "kind", ["shuffled", "own generator", "with replacement", "weighted", "own sampler", "workers"]
)
def test_batches_of_three_ranks_together_are_those_of_one_rank(kind: str) -> None:
    whole = read(LOADERS[kind]())
    parts = [read(LOADERS[kind](), rank=rank, world_size=3) for rank in range(3)]
    assert [[*chain(*each)] for each in zip(*parts, strict=True)] == whole


def test_batches_of_the_next_epoch_come_from_the_same_workers() -> None:
    loader = DataLoader(Noise(), batch_size=8, shuffle=True, num_workers=1, persistent_workers=True)
    source = source_of(loader, 0, 1, any_order=False)
    first, second, again = (
        flat([batch for batch, _ in source.open(seed, epoch=0, skip=0, state=None)]) for seed in (1, 2, 1)
    )
    assert first == again
    assert first != second


def test_weights_of_uneven_parts_keep_the_mean_of_the_batch() -> None:
    batch = [*range(7)]
    parts = [part_of(batch, rank, 3) for rank in range(3)]
    assert [part for part, _ in parts] == [[0, 1, 2], [3, 4], [5, 6]]
    # Like DDP, take the mean over the ranks
    assert sum(sum(part) / len(part) * weight for part, weight in parts) / 3 == pytest.approx(sum(batch) / 7)
    assert part_of([9], 2, 3) == ([9], 0.0)


def test_loader_with_a_state_resumes_from_it() -> None:
    loader = Remembering()
    source = source_of(loader, 0, 1, any_order=False)
    batches = source.open(1, epoch=0, skip=0, state=None)
    assert [next(batches)[0] for _ in range(3)] == [1, 2, 3]
    assert read(Remembering(), skip=3, state=loader.state_dict()) == [*range(4, 13)]


@pytest.mark.parametrize("kind", ["shuffled", "own sampler"])
def test_replay_of_an_order_shows_that_it_moves_before_the_step_begins(kind: str) -> None:
    """A resume draws the order again. A deadline for all of it would end each run with a slow sampler."""
    source, moved = source_of(LOADERS[kind](), 0, 1, any_order=False), list[int]()
    batches = source.open(3, epoch=0, skip=4, state=None, moves=lambda: moved.append(1))
    assert len(moved) == 4
    assert [*batches]
    assert len(moved) == 4


def test_sampler_drawn_ahead_does_not_depend_on_the_random_state_of_the_training() -> None:
    drawn = 0

    class Long:
        def __iter__(self) -> Iterator[list[int]]:
            nonlocal drawn
            for _ in range(10 * AHEAD):
                drawn += 1
                yield [random.randrange(50) for _ in range(10)]

    def batches(seed: int) -> list[Any]:
        nonlocal drawn
        source = source_of(DataLoader(Numbers(), batch_sampler=Long()), 0, 1, any_order=False)  # type: ignore[arg-type]
        found = source.open(3, epoch=0, skip=0, state=None)
        drawn = 0
        random.seed(seed)  # as the training does
        first = flat([next(found)[0] for _ in range(AHEAD + 5)])
        assert drawn <= 2 * AHEAD  # a long epoch begins without drawing all of it
        return first

    assert batches(11) == batches(12)


@pytest.mark.parametrize(("loader", "why"), [
    ((number for number in range(3)), "neither start again nor return"),
    (DataLoader(Numbers(), batch_sampler=Curriculum()), "Curriculum must draw the same batches"),  # type: ignore[arg-type]
    (Prefetching(Numbers(), batch_size=8), "must split its samples among 2 ranks"),
    (DataLoader(Numbers(), batch_size=None), "must split its samples among 2 ranks"),
    (Telling(Numbers(), batch_size=None), "must split its samples among 2 ranks"),
])
def test_loader_that_cannot_be_exact_is_refused_in_one_line(loader: Any, why: str) -> None:
    with pytest.raises(UserError, match=why) as refused:
        read(loader, world_size=2)
    assert "\n" not in str(refused.value)


def test_loader_whose_order_does_not_matter_is_used_unchanged() -> None:
    source = source_of((number for number in range(3)), 0, 2, any_order=True)
    assert [batch for batch, _ in source.open(1, epoch=0, skip=2, state=None)] == [0, 1, 2]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_evaluation_sees_each_sample_once_in_the_same_batches(world_size: int, workers: int) -> None:
    by_rank = []
    for rank in range(world_size):
        sampler = DistributedSampler(Numbers(), num_replicas=world_size, rank=rank, shuffle=False)
        for given in ({}, {"sampler": sampler}):
            loader: Any = DataLoader(Numbers(), batch_size=8, num_workers=workers, **given)
            by_rank.append([batch.tolist() for batch, _ in evaluation_batches(loader, 1, rank, world_size, pad=False)])
    for half in (by_rank[::2], by_rank[1::2]):
        assert sorted(chain(*chain(*half))) == [*range(50)]
        assert sorted(chain(*half)) == [[*range(n, min(n + 8, 50))] for n in range(0, 50, 8)]


@pytest.mark.parametrize("loader", [DataLoader(Numbers(), 8), DataLoader(Stream(), 6), [torch.arange(2)] * 7])
def test_padded_evaluation_gives_all_ranks_the_same_number_of_batches(loader: Any) -> None:
    by_rank = [[*evaluation_batches(loader, 1, rank, 3, pad=True)] for rank in range(3)]
    assert [[weight for _, weight in own] for own in by_rank] == [[1.0, 1.0, 1.0], [1.0, 1.0, 0.0], [1.0, 1.0, 0.0]]
    seen = [sample for batch, weight in chain(*by_rank) if weight for sample in batch.tolist()]
    assert sorted(seen) == sorted(sample for batch in loader for sample in batch.tolist())


def test_persistent_workers_of_an_evaluation_end_with_their_loader() -> None:
    before = {*multiprocessing.active_children()}
    gc.disable()
    try:
        loader = DataLoader(Numbers(), batch_size=25, num_workers=1, persistent_workers=True)
        assert len([*evaluation_batches(loader, 1, 0, 1, pad=False)]) == 2
        assert {*multiprocessing.active_children()} > before
        del loader
        assert {*multiprocessing.active_children()} <= before
    finally:
        gc.enable()


def test_evaluation_without_workers_passes_connection_errors_on() -> None:
    class Unreachable(Numbers):
        def __getitem__(self, index: int) -> int:
            raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        next(evaluation_batches(DataLoader(Unreachable()), 1, 0, 1, pad=False))


def test_evaluation_neither_changes_nor_depends_on_the_random_state() -> None:
    def evaluated(draws: int) -> list[Any]:
        torch.manual_seed(3)
        batches = evaluation_batches(DataLoader(Noise(), batch_size=8, shuffle=True), 1, 0, 1, pad=False)
        found = []
        for batch, _ in batches:
            found.append(batch.tolist())
            torch.rand(draws)
        assert draws or torch.equal(torch.rand(2), torch.rand(2, generator=torch.Generator().manual_seed(3)))
        return found

    assert evaluated(0) == evaluated(5)


def test_digest_of_a_batch_knows_values_in_any_structure() -> None:
    """Also if it reads only some elements; and it reads no other device."""
    numpy = pytest.importorskip("numpy")
    image = pytest.importorskip("PIL.Image")
    large = torch.arange(300 * 3 * 40 * 40.0).reshape(300, 3, 40, 40)

    class Sample:
        def __init__(self, value: int) -> None:
            self.value = value

    makers: list[Any] = [
        lambda n: n, lambda n: [str(n), None], lambda n: {"a": {"b": (True, float(n))}}, lambda n: torch.tensor(n),
        lambda n: large + n, lambda n: large.movedim(1, 3) + n, lambda n: large.bfloat16() * (n + 1),
        lambda n: torch.tensor([1.0 + 1j * n]).conj(), lambda n: numpy.full((70, 2), n), lambda n: numpy.float32(n),
        lambda n: numpy.array([str(n), n], dtype=object), lambda n: [Sample(n)], lambda n: [b"x"] * 100 + [b"y"] * n,
        lambda n: image.new("RGB", (8, 8), (n, 0, 0)),
        lambda n: [torch.zeros(n), lambda: n],
    ]
    for make in makers:
        assert digest_of(make(1)) == digest_of(make(1)), make(1)
        assert digest_of(make(1)) != digest_of(make(2)), make(1)
        assert digest_of(make(1), 5) != digest_of(make(1), 6)
    for unread in (torch.zeros(2, device="meta"), torch.eye(2).to_sparse(), torch.zeros(0), {1, 2}, object()):
        assert digest_of(unread) == digest_of(unread)


def test_last_traced_batch_is_one_that_counts() -> None:
    for number in range(1, 100):
        trace = Trace(rolls=False)
        values = [trace.add(each, each) for each in range(number)]
        assert values[-1] == digest_of(last_traced(number))
