"""A thousand ranks, in simulation: what each of them computes about all ranks grows with their number, not its square.

No test measures time. `operations` counts the bytecodes and comparisons of a call, for two numbers of ranks.
"""

import sys
from collections.abc import Callable, Iterator
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from rankup.loop.agreement import differing
from rankup.loop.batches import source_of
from rankup.loop.order import InTensors
from rankup.observe.stragglers import medians_of_others
from rankup.places.lease import Lineage
from rankup.state.choice import in_order
from rankup.state.parts import peers_of
from rankup.state.place import PARTS, PEER, Candidate
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
    monkeypatch.setattr("rankup.loop.order.InTensors.of", lambda sampler: sampler)
    assert str(own) == str(read())
    assert sorted(made) == [1, 4, 4, 4][drop_last:]


def test_order_in_tensors_is_torchs_own() -> None:
    def both(**how: Any) -> Iterator[list[list[int]]]:
        for of in (lambda sampler: sampler, InTensors.of):
            generator = torch.Generator().manual_seed(5) if how.pop("seeded", False) else None
            sampler = BatchSampler(RandomSampler(range(10), generator=generator, **how), 4, False)
            torch.manual_seed(7)
            made = of(sampler)
            assert isinstance(made, InTensors) == (of == InTensors.of)
            yield [[int(number) for number in batch] for batch in made]

    for how in ({}, {"num_samples": 7}, {"num_samples": 25}, {"num_samples": 20}):
        first, second = both(**how)
        assert first == second, how
