"""Exported folders load with the libraries that define their formats, and a run can begin with their weights."""

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn

from rankup import cli
from rankup.errors import UserError
from rankup.loop.weights import load_into
from rankup.state.copies import STATE, to_json
from rankup.state.formats import DCP_METADATA, INDEX, export, export_folder
from rankup.state.place import Folder
from rankup.state.reading import Copy, read
from rankup.state.tree import encode, files_of
from tests.rigs.checkpoints import save, training_state
from tests.rigs.small_filesystems import small_disk
from tests.rigs.strangers import Evil

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def trained(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model with channels_last weights, two names of one tensor and buffers, and its optimizer."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(3, 4, 2), nn.BatchNorm2d(4), nn.Linear(3, 3), nn.Linear(3, 3)).to(
        memory_format=torch.channels_last)
    model[3].weight = model[2].weight
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 3, 4, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


class Held:
    """A checkpoint with these items."""

    step = 7

    def __init__(self, **items: Any) -> None:
        self.tracked = items


def same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


@pytest.mark.parametrize("shard_bytes", [10**9, 150])
def test_folder_of_safetensors_is_read_by_safetensors_and_by_a_new_run(tmp_path: Path, shard_bytes: int) -> None:
    model, _ = trained()
    (tmp_path / "config.json").write_text("{}")  # of the model, beside which the weights belong
    copy: Any = Held(model=model.state_dict() | {"_extra_state": 3}, rankup_kinds={})
    said = export_folder(copy, tmp_path, form="huggingface", shard_bytes=shard_bytes)
    assert said.endswith("not written, because they are no tensors: _extra_state")
    files = sorted(tmp_path.glob("*.safetensors"))
    held = {name: tensor for file in files for name, tensor in load_file(file).items()}
    same(held, model.state_dict())
    assert (tmp_path / INDEX).exists() == (len(files) > 1) == (shard_bytes == 150)
    if len(files) > 1:
        index = json.loads((tmp_path / INDEX).read_text())
        assert index["metadata"]["total_size"] == sum(each.nbytes for each in held.values())
        assert all(name in load_file(tmp_path / file) for name, file in index["weight_map"].items())
        assert [file.name for file in files] == [f"model-{n:05d}-of-{len(files):05d}.safetensors"
                                                 for n in range(1, len(files) + 1)]
    new, _ = trained(1)
    load_into(new, tmp_path, print)
    same(new.state_dict(), model.state_dict())
    with pytest.raises(UserError, match=r"FILE must be a folder without weights, got .* which holds model"):
        export_folder(copy, tmp_path, form="huggingface")


def test_transformers_load_a_model_from_exported_shards(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=30, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8
    )
    model = transformers.BertForMaskedLM(config)
    config.save_pretrained(tmp_path)
    copy: Any = Held(model=model.state_dict())
    export_folder(copy, tmp_path, form="huggingface", shard_bytes=2000)
    assert (tmp_path / INDEX).exists()
    same(transformers.BertForMaskedLM.from_pretrained(tmp_path).state_dict(), model.state_dict())


@pytest.mark.parametrize("item", ["", "model"])
def test_folder_of_torch_distributed_checkpoint_is_read_by_it_and_by_a_new_run(tmp_path: Path, item: str) -> None:
    (model, optimizer), (new, other) = trained(), trained(1)
    copy: Any = Held(model=model.state_dict(), optimizer=optimizer.state_dict(), count={"n": 3}, rankup_kinds={})
    export_folder(copy, tmp_path / "dcp", form="dcp", item=item)
    state: dict[str, Any] = {"model": new.state_dict(), "optimizer": other.state_dict(), "count": {"n": 0}}
    dcp.load(state["model"] if item else state, checkpoint_id=tmp_path / "dcp")
    same(state["model"], model.state_dict())
    if not item:
        other.load_state_dict(state["optimizer"])
        for one, two in zip(optimizer.state.values(), other.state.values(), strict=True):
            same(one, two)
        assert state["count"] == {"n": 3}
    newest, _ = trained(2)
    load_into(newest, tmp_path / "dcp", print)
    same(newest.state_dict(), model.state_dict())
    with pytest.raises(UserError, match=r"FILE must be empty, got .* which holds"):
        export_folder(copy, tmp_path / "dcp", form="dcp")


