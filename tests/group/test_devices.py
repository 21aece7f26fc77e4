"""Which device a rank takes, on machines made up here."""

import types
from collections.abc import Callable

import pytest
import torch

from rankup.errors import LaunchError
from rankup.group.joining import pick_backend, pick_device

Machine = Callable[[str, int], None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """`machine("cuda", 4)`: four visible devices of that kind."""

    def make(kind: str, count: int) -> None:
        found = torch.device(kind) if count else None
        monkeypatch.setattr(torch, kind, types.SimpleNamespace(device_count=lambda: count))
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: found)
        monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)

    return make


def test_without_an_accelerator_the_cpu_is_taken(machine: Machine):
    machine("cuda", 0)
    assert pick_device(None, 3) == torch.device("cpu")


def test_each_local_rank_takes_the_device_of_its_number(machine: Machine):
    machine("cuda", 4)
    assert [pick_device(None, rank).index for rank in range(4)] == [0, 1, 2, 3]


def test_a_task_that_is_shown_one_device_takes_it(machine: Machine):
    # --gpus-per-task=1: local rank 3 of the node sees its device as number 0
    machine("cuda", 1)
    assert pick_device("cuda", 3) == torch.device("cuda", 0)


@pytest.mark.parametrize(("wanted", "rank", "count"), [(None, 2, 2), ("cuda", 5, 4), ("cuda:1", 0, 1)])
def test_more_ranks_than_devices_is_refused(machine: Machine, wanted: str, rank: int, count: int):
    machine("cuda", count)
    said = f"local rank {rank} must have a device of its own, got {count} visible cuda devices"
    with pytest.raises(LaunchError, match=said):
        pick_device(wanted, rank)


@pytest.mark.parametrize("wanted", ["cuda", "xpu:1", "no_such_kind"])
def test_a_device_that_is_not_there_is_refused(machine: Machine, wanted: str):
    machine("cuda", 0)
    with pytest.raises(LaunchError, match=f'device must be one this machine has, got "{wanted}"'):
        pick_device(wanted, 0)


@pytest.mark.parametrize(
    ("wanted", "device", "backend"),
    [(None, "cpu", "gloo"), (None, "cuda:0", "cpu:gloo,cuda:nccl"), ("gloo", "cuda:0", "gloo")],
)
def test_gloo_is_beside_the_devices_own_backend(wanted: str, device: str, backend: str):
    assert pick_backend(wanted, torch.device(device)) == backend
