"""Tracked state is restored with its bits and types. Values that can't be kept are named; damage loads nothing."""

import gc
import math
import random
import tempfile
import warnings
import weakref
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from rankup.errors import UserError
from rankup.state.copies import MANIFEST
from rankup.state.place import Folder
from rankup.state.reading import CopyFiles
from rankup.state.tree import decode, encode, files_of
from tests.rigs.checkpoints import damage, load_newest, save


def back(**tracked: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Folder(Path(folder)).write(1, files_of(*encode(tracked)))
        return CopyFiles({file.name: bytearray(file.read_bytes()) for file in path.iterdir()}).read_all()


def test_plain_values_keep_their_types() -> None:
    value = {
        "tuple": (1, (2.5, None)), "list": [True, 1, 1.0], 3: "an int key", (1, 2): "a tuple", None: "none",
        "inf": [math.inf, -math.inf], "bytes": b"\0\xff", "$": "tag", "nested": {"$": {"$": 1}}, "text": "ü\n",
        "Counter": Counter([4, 4]), "ordered": OrderedDict(b=1, a=2), "small": 5e-324,
        "negative zero": -0.0, "large": 2**70,
    }
    found = back(value=value)["value"]
    assert repr(found) == repr(value)
    assert math.isnan(back(value={"nan": math.nan})["value"]["nan"])


@pytest.mark.parametrize("dtype", [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.int8, torch.bool,
    torch.complex64, torch.float8_e4m3fn,
], ids=str)
def test_tensors_keep_their_bits(dtype: torch.dtype) -> None:
    bits = torch.randint(0, 2 if dtype == torch.bool else 256, (24 * dtype.itemsize,), dtype=torch.uint8)
    value = bits.view(dtype).reshape(2, 3, 4)
    found = back(value={"whole": value, "scalar": value[0, 0, 0], "empty": value[:0], "part": value[:, ::2]})["value"]
    assert found["whole"].dtype == dtype
    assert torch.equal(found["whole"].reshape(-1).view(torch.uint8), bits)
    assert found["scalar"].shape == ()
    assert found["empty"].shape == (0, 3, 4)
    assert torch.equal(found["part"].view(torch.uint8), value[:, ::2].contiguous().view(torch.uint8))


def test_shared_tensors_stay_shared_and_layouts_stay() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(3, 4, 3))
    model = model.to(memory_format=torch.channels_last)
    model[2].weight = model[0].weight  # type: ignore[union-attr, assignment]
    found = back(model=model.state_dict(), turned=[torch.arange(6).view(2, 3).t()])
    assert found["model"]["0.weight"] is found["model"]["2.weight"]
    assert found["model"]["0.weight"].stride() == model[0].weight.stride()  # type: ignore[union-attr, operator]
    assert found["turned"][0].stride() == (1, 3)
    assert found["model"]._metadata == model.state_dict()._metadata
    model.load_state_dict(found["model"])


def test_views_of_one_memory_keep_their_values() -> None:
    memory = torch.arange(9.0)
    views = [memory, memory.view(3, 3), memory.view(3, 3).t(), memory[:3], memory[3:6], memory[:3].view(torch.int32)]
    views += [memory[::2][:1], turning := torch.tensor([1 + 2j, 3 - 4j]), turning.conj()]
    views += [turning.imag, turning.conj().imag]
    found = back(views=views, empty=[memory[:0], memory[:0]])
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(found["views"], views, strict=True))
    assert found["empty"][0] is not found["empty"][1]  # such as parts of two tensors of which a rank holds nothing


def test_tensors_are_freed_once_they_are_written_or_read() -> None:
    """Garbage collection may come much later. Until then a gathered state would be in memory twice."""
    gc.disable()
    try:
        tree, tensors = encode({"model": {"weight": torch.ones(3)}})
        kept = weakref.ref(decode(tree, tensors.__getitem__)["model"]["weight"])
        del tensors
        assert kept() is None
    finally:
        gc.enable()


def test_similar_paths_are_kept_apart() -> None:
    value = {"a": {"b": torch.zeros(1)}, "a.b": torch.ones(1), "__metadata__": torch.full((1,), 2.0)}
    found = back(value=value)["value"]
    assert [found["a"]["b"].item(), found["a.b"].item(), found["__metadata__"].item()] == [0, 1, 2]


