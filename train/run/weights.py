"""The digest of a model's weights, and how a run starts from given weights."""

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
    """Return the SHA-256, in hex, over names, dtypes, shapes and bytes of a model's state dict."""
    total = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        if tensor.numel():
            # Hash a view. `tobytes` would copy all weights at every start of every rank
            total.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def start_from(config: Config, group: Group, plain: torch.nn.Module) -> None:
    """Load `init_from` into `plain` on all ranks. Only rank 0 needs the file. Raises UserError."""
    place = config.init_from or ""

    def load() -> None:
        with rankup.fetched(place, timeout_s=0.9 * config.setup_timeout_s) as path:
            init_from(plain, path, group.log.info, place=place)

    group.on_rank0(load)
    plain.load_state_dict(group.broadcast_tensors(plain.state_dict()))


def _read(path: Path, place: str) -> Any:
    """Read a checkpoint, a model folder of Hugging Face, or a file of weights. Raises UserError."""
    from safetensors.torch import load_file

    # Hugging Face's names. Our checkpoints also have a manifest. `is_file`: reading a pipe or a device may never end
    parts = {part.name for part in path.glob("*.safetensors") if part.is_file()}
    index = path / "model.safetensors.index.json"
    if not parts and (older := path / "pytorch_model.bin").is_file():  # the format before safetensors
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
    except Exception as error:  # torch.load raises several unrelated types for a damaged file
        rule = "safetensors, or weights that load with weights_only"
        raise UserError(f"init_from: {place} must hold {rule}, got: {one_line(error)}") from None


def init_from(model: torch.nn.Module, path: Path, say: Callable[[str], None], *, place: str = "") -> None:
    """Load the tensors that fit into `model`, from a checkpoint of this program, a model folder of Hugging Face, a
    safetensors file, or a state dict that torch loads with weights_only. Other tensors, such as those of a new head,
    keep their initial values, and `say` lists them. `place`: the user's name for `path`. Raises UserError."""
    place = place or str(path)
    state = _read(path, place)
    for key in ("state_dict", "model_state_dict", "model"):  # published checkpoints often put the state dict inside
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
            break
    entries = state.items() if isinstance(state, dict) else ()
    # Remove the prefixes of wrappers, in any order: "module." (DP, DDP) and "_orig_mod." (torch.compile)
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