def test_metadata_of_a_stranger_is_not_executed_and_names_no_file_outside(tmp_path: Path) -> None:
    model, _ = trained()
    copy: Any = Held(model=model.state_dict())
    export_folder(copy, tmp_path / "dcp", form="dcp")
    metadata = pickle.loads((tmp_path / "dcp" / DCP_METADATA).read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = "../__0_0.distcp"
    shutil.copy(tmp_path / "dcp" / "__0_0.distcp", tmp_path)
    for evil, why in ((metadata, "which is not in the folder"), (Evil(tmp_path / "ran"), "posix.mkdir")):
        (tmp_path / "dcp" / DCP_METADATA).write_bytes(pickle.dumps(evil))
        with pytest.raises(UserError, match=f"dcp must hold files of torch.distributed.checkpoint.*{why}"):
            load_into(model, tmp_path / "dcp", print)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("damage", [Path.unlink, lambda file: os.truncate(file, 9), os.mkfifo, os.mkdir],
                         ids=["absent", "cut", "pipe", "folder"])
def test_folder_of_torch_distributed_checkpoint_without_a_readable_part_is_refused(tmp_path: Path, damage: Any) -> None:
    """DCP raises a BaseException of its own, and would wait for the writer of a pipe."""
    model, _ = trained()
    export_folder(cast("Copy", Held(model=model.state_dict())), tmp_path / "dcp", form="dcp")
    part = tmp_path / "dcp" / "__0_0.distcp"
    if damage in (os.mkfifo, os.mkdir):
        part.unlink()
    damage(part)
    with pytest.raises(UserError, match="dcp must hold files of torch") as caught:
        load_into(model, tmp_path / "dcp", print)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("form", ["huggingface", "dcp", "torch"])
def test_export_to_a_full_disk_gives_one_line_and_leaves_nothing(tmp_path: Path, form: str) -> None:
    copy = cast("Copy", Held(model={"weight": torch.ones(10**6)}))
    with small_disk(tmp_path / "disk", "1m") as (disk, _):
        with pytest.raises(UserError, match="has no space left") as error:
            _ = export(copy, disk / "out") if form == "torch" else export_folder(copy, disk / "out", form=form)
        assert not [path for path in disk.rglob("*") if path.is_file()]
    assert "\n" not in str(error.value)


def test_export_into_the_folder_or_file_behind_a_link_leaves_the_link(tmp_path: Path) -> None:
    copy = cast("Copy", Held(model=trained()[0].state_dict()))
    for name in ("dcp", "out.pt"):
        (tmp_path / f"link-{name}").symlink_to(name)
    (tmp_path / "dcp").mkdir()
    export_folder(copy, tmp_path / "link-dcp", form="dcp")
    export(copy, tmp_path / "link-out.pt")
    assert sorted(path.name for path in tmp_path.iterdir() if not path.is_symlink()) == ["dcp", "out.pt"]
    for name in ("link-dcp", "out.pt"):
        load_into(trained()[0], tmp_path / name, print)


@pytest.mark.parametrize(("form", "name"), [
    ("torch", "pipe"), ("torch", "folder"), ("torch", "new.safetensors"), ("dcp", "pipe"), ("dcp", "file"),
    ("huggingface", "file"),
])
def test_export_replaces_no_device_folder_or_file_of_another_kind(tmp_path: Path, form: str, name: str) -> None:
    copy, target = cast("Copy", Held(model=trained()[0].state_dict())), tmp_path / name
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("mine")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UserError, match="FILE must "):
        _ = export(copy, target) if form == "torch" else export_folder(copy, target, form=form)
    assert sorted(tmp_path.iterdir()) == before
    assert (tmp_path / "pipe").is_fifo()
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("form", ["torch", "huggingface", "dcp"])
def test_command_exports_tensors_of_several_types_that_share_a_file_of_the_run(tmp_path: Path, form: str) -> None:
    """A batch norm counts in int64. Nothing else of the same file is written: an empty tensor, one of another item."""
    model, _ = trained()
    state = {**model.state_dict(), "empty": torch.zeros(0, 3), "half": torch.full((2,), 0.1, dtype=torch.bfloat16)}
    nodes, tensors = encode({"model": state, "more": {"large": torch.ones(1000)}})
    parts = {STATE: to_json(training_state(3)), **files_of(nodes, tensors)}
    path = Folder(tmp_path / "run" / "checkpoints", keep=9).write(3, parts)
    out = tmp_path / ("out.pt" if form == "torch" else "out")
    assert cli.main(["export", str(tmp_path / "run"), str(out), "--format", form, "--item", "model"]) == 0
    other, _ = trained(seed=1)
    load_into(other, out, print)
    same(other.state_dict(), model.state_dict())
    torch.save(read(path).tracked["model"], tmp_path / "own.pt")
    found = torch.load(tmp_path / "own.pt", weights_only=True)
    same(found, state)
    assert found["2.weight"].data_ptr() == found["3.weight"].data_ptr()


@pytest.mark.parametrize("form", ["huggingface", "dcp"])
def test_command_exports_a_run_and_refuses_what_it_cannot_write(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    path = save(tmp_path / "run" / "checkpoints", 3)
    out = tmp_path / "out"
    assert cli.main(["export", str(tmp_path / "run"), str(out), "--format", form, "--item", "model"]) == 0
    assert f"{out}/: model of step 3, " in capsys.readouterr().out
    linear = nn.Linear(2, 3, bias=False)
    load_into(linear, out, print)
    same(linear.state_dict(), read(path).tracked["model"])
    assert cli.main(["export", str(tmp_path / "run"), str(tmp_path / "x"), "--format", form, "--item", "net"]) == 2
    assert "--item must be one of model" in capsys.readouterr().err
