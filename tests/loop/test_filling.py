"""A restored item is the same object with the same types, in whatever form the script and its optimizers hold it."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

from rankup.loop.filling import gathered
from rankup.loop.tracked import Tracked
from rankup.state.tree import decode, encode


def saved(tracked: Tracked) -> dict[str, Any]:
    """Return what a resumed attempt reads from a copy: new tensors on the CPU."""
    nodes, tensors = encode(tracked.state() | tracked.kinds())
    stored = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    return dict(decode(nodes, stored.__getitem__))


def tracking(**items: Any) -> Tracked:
    tracked = Tracked()
    tracked.add(items)
    return tracked


def test_tensors_that_an_optimizer_holds_are_filled_at_any_depth() -> None:
    def build() -> dict[str, Any]:
        prompts = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
        return {"scale": {"log_t": nn.Parameter(torch.zeros(()))}, "prompts": prompts, "by": (torch.zeros(1),)}

    first, second = build(), build()
    for parameter in (first["scale"]["log_t"], *first["prompts"], first["by"][0]):
        with torch.no_grad():
            parameter += 5
    inner, held = second["scale"], [second["scale"]["log_t"], *second["prompts"], second["by"][0]]
    tracking(extra=second).load(saved(tracking(extra=first)))
    now = [second["scale"]["log_t"], *second["prompts"], second["by"][0]]
    assert all(one is other and one.eq(5).all() for one, other in zip(now, held, strict=True))
    assert second["scale"] is inner
    assert [each.requires_grad for each in held] == [True, True, True, False]


@pytest.mark.parametrize("from_copy", [False, True])
def test_tensor_that_the_loop_has_put_into_a_dict_keeps_its_kind(from_copy: bool) -> None:
    first: dict[str, Any] = {"shape": torch.zeros(2), "type": torch.zeros(2)}
    second: dict[str, Any] = deepcopy(first)
    tracked = tracking(extra=first)
    first |= {"shape": torch.ones(3), "type": torch.ones(2, dtype=torch.float64), "plain": torch.ones(1)}
    first |= {"trained": nn.Parameter(torch.ones(1)), "leaf": torch.ones(1, requires_grad=True), "frozen": 1.5}
    first["frozen"] = nn.Parameter(torch.ones(1), requires_grad=False)
    # Without a copy as `job.change` does, to undo a repeated change
    tracking(extra=second).load(saved(tracked) if from_copy else deepcopy(tracked.state()))
    assert second.keys() == first.keys()
    for name, value in first.items():
        found = second[name]
        assert torch.equal(found, value)
        assert (found.dtype, found.requires_grad, found.is_leaf) == (value.dtype, value.requires_grad, True)
    assert isinstance(second["trained"], nn.Parameter)


def test_names_share_a_tensor_after_a_resume_if_they_did_in_the_copy() -> None:
    def build() -> tuple[nn.Module, dict[str, Any]]:
        model = nn.Linear(2, 1, bias=False)
        return model, {"best": model.state_dict(), "weight": model.weight, "last": torch.zeros(1, 2)}

    model, extra = build()
    tracked = tracking(extra=extra, model=model)
    extra["best"] = deepcopy(model.state_dict())  # the weights of an earlier epoch
    extra["last"] = model.weight.detach()
    with torch.no_grad():
        model.weight += 1
    again, filled = build()
    tracking(extra=filled, model=again).load(saved(tracked))
    assert torch.equal(again.weight, model.weight)
    assert torch.equal(filled["best"]["weight"], extra["best"]["weight"])
    assert filled["weight"] is again.weight
    with torch.no_grad():
        again.weight += 1
    assert torch.equal(filled["last"], again.weight)
    assert not torch.equal(filled["best"]["weight"], again.weight)


def test_one_list_under_two_names_stays_one_unless_the_copy_has_two() -> None:
    same, other = [1], [1]
    tracked = tracking(extra=(first := {"a": same, "b": same}))
    filled = {"a": other, "b": other}
    tracking(extra=filled).load(saved(tracked))
    assert filled["a"] is filled["b"] is other
    first["b"] = [2]
    tracking(extra=filled).load(saved(tracked))
    assert filled == {"a": [1], "b": [2]}


@pytest.mark.parametrize(("had", "has", "why"), [
    ({"t": [nn.Parameter(torch.zeros(2))]}, {"t": [nn.Parameter(torch.zeros(3))]}, "x: t.0 is a torch.float32"),
    ({"t": nn.Parameter(torch.zeros(2))}, {"t": nn.Parameter(torch.zeros(2).double())}, "x: t is a torch.float32"),
    (torch.zeros(1), torch.zeros(3), r"of shape \(1,\) there, a torch.float32 of shape \(3,\) here"),
    (torch.zeros(1), torch.zeros(1).half(), "torch.float32 of shape .* there, a torch.float16"),
    ([1], {"a": 1}, "a list there, a dict here"),
    (nn.Linear(1, 1), nn.Linear(1, 1).bfloat16(), "x: weight is a torch.float32 .* there, a torch.bfloat16 .* here"),
])
def test_value_of_another_shape_or_type_is_refused(had: Any, has: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        tracking(x=has).load(saved(tracking(x=had)))


def test_counter_is_gathered_as_it_is() -> None:
    schedule = torch.optim.lr_scheduler.MultiStepLR(torch.optim.SGD([nn.Parameter(torch.ones(1))]), [2, 4, 4])
    assert gathered(schedule.state_dict()) == schedule.state_dict()


class Odd(torch.optim.SGD):
    """An optimizer with a state of all kinds, whose parameter is in bfloat16."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = {
                    "master": parameter.detach().float() + 1e-3, "step": torch.tensor(2**24 + 1, dtype=torch.float64),
                    "packed": torch.ones(3, dtype=torch.uint8), "complex": torch.ones(2, dtype=torch.complex64) * 1j,
                    "mode": "slow", "lists": [torch.full((2,), 1 + 1e-3), (1, {"deep": torch.tensor([True])})],
                }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex64, torch.float32])
