"""Weights without the rest of a checkpoint: their digest, and starting a run from given weights."""

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import rankup
from rankup import Group, UserError

from ..config import Config
from ..data import one_line
from .run_directory import check


def digest(state: dict[str, torch.Tensor]) -> str:
    """SHA-256, in hex, over names, dtypes, shapes and bytes of a model's state dict."""
    total = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        if tensor.numel():
            # A view: `tobytes` would copy all weights once more, at every start of every rank
            total.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def start_from(config: Config, group: Group, plain: torch.nn.Module) -> None:
    """Load `init_from` into `plain` on all ranks. The file needs to be on rank 0's disk only. Raises UserError."""
    place = config.init_from or ""

    def load() -> None:
        with rankup.fetched(place, timeout_s=0.9 * config.setup_timeout_s) as path:
            init_from(plain, path, group.log.info, place=place)

    group.on_rank0(load)
    plain.load_state_dict(group.broadcast_tensors(plain.state_dict()))


def _read(path: Path, place: str) -> Any:
    """What a checkpoint, a folder of Hugging Face's or a file of weights holds. Raises UserError."""
    from safetensors.torch import load_file

    # As Hugging Face names them; our folders have a manifest besides. A pipe or a device may never end
    parts = {part.name for part in path.glob("*.safetensors") if part.is_file()}
    index = path / "model.safetensors.index.json"
    if not parts and (older := path / "pytorch_model.bin").is_file():  # Hugging Face's name before safetensors
        path = older
    if path.is_dir() and ((path / "manifest.json").exists() or not (parts or index.is_file())):
        return rankup.open_checkpoint(path, check=check).tracked["model"]
    try:
        if path.is_dir():
            named = {"model.safetensors"}
            if index.is_file():
                named = {*json.loads(index.read_bytes())["weight_map"].values()}
            if missing := named - parts:
                raise ValueError(f"no {missing.pop()} in it")
            return {name: tensor for part in sorted(named) for name, tensor in load_file(path / part).items()}
        if path.suffix == ".safetensors":
            return load_file(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UserError(f"init_from must name an existing file or checkpoint directory, got {place}.") from None
    except Exception as error:  # torch.load raises half a dozen unrelated types for a damaged file
        rule = "safetensors, or weights that load with weights_only"
        raise UserError(f"init_from: {place} must hold {rule}, got: {one_line(error)}") from None


def init_from(model: torch.nn.Module, path: Path, say: Callable[[str], None], *, place: str = "") -> None:
    """Load what fits into `model`, from a checkpoint of this program, a folder of Hugging Face's, safetensors, or a
    state dict that torch loads with weights_only. The rest keeps its initial value, and `say` lists it: a new head on a
    trained body is the usual case. `place`: what the user named, where `path` is a copy of it. Raises UserError."""
    place = place or str(path)
    state = _read(path, place)
    for key in ("state_dict", "model_state_dict", "model"):  # in which published checkpoints usually wrap it
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
            break
    entries = state.items() if isinstance(state, dict) else ()
    # Without what wrappers put before the names: "module." (DP, DDP), "_orig_mod." (torch.compile), in any order
    given = {re.sub(r"(^|\.)((module|_orig_mod)\.)+", r"\1", name): value for name, value in entries
             if isinstance(name, str) and isinstance(value, torch.Tensor)}
    own = model.state_dict()
    fitting = {name: value for name, value in given.items() if name in own and own[name].shape == value.shape}
    if not fitting:
        raise UserError(f"init_from: {place} must share weights with the model, got none that fits by name and shape.")
    model.load_state_dict(fitting, strict=False)
    say(f"started from {place}: {len(fitting)} of {len(own)} tensors")
    for name in (name for name in own if name not in fitting):
        reason = "not there"
        if name in given:
            reason = f"its shape there is {tuple(given[name].shape)}, here {tuple(own[name].shape)}"
        say(f"  {name} keeps its initial value: {reason}")
    if unused := [name for name in given if name not in own]:
        say(f"  not used from the file: {', '.join(unused[:8])}{' ...' if len(unused) > 8 else ''}")
