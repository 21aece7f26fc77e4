"""Live objects as a copy keeps them: types, names without wrappers, the state of the last commit, errors by path."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from rankup.errors import UserError
from rankup.loop.tracked import Tracked
from rankup.state import tree


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def parts(wrap: Any = lambda net: net) -> dict[str, Any]:
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 5])  # keeps a Counter with numbers as keys
    return {
        "model": wrap(net), "ema": AveragedModel(net), "optimizer": optimizer, "schedule": schedule,
        "best": {"loss": float("inf"), "at": (1, 2)}, "seen": [3], "total": torch.zeros(2),
    }


def train(items: dict[str, Any], steps: int) -> None:
    for step in range(steps):
        torch.manual_seed(step)
        items["model"](torch.randn(5, 3)).sum().backward()
        items["optimizer"].step()
        items["optimizer"].zero_grad()
        items["schedule"].step()
        items["ema"].update_parameters(items["model"])
        items["best"]["loss"] = float(step)
        items["seen"].append(step)
        items["total"] += 1


def written(tracked: Tracked) -> dict[str, Any]:
    """As a copy gives it back."""
    files = tree.to_files(tracked.state())
    return tree.from_files({name: b"".join(each) if not isinstance(each, bytes) else each
                            for name, each in files.items()})


def test_restored_objects_go_on_as_the_ones_that_were_kept() -> None:
    first, second = parts(), parts(lambda net: torch.compile(nn.DataParallel(net), backend="eager"))
    kept, restored = Tracked(), Tracked()
    kept.add(first)
    train(first, 3)
    kept.commit()
    restored.add(second)
    restored.load(written(kept))
    assert restored.fingerprint() == kept.fingerprint()
    assert second["best"] == {"loss": 2.0, "at": (1, 2)}
    assert second["schedule"].milestones == Counter({2: 2, 5: 1})
    assert "body.0.weight" in restored.state()["model"]
    train(first, 2)
    second["model"] = second["model"]._orig_mod.module  # the same parameters without a compiler
    train(second, 2)
    for own, other in zip(first["model"].parameters(), second["model"].parameters(), strict=True):
        assert torch.equal(own, other)


def test_state_is_that_of_the_last_commit_whatever_changed_since() -> None:
    items, tracked = parts(), Tracked()
    tracked.add(items)
    train(items, 1)
    tracked.commit()
    before = tracked.fingerprint()
    items["model"](torch.randn(5, 3))  # the statistics of the batch norm
    items["schedule"].step()
    assert tracked.fingerprint() == before
    tracked.commit()
    assert tracked.fingerprint() != before


def test_buffer_that_a_forward_pass_puts_another_tensor_in_is_kept_too() -> None:
    model, tracked = nn.BatchNorm1d(2), Tracked()
    tracked.add({"model": model})
    model.running_mean = torch.tensor([3.0, 4.0])
    tracked.commit()
    model.running_mean = torch.zeros(2)
    assert tracked.state()["model"]["running_mean"].tolist() == [3.0, 4.0]


@pytest.mark.parametrize(("item", "why"), [
    (1.5, "track: bad must have state_dict and load_state_dict.*Put it into a dict"),
    ({"a": [1, {2}]}, r"state: bad/a\.1 must be .*got builtins\.set"),
    (torch.eye(2).to_sparse(), "state: bad must be a dense tensor"),
])
def test_what_can_not_be_kept_fails_at_once_by_its_path(item: Any, why: str) -> None:
    with pytest.raises(UserError, match=why):
        Tracked().add({"bad": item})


def test_copy_that_does_not_fit_is_one_line() -> None:
    tracked, other = Tracked(), Tracked()
    tracked.add({"model": nn.Linear(2, 2)})
    other.add({"model": nn.Linear(3, 2)})
    with pytest.raises(ValueError, match=r"^model: .*size mismatch") as refused:
        other.load(written(tracked))
    assert "\n" not in str(refused.value)


def test_change_between_two_steps_is_noticed() -> None:
    items, tracked = parts(), Tracked()
    tracked.add(items)
    train(items, 1)
    tracked.commit()
    tracked.check_unchanged()
    items["schedule"].step()
    with pytest.raises(UserError, match=r"schedule must change inside job\.step alone"):
        tracked.check_unchanged()
    tracked.check_unchanged(after_epoch=True)
    tracked.commit()
    with torch.no_grad():
        next(items["ema"].parameters()).add_(1)
    with pytest.raises(UserError, match=r"ema must change inside job\.step alone"):
        tracked.check_unchanged()
