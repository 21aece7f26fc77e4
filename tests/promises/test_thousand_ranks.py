"""A thousand ranks, in simulation: what each of them computes about all ranks grows with their number, not its square.

No test measures time. `operations` counts the bytecodes and comparisons of a call, for two numbers of ranks.
"""

import contextlib
import json
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from rankup.loop.agreement import differing
from rankup.loop.batches import source_of
from rankup.loop.order import in_tensors
from rankup.observe.stragglers import medians_of_others
from rankup.places.lease import Lineage
from rankup.state import reading, tree
from rankup.state.choice import in_order
from rankup.state.parts import peers_of
from rankup.state.place import PARTS, PEER, Candidate
from rankup.state.reading import CopyFiles
from rankup.state.tree import TREE, TensorFile, file_of
from tests.rigs.bare_group import group_of

FEW, MANY = 256, 1024


def operations(call: Callable[[], object]) -> int:
    count = 0

    def note(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return note

    before = sys.gettrace()
    sys.settrace(note)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


class Text(str):
    """A text whose comparisons run as Python code, so that `operations` also counts those in list.index."""

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other)


def known(ranks: int) -> Callable[[], object]:
    rows = [(Text(f"node{rank // 8}"), Text(f"part {rank}"), 1) for rank in range(ranks)]
    return lambda: peers_of(rows)


class Number(float):
    """A number, in the same way for sorting."""

    def __lt__(self, other: float) -> bool:
        return float.__lt__(self, other)


def slow_ranks(ranks: int) -> Callable[[], object]:
    values = [Number(value) for value in torch.rand(ranks).tolist()]
    return lambda: medians_of_others(values)


def digests(ranks: int) -> Callable[[], object]:
    found = [{f"[{rank}]": rank} for rank in range(ranks)]
    return lambda: differing(found)


def copies(ranks: int) -> Callable[[], object]:
    line = Lineage("run", "first", "", [["a", 0]], 1)
    found = [Candidate(rank, f"node{rank}", PEER, "copy", "", step, "a", "run", line.values())
             for rank in range(ranks) for step in (3, 4)]
    found += [Candidate(rank, f"node{rank}", PARTS, f"part {rank}", "", 5, "a", "run", None, [rank])
              for rank in range(ranks)]
    group: Any = SimpleNamespace(hosts=["host"] * ranks, run_dir="run", is_rank0=True)
    return lambda: [*in_order(found, None, lambda line: True, group)]


@pytest.mark.parametrize("of", [known, slow_ranks, digests, copies])
def test_work_of_each_rank_grows_with_the_number_of_ranks(of: Callable[[int], Callable[[], object]]) -> None:
    assert operations(of(MANY)) < 1.5 * MANY / FEW * operations(of(FEW))


