"""Weights: their digest, a start from given weights, and equal initial weights on all ranks."""

import json
import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from rankup.errors import UserError
from rankup.loop.weights import load_into, start_from
from tests.rigs.checkpoints import SETTINGS, train
from tests.rigs.fork_server import Forks
from tests.rigs.jobs import result
from train.run import weights


def test_digest_of_weights_depends_on_names_types_shapes_and_bits() -> None:
    state = {"a": torch.zeros(2, 3), "b": torch.zeros((), dtype=torch.int64)}
    digests = {
        weights.digest(state),
        weights.digest({"c": state["a"], "b": state["b"]}),
        weights.digest({**state, "a": torch.zeros(3, 2)}),
        weights.digest({**state, "a": torch.zeros(2, 3, dtype=torch.bfloat16)}),
        weights.digest({**state, "a": -torch.zeros(2, 3)}),
    }
    assert len(digests) == 5
    assert weights.digest({"b": state["b"], "a": state["a"]}) in digests


def plain_model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def started_from(path: Path) -> tuple[dict[str, torch.Tensor], str]:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    said: list[str] = []
    load_into(model, path, said.append)
    return model.state_dict(), "\n".join(said)


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
@pytest.mark.parametrize("envelope", [None, "state_dict", "model"])
def test_weights_of_wrapped_models_load(tmp_path: Path, prefix: str, envelope: str | None) -> None:
    given = plain_model().state_dict()
    prefixed: dict[str, Any] = {prefix + name: value for name, value in given.items()}
    torch.save({envelope: prefixed, "epoch": 3} if envelope else prefixed, tmp_path / "w.pt")
    own, said = started_from(tmp_path / "w.pt")
    assert weights.digest(own) == weights.digest(given)
    assert said == f"started from {tmp_path / 'w.pt'}: 4 of 4 tensors"


def test_weights_load_from_safetensors_and_folders_of_hugging_face(tmp_path: Path) -> None:
    given = plain_model().state_dict()
    for folder in ("whole", "parts"):
        (tmp_path / folder).mkdir()
    save_file(given, tmp_path / "whole" / "model.safetensors")
    names = {name: f"model-0000{1 + number % 2}-of-00002.safetensors" for number, name in enumerate(given)}
    for file in {*names.values()}:
        save_file({name: given[name] for name in given if names[name] == file}, tmp_path / "parts" / file)
    index = tmp_path / "parts" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": names}))
    save_file({name: value + 1 for name, value in given.items()}, tmp_path / "parts" / "model.old.safetensors")
    (tmp_path / "older").mkdir()
    torch.save(given, tmp_path / "older" / "pytorch_model.bin")
    for place in ("whole", "whole/model.safetensors", "parts", "older"):
        assert weights.digest(started_from(tmp_path / place)[0]) == weights.digest(given)
    os.truncate(tmp_path / "parts" / names["2.bias"], 100)
    for _ in range(2):
        with pytest.raises(UserError, match="must hold safetensors, or weights that"):
            started_from(tmp_path / "parts")
        index.write_text(json.dumps({"weight_map": {"2.bias": "../whole/model.safetensors"}}))
    index.unlink()
    os.mkfifo(index)  # a read would never end
    with pytest.raises(UserError, match=r"no model\.safetensors in it"):
        started_from(tmp_path / "parts")


@pytest.mark.parametrize(("content", "message"), [
    ({"other": torch.ones(3)}, "got none that fits"),
    (torch.ones(3), "got none that fits"),
    ({0: torch.ones(3), "epoch": 1}, "got none that fits"),
    (Path("x"), "must hold safetensors, or weights that load with weights_only"),
    (b"no archive", "must hold safetensors, or weights that load with weights_only"),
    (None, "must name an existing file"),
], ids=str)
def test_unfit_weights_are_refused_in_one_line(tmp_path: Path, content: Any, message: str) -> None:
    path = tmp_path / "w.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    with pytest.raises(UserError, match=message) as caught:
        started_from(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_job_starts_from_weights_on_rank_0s_disk(forks: Forks, tmp_path: Path) -> None:
    folders = [tmp_path / f"node{rank}" for rank in range(2)]
    for folder in folders:
        folder.mkdir()
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(), nn.Linear(16, 5))
    given = {**model.state_dict(), "head": torch.ones(1)}
    torch.save({f"module.{name}": value for name, value in given.items()}, folders[0] / "w.pt")
    arguments = ("train", *SETTINGS, "--name", "run", "--max-steps", "4", "--init-from", "w.pt")
    output = forks.ends(*arguments, "--lr", "1e-30", "--weight-decay", "0", world_size=2, cwds=folders)
    assert "started from w.pt: 2 of 4 tensors" in output
    assert "3.weight keeps its initial value: its shape there is (5, 16), here (4, 16)" in output
    assert "not used from the file: head" in output
    trained = load_file(folders[0] / "runs" / "run" / "checkpoints" / "step-00000004" / "model.safetensors")
    assert torch.equal(trained["0.weight"], model.state_dict()["0.weight"])
    output = forks.ends(*arguments[:-1], "missing.pt", "--fresh", world_size=2, cwds=folders, code=2)
    assert output.count("init_from must name an existing file or checkpoint directory, got missing.pt") == 1


def test_weights_travel_one_tensor_at_a_time(tmp_path: Path) -> None:
    """A large model fits into the memory of a node: no message holds all of it."""
    models, sent = [nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16)) for _ in range(2)], list[Any]()
    save_file({"0.weight": torch.full((16, 8), 3.0)}, tmp_path / "w.safetensors")
    for rank, model in enumerate(models):
        arriving = iter([*sent])
        travel = [lambda value: (sent.append(value), value)[1], lambda value, all_sent=arriving: next(all_sent)][rank]
        group: Any = SimpleNamespace(
            is_rank0=rank == 0, on_rank0=[lambda work: work(), lambda work: None][rank], broadcast=travel,
            broadcast_tensors=travel, log=logging.getLogger("test"),
        )
        start_from(group, model, str(tmp_path / "w.safetensors"), item="model", where="start_from", timeout_s=1)
    names, *tensors = sent
    assert names == [*models[0].state_dict()]
    assert [each.shape for each in tensors] == [each.shape for each in models[0].state_dict().values()]
    assert all(map(torch.equal, *[[*model.state_dict().values()] for model in models]))
    assert models[1][0].weight[0, 0] == 3


def other_weights_on_rank_1() -> None:
    """Preloaded. Let rank 1 build other weights, like a workload that draws from the clock."""
    if os.environ["RANK"] != "1":
        return
    from tests.rigs import faulting_workload

    build = faulting_workload.build

    def other(config: Any) -> Any:
        workload = build(config)
        nn.init.ones_(workload.model[0].weight)
        return workload

    faulting_workload.build = other


def test_all_ranks_get_rank_0s_initial_weights(forks: Forks, tmp_path: Path) -> None:
    for name, preload in (("equal", ""), ("other", "tests.run.test_weights:other_weights_on_rank_1")):
        forks.ends(*train(tmp_path / name, "--max-steps", "4"), world_size=2, preload=preload)
    assert result(tmp_path / "equal")["digest"] == result(tmp_path / "other")["digest"]
