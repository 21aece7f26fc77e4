"""Tracked objects: a copy has the state of the last commit, and errors name the path of a value. tests/job/test_loop.py
tests that a restored loop continues with the same bits."""

import contextlib
import random
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from rankup.errors import UserError
from rankup.loop.tracked import Tracked
from rankup.loop.trained import watch_optimizers
from rankup.state.saver import check_devices


def parts() -> tuple[dict[str, Any], torch.optim.Optimizer]:
    model = nn.BatchNorm1d(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {"model": model, "schedule": torch.optim.lr_scheduler.StepLR(optimizer, 1)}, optimizer


@pytest.mark.parametrize("buffer", [True, False])
def test_tracked_state_is_that_of_the_last_commit(buffer: bool) -> None:
    (items, optimizer), tracked = parts(), Tracked()
    tracked.add(items | {"optimizer": optimizer})
    items["model"](torch.randn(5, 2))
    tracked.commit()
    before = tracked.fingerprint()
    if buffer:
        items["model"](torch.randn(5, 2))
        items["model"].running_var = torch.zeros(2)  # replaces the tensor
    else:
        optimizer.step()
        items["schedule"].step()
    assert tracked.fingerprint() == before
    tracked.commit()
    assert tracked.fingerprint() != before


@pytest.mark.parametrize(("item", "why"), [
    (None, "track: bad must be an object to keep, got None. Leave it out on all ranks"),
    (1.5, "track: bad must have state_dict and load_state_dict.*Put it into a dict"),
    ({"a": [1, {2}]}, r"state: bad/a\.1 must be .*got builtins\.set"),
    (torch.eye(2).to_sparse(), "state: bad must be a dense tensor"),
    (torch.Generator(), r"state: bad must be .*got torch\._C\.Generator\. Draw from torch"),
    ({"rng": random.Random(0)}, r"state: bad/rng must be .*got random\.Random\. Draw from torch"),
    ([torch.optim.SGD([torch.zeros(1)])], r"state: bad/0 must be .*SGD\. Give job\.track each such object"),
])
def test_value_that_cannot_be_kept_is_refused_by_its_path(item: Any, why: str) -> None:
    with pytest.raises(UserError, match=why):
        Tracked().add({"bad": item})


def test_change_between_two_steps_is_noticed() -> None:
    (items, optimizer), tracked = parts(), Tracked()
    tracked.add(items)
    tracked.check_unchanged()
    optimizer.step()
    items["schedule"].step()
    with pytest.raises(UserError, match=r"schedule must change only inside job\.step"):
        tracked.check_unchanged()
    tracked.check_unchanged(after_epoch=True)
    tracked.commit()
    with torch.no_grad():
        items["model"].weight.add_(1)
    with pytest.raises(UserError, match=r"model must change only inside job\.step"):
        tracked.check_unchanged()
    tracked = Tracked()
    tracked.add({"ema": (ema := {"weight": torch.zeros(2)})})
    tracked.check_unchanged()
    ema["weight"] = 0.9 * ema["weight"] + 0.1  # a new tensor, as most such code makes
    with pytest.raises(UserError, match=r"ema must change only inside job\.step"):
        tracked.check_unchanged()


def test_untracked_optimizer_that_steps_is_named_once() -> None:
    model, said = nn.Linear(2, 1), list[str]()
    tracked, holding = Tracked(), Tracked()
    tracked.add({"model": model, "adam": (adam := torch.optim.Adam(model.parameters()))})
    holding.add({"trainer": SimpleNamespace(state_dict=dict, load_state_dict=print)})  # it may contain all optimizers
    watch_optimizers(holding, said.append)
    watch_optimizers(tracked, said.append)
    plain = torch.optim.SGD(nn.Linear(2, 1).parameters())  # it has no state
    other = torch.optim.AdamW(nn.Linear(2, 1).parameters())
    second = torch.optim.RMSprop([model.bias])  # a tracked one trains this parameter too
    for optimizer in (adam, plain, other, other, second):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    resets = ["SGD steps and is not tracked: a restart resets its parameters",
              "AdamW steps and is not tracked: a restart resets its state and its parameters",
              "RMSprop steps and is not tracked: a restart resets its state"]
    assert said == [f"track: {each}, and the weights will differ" for each in resets]
    tracked._checks = 0  # as after the first steps
    (weight := nn.Parameter(torch.ones(1))).grad = torch.ones(1)
    torch.optim.AdamW([weight]).step()
    assert len(said) == 3


@pytest.mark.parametrize(("own", "device", "fits"), [
    ("cuda:0", "cuda:1", False), ("cuda:1", "cuda", False), ("cpu", "cuda:0", False),
    ("cuda:1", "cuda:1", True), ("cuda:1", "cpu", True), ("mps", "mps:0", True),
])
def test_state_on_another_device_than_the_ranks_is_refused(own: str, device: str, fits: bool) -> None:
    """rankup waits for the work of one device only, so a copy could hold parts of two steps."""
    where = {"net/0.bias": "cpu", "net/1.bias": device}
    found: Any = {path: SimpleNamespace(device=torch.device(each)) for path, each in where.items()}
    refused = pytest.raises(UserError, match=f"net/1.bias must be on this rank's device, {own}, .* got {device}")
    with contextlib.nullcontext() if fits else refused:
        check_devices(found, torch.device(own))


@pytest.mark.gpu
def test_copy_before_a_repeated_change_takes_no_memory_of_the_gpu() -> None:
    from rankup.loop.filling import copied

    state = {"weights": torch.ones(1000, device="cuda"), "best": {"accuracy": 0.5}}
    before = torch.cuda.memory_allocated()
    found = copied(state, torch.device("cuda", 0))
    assert torch.cuda.memory_allocated() == before
    state["best"]["accuracy"] = 0.9  # type: ignore[index]
    assert (found["weights"].device.type, found["best"]["accuracy"]) == ("cpu", 0.5)


@pytest.mark.gpu
@pytest.mark.parametrize("own", ["cuda:0", "cpu"])
def test_tracked_module_on_a_gpu_needs_a_rank_with_that_gpu(own: str) -> None:
    with contextlib.nullcontext() if own == "cuda:0" else pytest.raises(UserError, match="net/bias must be on"):
        Tracked(device=torch.device(own)).add({"net": nn.Linear(1, 1).cuda()})


@pytest.mark.parametrize("how", ["module", "state_dict", "list", "tensor"])
def test_trained_parameters_may_be_tracked_in_any_form(how: str) -> None:
    model, tracked, said = nn.Linear(2, 1, bias=False), Tracked(), list[str]()
    ways = {"module": nn.Sequential(model), "state_dict": model.state_dict(), "list": [[model.weight]],
            "tensor": model.weight}
    tracked.add({"net": ways[how], "sgd": (sgd := torch.optim.SGD(model.parameters()))})
    watch_optimizers(tracked, said.append)
    model(torch.ones(2)).sum().backward()
    sgd.step()
    sgd.add_param_group({"params": (more := nn.Parameter(torch.ones(1)))})
    more.grad = torch.ones(1)
    with pytest.raises(UserError, match="sgd must train only parameters of tracked objects, got 1 of 2 tensors"):
        sgd.step()
    tracked._checks = 0  # torch keeps the hook as long as the test's error keeps `tracked`
    assert not said


@pytest.mark.parametrize(("kept", "enabled"), [(True, True), (False, True), (False, False)])
def test_scaler_in_use_that_is_not_tracked_is_named_once(kept: bool, enabled: bool) -> None:
    model, said, tracked = nn.Linear(2, 1), list[str](), Tracked()
    scaler = torch.amp.GradScaler("cpu", enabled=enabled)
    sgd = torch.optim.SGD(model.parameters())
    tracked.add({"model": model, "sgd": sgd} | ({"scaler": scaler} if kept else {}))
    watch_optimizers(tracked, said.append)
    for _ in range(2):
        scaler.scale(model(torch.ones(2)).sum()).backward()
        scaler.step(sgd)
        scaler.update()
    why = "GradScaler works and is not tracked: a restart resets its scale, and the weights will differ"
    assert said == ([] if kept or not enabled else [f"track: {why}"])


def test_optimizer_with_other_groups_than_the_copy_is_refused_in_words() -> None:
    model, tracked = nn.Linear(2, 1), Tracked()
    tracked.add({"adam": torch.optim.Adam([model.weight])})
    state = deepcopy(tracked.state())
    state["adam"]["param_groups"].append({**state["adam"]["param_groups"][0], "params": [1]})
    with pytest.raises(ValueError, match="adam: it has 1 groups of parameters, and the copy has 2"):
        tracked.load(state)


def test_optimizer_may_have_any_names_of_settings() -> None:
    class Line(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"most_steps": 3})

    Tracked().add({"line": Line(nn.Linear(2, 1).parameters())})
