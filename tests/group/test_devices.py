"""Which device a rank takes, on simulated machines."""

import pytest
import torch

from rankup.errors import UserError
from rankup.group.joining import pick_backend, pick_device

OWN = "local rank {} must have a device of its own, got {} visible cuda devices"
MISSING = 'device must be one this machine has, got "{}"'


@pytest.mark.parametrize(("count", "wanted", "rank", "taken"), [
    (0, None, 3, "cpu"),
    (4, None, 0, "cuda:0"),
    (4, None, 3, "cuda:3"),
    (1, "cuda", 3, "cuda:0"),  # --gpus-per-task=1: local rank 3 of the node sees its device as number 0
    (2, None, 2, OWN.format(2, 2)),
    (4, "cuda", 5, OWN.format(5, 4)),
    (1, "cuda:1", 0, OWN.format(0, 1)),
    (0, "cuda", 0, MISSING.format("cuda")),
    (0, "no_such_kind", 0, MISSING.format("no_such_kind")),
])
def test_each_local_rank_takes_the_device_with_its_number(
    monkeypatch: pytest.MonkeyPatch, count: int, wanted: str | None, rank: int, taken: str
) -> None:
    """`count`: the number of visible devices."""
    found = torch.device("cuda") if count else None
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: found)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)
    if " " not in taken:
        assert str(pick_device(wanted, rank)) == taken
        return
    with pytest.raises(UserError, match=taken):
        pick_device(wanted, rank)


@pytest.mark.parametrize(("device", "backend"), [("cpu", "gloo"), ("cuda:0", "cpu:gloo,cuda:nccl")])
def test_gloo_is_used_beside_the_devices_own_backend(device: str, backend: str):
    assert pick_backend(torch.device(device)) == backend