def test_optimizer_state_keeps_the_types_that_torch_would_cast(dtype: torch.dtype) -> None:
    first, second = (Odd([nn.Parameter(torch.ones(4, dtype=dtype))], lr=torch.tensor(0.1)) for _ in range(2))
    first.step()
    second.step()
    tracked = tracking(optimizer=second)
    tracked.load(saved(tracking(optimizer=first)))
    assert repr(second.state_dict()) == repr(first.state_dict())
    tracked.load(tracked.state())
    assert repr(second.state_dict()) == repr(first.state_dict())


@pytest.mark.parametrize("make", [
    lambda p: torch.optim.NAdam(p), lambda p: torch.optim.LBFGS(p),
    lambda p: torch.optim.Adam(p, fused=True), lambda p: torch.optim.Rprop(p), lambda p: torch.optim.ASGD(p),
], ids=["NAdam", "LBFGS", "fused", "Rprop", "ASGD"])
def test_optimizer_of_low_precision_continues_exactly(make: Any) -> None:
    def train(parameter: nn.Parameter, optimizer: Any) -> None:
        for _ in range(3):
            def loss() -> torch.Tensor:
                optimizer.zero_grad()
                (value := (parameter - 2).square().sum()).backward()
                return value

            optimizer.step(loss)

    def build() -> tuple[nn.Parameter, Any]:
        parameter = nn.Parameter(torch.arange(8.0).bfloat16())
        return parameter, make([parameter])

    (one, whole), (two, resumed) = build(), build()
    train(one, whole)
    tracked, other = (tracking(t=parameter.data, optimizer=o) for parameter, o in ((one, whole), (two, resumed)))
    other.load(saved(tracked))
    train(one, whole)
    train(two, resumed)
    assert torch.equal(one, two)
    assert repr(whole.state_dict()) == repr(resumed.state_dict())


def test_optimizer_that_packs_its_own_state_restores_it_by_itself() -> None:
    class Packed(torch.optim.SGD):
        def state_dict(self) -> Any:
            state = super().state_dict()
            return {**state, "state": {0: {"momentum_buffer": state["state"][0]["momentum_buffer"].double()}}}

    parameter = nn.Parameter(torch.ones(2))
    optimizer = Packed([parameter], momentum=0.9)
    parameter.grad = torch.ones(2)
    optimizer.step()
    tracked = tracking(optimizer=optimizer)
    tracked.load(saved(tracked))
    assert optimizer.state[parameter]["momentum_buffer"].dtype == torch.float32


class Viewing(torch.optim.SGD):
    """An optimizer that keeps slices of buffers: in its options, as Muon does, and in a state that its first step
    makes, as optimizers do that work on all parameters at once."""

    def __init__(self, parameters: Any) -> None:
        buffer = torch.zeros(2, 4)
        super().__init__([{"params": [*parameters], "slices": [*buffer], "buffer": buffer}], lr=torch.tensor(0.1))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        (group,) = self.param_groups
        for parameter in group["params"]:
            held = self.state[parameter]
            if not held:
                held["momentum"] = torch.zeros(3, 4, dtype=torch.float64).t()
                held["row"] = held["momentum"][2]
            group["buffer"][0] += parameter.grad
            held["momentum"] += group["slices"][0][:, None]
            parameter.sub_(held["row"].mean(), alpha=0.1)


