"""The weights with which a new run starts: of a file, a checkpoint or a model folder of Hugging Face."""

import json
import logging
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rankup.errors import UserError
from rankup.group.group import Group
from rankup.loop.settings import check_record
from rankup.loop.tracked import WRAPPERS
from rankup.places.files import open_regular
from rankup.state.copies import MANIFEST, no_check
from rankup.state.formats import DCP_METADATA, INDEX, read_dcp
from rankup.state.reading import load_newest, read
from rankup.state.second_place import fetched

INSIDE = ("state_dict", "model_state_dict", "model")  # published files often put the weights under such a key


def start_from(group: Group, module: nn.Module, place: str, *, item: str, where: str, timeout_s: float) -> None:
    """Load the weights at `place` into `module` on all ranks, see `Job.start_from`. Only rank 0 reads them."""
    while (inner := getattr(module, "module" if isinstance(module, WRAPPERS) else "_orig_mod", None)) is not None:
        module = inner

    def load() -> None:
        with fetched(place, timeout_s=timeout_s) as path:
            load_into(module, path, group.log.info, place=place, item=item, where=where)

    group.on_rank0(load)
    state = module.state_dict()
    for name in group.broadcast([*state]):  # one after the other: a message is in memory three times
        given = group.broadcast_tensors(state.get(name))
        if not group.is_rank0:
            state[name] = given
    if not group.is_rank0:
        module.load_state_dict(state)


def load_into(
    module: nn.Module, path: Path, say: Callable[[str], None], *, place: str = "", item: str = "model",
    where: str = "start_from",
) -> None:
    """Load the tensors that fit into `module`. The others keep their values, and `say` gets a line for each. `place`:
    the user's name for `path`. `item`: the object in a checkpoint of rankup. `where`: what messages begin with."""
    place = place or str(path)
    state = _read(path, place, item, where)
    if isinstance(state, dict):
        state = next((state[key] for key in INSIDE if isinstance(state.get(key), dict)), state)
    entries = state.items() if isinstance(state, dict) else ()
    # Remove the prefixes of wrappers, in any order: "module." (DP, DDP) and "_orig_mod." (torch.compile)
    given = {re.sub(r"(^|\.)((module|_orig_mod)\.)+", r"\1", name): value for name, value in entries
             if isinstance(name, str) and isinstance(value, torch.Tensor)}
    own = module.state_dict()
    fitting = {name: value for name, value in given.items() if name in own and own[name].shape == value.shape}
    if not fitting:
        raise UserError(f"{where}: {place} must share weights with the model, got none that fits by name and shape.")
    module.load_state_dict(fitting, strict=False)
    say(f"started from {place}: {len(fitting)} of {len(own)} tensors")
    for name in (name for name in own if name not in fitting):
        reason = "not there"
        if name in given:
            reason = f"its shape there is {tuple(given[name].shape)}, here {tuple(own[name].shape)}"
        say(f"  {name} keeps its initial value: {reason}")
    if unused := [name for name in given if name not in own]:
        say(f"  not used from the file: {', '.join(unused[:8])}{' ...' if len(unused) > 8 else ''}")


def _read(path: Path, place: str, item: str, where: str) -> Any:
    """Read a checkpoint, a folder of Hugging Face or torch.distributed.checkpoint, or a file of weights. Raises
    UserError."""
    from safetensors.torch import load_file

    if not path.exists():
        raise UserError(f"{where} must name an existing file or checkpoint directory, got {place}.")
    # Hugging Face's names. Our checkpoints also have a manifest. `is_file`: reading a pipe or a device may never end
    parts = {part.name for part in path.glob("*.safetensors") if part.is_file()}
    index = path / INDEX
    dcp = (path / DCP_METADATA).is_file()
    if not parts and (older := path / "pytorch_model.bin").is_file():  # the format before safetensors
        path = older
    if path.is_dir() and ((path / MANIFEST).exists() or not (parts or dcp or index.is_file())):
        check = partial(check_record, more=no_check)
        runs = path / "checkpoints"
        copy = load_newest(runs, logging.getLogger("rankup").warning, check) if runs.is_dir() else read(path, check)
        if copy is None or item not in (tracked := copy.tracked):
            raise UserError(f"{where}: {place} must hold a checkpoint with {item}, got none. Name what job.track got.")
        return tracked[item]
    try:
        if dcp and not parts:
            return read_dcp(path, (item, *INSIDE))
        if path.is_dir():
            named = {"model.safetensors"}
            if index.is_file():
                named = {*json.loads(index.read_bytes())["weight_map"].values()}
            if missing := named - parts:
                raise ValueError(f"no {missing.pop()} in it")
            return {name: tensor for part in sorted(named) for name, tensor in load_file(path / part).items()}
        open_regular(path).close()  # a pipe or a device may never end
        if path.suffix == ".safetensors":
            return load_file(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises several unrelated types for a damaged file
        rule = "safetensors, or weights that load with weights_only"
        if dcp:
            rule = "files of torch.distributed.checkpoint"
        text = " ".join(str(error).split())
        text = (text if " " in text else f"{type(error).__name__} {text}")[:200].rstrip(". ")
        raise UserError(f"{where}: {place} must hold {rule}, got: {text}") from None
