"""The collectives on host memory: which values arrive, and that no received data is executed."""

import os
import pickle
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from rankup.errors import PeerLost, UserError
from rankup.group.group import Group, _packed
from rankup.group.joining import check_settings
from tests.rigs.bare_group import group_of
from tests.rigs.fork_server import Forks
from tests.rigs.strangers import Evil

ROWS = [{"accuracy": 0.1 + 0.2, "name": "größe", "none": None, "list": [1, [2.5, True]]}, [], "", 2**60]


def exchange() -> None:
    """In each forked rank: run `check` in a real group."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    check(group_of(rank, world_size))
    dist.barrier()
    os._exit(0)


def check(group: Group) -> None:
    rank, ranks = group.rank, range(group.world_size)
    last = ranks[-1]
    assert group.gather({"rank": rank, "values": ROWS[: rank + 1]}) == [
        {"rank": each, "values": ROWS[: each + 1]} for each in ranks
    ]
    assert group.gather((rank, "x" * rank)) == [[each, "x" * each] for each in ranks]
    for sizes in ([0] * len(ranks), [7 * each for each in ranks], [9, *[0] * last], [1000, *[1] * last]):
        data = [bytes([each + 1]) * size for each, size in enumerate(sizes)]  # also sizes that no all-gather would pad
        assert group.gather_bytes(data[rank]) == data
    for source in ranks:
        assert group.broadcast(ROWS if rank == source else {"not": "looked at"}, source=source) == ROWS
        data = bytes(range(256)) * 1000 * source  # rank 0 sends nothing
        assert group.broadcast_bytes(data if rank == source else b"other", source=source) == data

    state = {"state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.randn(5, 3)}}, "lr": 0.1, "betas": (0.9, 0.99)}
    received = group.broadcast_tensors(state if rank == 0 else None)
    assert received["betas"] == (0.9, 0.99)
    gathered: Any = group.gather_tensors([received, rank, "x" * rank])
    assert [each[1:] for each in gathered] == [[each, "x" * each] for each in ranks]
    for found in (each[0]["state"][0] for each in gathered):
        assert found["step"] == 3
        assert torch.equal(found["exp_avg"], received["state"][0]["exp_avg"])

    group.rank_env.agent, group.settings = {}, {"lr": "1", "seed": str(rank)}  # type: ignore[misc]
    if group.world_size > 1:
        with pytest.raises(UserError, match=r"seed must be the same on all ranks, got 0 on rank 0 .* and 1 on rank 1"):
            check_settings(group)
        group.settings = {"lr": "1"} if rank < last else {"lr": "1", "more": "2"}  # type: ignore[misc]
        with pytest.raises(UserError, match=rf"more must be the same on all ranks, got nothing .* 2 on rank {last}"):
            check_settings(group)
    with pytest.raises(TypeError):
        group.gather(b"no JSON")
    for error in (UserError, PeerLost):
        with pytest.raises(error, match="rank 0 alone said no") as caught:
            group.on_rank0(mock.Mock(side_effect=error("rank 0 alone said no")))
        assert caught.value.printed_elsewhere is (rank > 0)
    assert group.on_rank0(lambda: {"of": group.rank}) == {"of": 0}


def test_values_arrive_as_they_were_sent_on_three_ranks(forks: Forks):
    forks.ends(world_size=3, preload="tests.group.test_group:exchange")


def test_one_rank_alone_gets_the_same_as_among_several():
    check(group_of(0, 1))


@pytest.mark.parametrize("view", [
    lambda x: x[:2], lambda x: x[::1000], lambda x: x.view(100, -1)[:, 3], lambda x: {"a": [x[5:6], (x[7:9].t(),)]},
    lambda x: nn.Parameter(x[:3]), lambda x: nn.Linear(2, 2).state_dict() | {"part": x[:1]},
])
def test_view_of_a_tensor_travels_without_the_memory_behind_it(view: Any) -> None:
    value = view(torch.arange(100_000.0))
    (found,) = group_of(0, 1).gather_tensors(value)
    assert [type(each) for each in tree_leaves(found)] == [type(each) for each in tree_leaves(value)]
    for here, there in zip(tree_leaves(value), tree_leaves(found), strict=True):
        assert torch.equal(here, there)
        assert here.requires_grad == there.requires_grad
    assert len(_packed(value)) < 5000 + 4 * sum(each.numel() for each in tree_leaves(value))


def test_tensors_that_share_memory_and_versions_of_modules_arrive_as_they_are() -> None:
    state = nn.BatchNorm1d(2).state_dict()
    state["same"] = state["running_mean"]
    (found,) = group_of(0, 1).gather_tensors(state)
    assert found["same"] is found["running_mean"]
    assert found._metadata == state._metadata


@pytest.mark.parametrize("write", [lambda value: pickle.dumps(value, protocol=2), _packed])
def test_data_received_instead_of_tensors_is_not_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Any):
    monkeypatch.chdir(tmp_path)
    sent = write(Evil(tmp_path / "ran"))
    group = group_of(0, 1)
    monkeypatch.setattr(group, "broadcast_bytes", lambda data, source=0: sent)
    monkeypatch.setattr(group, "gather_bytes", lambda data: [sent])
    for receive in (group.broadcast_tensors, group.gather_tensors):
        with pytest.raises(pickle.UnpicklingError, match=r"mkdir|Weights only load failed"):
            receive(None)
    assert not list(tmp_path.iterdir())