def test_gathered_values_take_as_many_exchanges_among_a_thousand_ranks_as_among_two(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exchanges: dict[int, list[str]] = {2: [], MANY: []}
    for ranks, made in exchanges.items():
        def all_reduce(tensor: torch.Tensor, made: list[str] = made, **_: Any) -> None:
            made.append("all_reduce")
            tensor.fill_(int(tensor.max()))  # each rank has as many bytes as this one

        def all_gather(parts: list[torch.Tensor], own: torch.Tensor, made: list[str] = made, **_: Any) -> None:
            made.append("all_gather")
            torch._foreach_copy_(parts, [own] * len(parts))

        monkeypatch.setattr(dist, "all_reduce", all_reduce)
        monkeypatch.setattr(dist, "all_gather", all_gather)
        assert group_of(0, ranks).gather_tensors([{"n": torch.tensor(1)}]) == [[{"n": torch.tensor(1)}]] * ranks
    assert exchanges[2] == exchanges[MANY] == ["all_reduce", "all_gather"]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("drop_last", [True, False])
def test_rank_turns_only_its_own_part_of_a_global_batch_into_numbers(
    monkeypatch: pytest.MonkeyPatch, shuffle: bool, drop_last: bool
) -> None:
    loader = DataLoader(range(3 * 4096 + 100), batch_size=4096, shuffle=shuffle, drop_last=drop_last)  # type: ignore[arg-type]

    def read() -> list[Any]:
        source = source_of(loader, 5, MANY, any_order=False)
        return [(batch, weight) for batch, weight in source.open(3, epoch=0, skip=0, state=None)]

    made = list[int]()
    with monkeypatch.context() as patched:
        to_list = torch.Tensor.tolist
        patched.setattr(torch.Tensor, "tolist", lambda self: made.append(self.numel()) or to_list(self))
        patched.setattr(BatchSampler, "__iter__", None)  # it would make one number for each sample
        own = read()
    monkeypatch.setattr("rankup.loop.batches.in_tensors", lambda sampler: sampler)
    assert str(own) == str(read())
    assert sorted(made) == [1, 4, 4, 4][drop_last:]


def test_order_in_tensors_is_torchs_own() -> None:
    def both(**how: Any) -> Iterator[list[list[int]]]:
        for of in (lambda sampler: sampler, in_tensors):
            generator = torch.Generator().manual_seed(5) if how.pop("seeded", False) else None
            sampler = BatchSampler(RandomSampler(range(10), generator=generator, **how), 4, False)
            torch.manual_seed(7)
            made = of(sampler)
            assert (made is sampler) == (of is not in_tensors)
            yield [[int(number) for number in batch] for batch in made]

    for how in ({}, {"num_samples": 7}, {"num_samples": 25}, {"num_samples": 20}):
        first, second = both(**how)
        assert first == second, how


# Sharded copies -------------------------------------------------------------------------------------------------------


def split_copy(whole: torch.Tensor, grid: Sequence[int], ranks: Sequence[int]) -> dict[str, bytes]:
    """Return the files of a sharded copy of one tensor. It is split as torch.chunk does, into `grid` parts in each
    dimension. `ranks`: which rank has each part, row by row."""
    chunks = [-(-size // parts) for size, parts in zip(whole.shape, grid, strict=True)]
    files = {TREE: json.dumps({"tree": {"model": {"$": "tensor", "is": "model/value"}}}).encode()}
    for rank, cell in zip(ranks, product(*map(range, grid)), strict=True):
        begin = [min(at * chunk, size) for at, chunk, size in zip(cell, chunks, whole.shape, strict=True)]
        part = whole[tuple(slice(at, at + chunk) for at, chunk in zip(begin, chunks, strict=True))]
        files[file_of(rank)] = b"".join(TensorFile({"model/value": part}, {"model/value": (begin, [*whole.shape])}))
    return files


@pytest.fixture
def read_part(monkeypatch: pytest.MonkeyPatch) -> Callable[..., torch.Tensor]:
    """Read a rank's part of the tensor of `split_copy`, which has the shape `whole`."""
    def read(files: dict[str, bytes], whole: torch.Tensor, part: tuple[slice, ...]) -> torch.Tensor:
        local, place = torch.zeros_like(whole[part]), ([each.start for each in part], [*whole.shape])
        monkeypatch.setattr(reading, "local_parts", lambda tensors: (tensors, {"model/value": place}))
        return CopyFiles({name: bytearray(data) for name, data in files.items()}).read_into({"model": local})["model"]

    return read


@pytest.mark.parametrize(("ranks", "headers"), [(MANY, 2), (MANY // 2, 3), (2 * MANY, 2), (MANY // 8, 9)])
def test_rank_reads_the_headers_of_rank_0s_file_and_of_the_files_with_its_part(
    monkeypatch: pytest.MonkeyPatch, read_part: Callable[..., torch.Tensor], ranks: int, headers: int
) -> None:
    seen, slices_in = list[int](), tree.slices_in
    monkeypatch.setattr(reading, "slices_in", lambda content: seen.append(1) or slices_in(content))
    whole = torch.arange(2.0 * MANY)[:, None]
    files, rows = split_copy(whole, [MANY, 1], range(MANY)), len(whole) // ranks
    for rank in (ranks // 3, ranks - 1):
        seen.clear()
        part = slice(rank * rows, (rank + 1) * rows), slice(0, 1)
        assert torch.equal(read_part(files, whole, part), whole[part])
        assert len(seen) == headers


def test_any_part_of_a_tensor_is_read_however_ranks_had_split_it_or_the_lack_is_said(
    read_part: Callable[..., torch.Tensor]
) -> None:
    for seed in range(300):
        draw = random.Random(seed)
        shape, grid = ([draw.randint(1, most) for _ in range(3)] for most in (9, 4))
        shape, grid = shape[:(ndim := draw.randint(1, 3))], grid[:ndim]
        parts = int(torch.tensor(grid).prod())
        # Ranks may lie in any order in the mesh, and only some of them may have the tensor
        ranks = draw.choice([range(parts), range(3, parts + 3), draw.sample(range(2 * parts), parts)])
        whole = torch.arange(1.0, torch.Size(shape).numel() + 1).view(shape)
        files, others = split_copy(whole, grid, ranks), {*range(2 * parts)} - {*ranks}
        files |= {file_of(rank): b"".join(TensorFile({}, {})) for rank in others}
        ends = [sorted(draw.choices(range(size + 1), k=2)) for size in shape]
        part = tuple(slice(*pair) for pair in ends)
        assert torch.equal(read_part(files, whole, part), whole[part]), seed
        del files[file_of(draw.choice(ranks))]
        with contextlib.suppress(ValueError):  # the part may lie elsewhere in the tensor
            assert torch.equal(read_part(files, whole, part), whole[part]), seed