@pytest.mark.parametrize("make", [
    lambda p: torch.optim.lr_scheduler.MultiStepLR(p, [2, 4, 4]),
    lambda p: torch.optim.lr_scheduler.ReduceLROnPlateau(p),
    lambda p: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(p, 3),
], ids=["MultiStepLR", "ReduceLROnPlateau", "CosineAnnealingWarmRestarts"])
@pytest.mark.parametrize("optimizer", [
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1)),
    lambda p: torch.optim.LBFGS(p), lambda p: torch.optim.Adafactor(p),
], ids=["SGD", "AdamW", "LBFGS", "Adafactor"])
def test_torchs_optimizers_and_schedulers_continue_exactly(optimizer: Any, make: Any) -> None:
    def build() -> list[Any]:
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        steps = optimizer(model.parameters())
        return [model, steps, make(steps), torch.optim.swa_utils.AveragedModel(model)]

    def train(model: Any, steps: Any, schedule: Any, average: Any) -> None:
        def loss() -> torch.Tensor:
            steps.zero_grad()
            value: torch.Tensor = model(torch.ones(2, 4)).square().sum()
            value.backward()  # type: ignore[no-untyped-call]
            return value

        for _ in range(3):
            steps.step(loss)
            schedule.step(*[1.0] * isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau))
            average.update_parameters(model)

    whole, resumed = build(), build()
    train(*whole)
    for part, state in zip(resumed, back(parts=[part.state_dict() for part in whole])["parts"], strict=True):
        part.load_state_dict(state)
    for each in (whole, resumed):
        train(*each)
    for index in (0, 3):
        pairs = zip(whole[index].parameters(), resumed[index].parameters(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
    assert repr(whole[2].state_dict()) == repr(resumed[2].state_dict())


def ragged() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])


def nested(value: Any, levels: int) -> Any:
    for _ in range(levels):
        value = {"a": value}
    return value


@pytest.mark.parametrize(("value", "message"), [
    ({"a": [1, object()]}, "state: value/a.1 must be .* got builtins.object"),
    ({"s": torch.eye(2).to_sparse()}, "state: value/s must be .* got a tensor of the kind Tensor, torch.sparse_coo"),
    ({"c": torch.ones(2, dtype=torch.complex128)}, "state: value/c must be .* got a tensor of torch.complex128"),
    ({"m": torch.ones(2, device="meta")}, "state: value/m must be .* on meta"),
    ({"e": torch.ones(1).expand(3)}, r"state: value/e must be .* whose elements share memory.* \.clone\(\)"),
    ({"n": ragged()}, "state: value/n must be .* got a tensor of the kind"),
    (nested({}, 2000), "state: value must be nested less deeply, got dicts or lists that hold themselves"),
    ([cycle := list[Any](), cycle.append(cycle)], "state: value must be nested less deeply"),
])
def test_value_that_cannot_be_kept_is_named_by_its_path(value: Any, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        encode({"value": value})
    assert "\n" not in str(caught.value)


def test_file_equals_safetensors_own_and_depends_on_no_layout(tmp_path: Path) -> None:
    from safetensors.torch import save as reference

    given = {"b": torch.randn(3, 2), "a": torch.randn(5, dtype=torch.float64), "n": torch.tensor(3, dtype=torch.int8)}
    files = files_of(*encode({"model": given}))
    content = b"".join(files["model.safetensors"])  # type: ignore[arg-type]
    assert content == reference(given, {"format": "pt"})
    assert len(files["model.safetensors"]) == len(content)
    turned = {name: tensor.t().contiguous().t() if tensor.ndim == 2 else tensor for name, tensor in given.items()}
    assert b"".join(files_of(*encode({"model": turned}))["model.safetensors"]) == content  # type: ignore[arg-type]
    (tmp_path / "model.safetensors").write_bytes(content)
    assert load_file(tmp_path / "model.safetensors").keys() == given.keys()


def test_thousand_damaged_copies_load_nothing_wrong(tmp_path: Path) -> None:
    """tests/promises/test_fuzz.py has damaged copies whose digests are right."""
    draw = random.Random(0)
    save(tmp_path, 10)
    good = {file.name: file.read_bytes() for file in save(tmp_path, 20).iterdir()}
    path, counts = tmp_path / "step-00000020", Counter[int]()
    for number in range(1000):
        for name, content in good.items():
            (path / name).write_bytes(content)
        name = draw.choice(sorted(good))
        changed, said = damage(path / name, draw), list[str]()
        found = load_newest(tmp_path, said.append)
        where = f"{number}: {name}: {said}"
        assert found is not None, where
        assert found.tracked["model"]["weight"].eq(found.step).all(), where
        if found.step == 10:
            assert len(said) == 1, where
            assert "\n" not in said[0], where
        else:  # the manifest's text around digests, such as blanks, may differ
            assert not changed or name == MANIFEST, where
        counts[found.step] += 1
    assert counts[10] > 800, counts