@pytest.mark.parametrize("from_copy", [True, False])
def test_optimizer_whose_tensors_are_views_of_others_continues_exactly(from_copy: bool) -> None:
    def build() -> tuple[nn.Parameter, Any]:
        parameter = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        return parameter, Viewing([parameter])

    def train(parameter: nn.Parameter, optimizer: Any) -> None:
        for number in range(3):
            parameter.grad = torch.full_like(parameter, number)
            optimizer.step()

    (one, whole), (two, resumed) = build(), build()
    train(one, whole)
    tracked, other = (tracking(t=parameter.data, optimizer=o) for parameter, o in ((one, whole), (two, resumed)))
    other.load(saved(tracked) if from_copy else deepcopy(tracked.state()))
    other.load(other.state())
    train(one, whole)
    train(two, resumed)
    assert torch.equal(one, two)
    assert repr(whole.state_dict()) == repr(resumed.state_dict())


@pytest.mark.parametrize("begins", [{}, {"row": torch.zeros(2)}, {"row": torch.zeros(3)}])
def test_views_that_the_loop_has_put_into_a_dict_stay_views(begins: dict[str, torch.Tensor]) -> None:
    tracked = tracking(extra=(extra := {"held": (held := torch.zeros(2, 2))}))
    extra |= {"part": (memory := torch.arange(4.0))[1:3], "memory": memory, "row": held[1]}
    found: dict[str, Any] = {"held": torch.ones(2, 2)} | begins
    tracking(extra=found).load(saved(tracked))
    for each in (extra, found):
        each["memory"] += 5
        each["held"] += 3
    assert repr(found) == repr(extra)


def test_slice_of_a_tensor_that_has_another_memory_format_now_has_its_values() -> None:
    first, second = nn.Conv2d(2, 2, 3), nn.Conv2d(2, 2, 3).to(memory_format=torch.channels_last)
    found: dict[str, Any] = {}
    tracked = tracking(model=first, extra=(extra := {"row": None}))
    extra["row"] = first.weight.detach()[1]
    tracking(model=second, extra=found).load(saved(tracked))
    assert torch.equal(found["row"], first.weight[1])


def test_tensor_among_an_optimizers_options_keeps_only_its_own_memory() -> None:
    parameter = nn.Parameter(torch.zeros(1000))
    optimizer = torch.optim.Adam([parameter], lr=torch.tensor(0.1))
    parameter.grad = torch.ones(1000)
    optimizer.step()
    tracked = tracking(optimizer=optimizer)
    nodes, tensors = encode(tracked.state())
    file = torch.cat([each.flatten().view(torch.uint8) for each in tensors.values()])
    parts = file.split([each.nbytes for each in tensors.values()])
    pairs = zip(parts, tensors.items(), strict=True)
    of_file = {name: part.view(each.dtype).view(each.shape) for part, (name, each) in pairs}
    tracked.load(dict(decode(nodes, of_file.__getitem__)))
    assert optimizer.param_groups[0]["lr"].untyped_storage().nbytes() == 4


def test_buffer_of_the_last_commit_is_kept_under_all_its_names() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = self.b = nn.BatchNorm1d(2)
            self.register_buffer("mean", self.a.running_mean)

    model = Twice()
    tracked = tracking(model=model, norm=model.b, extra={"mean": model.a.running_mean, "all": [model.state_dict()]})
    before = tracked.fingerprint()
    model.a(torch.randn(8, 2) + 3)
    assert tracked.fingerprint() == before
    names = {name for name in encode(tracked.state())[1] if "running_mean" in name or name.endswith("mean")}
    assert len(names) == 1  # one tensor in the copy too
    tracked.commit()
    assert tracked.fingerprint() != before


def test_wrapper_that_is_registered_twice_is_in_no_name() -> None:
    plain, compiled = nn.Module(), nn.Module()
    plain.a = plain.b = nn.Linear(1, 1)
    compiled.a = compiled.b = torch.compile(nn.Linear(1, 1), backend="eager")
    state = saved(tracking(model=compiled))
    tracking(model=plain).load(state)
    assert torch.equal(plain.b.weight, compiled.a.weight)
