"""The files of a BERT's folder: where it is, what it must hold, and reading them with errors that name the file."""

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import torch

from rankup.errors import ConfigError, DataError

LAYOUT = "A BERT's folder holds config.json, vocab.txt (or tokenizer.json) and model.safetensors or pytorch_model.bin."
WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # each also in parts, listed in NAME.index.json
VOCABULARY = ("config.json", "vocab.txt", "tokenizer.json", "tokenizer_config.json")
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")  # organisation/model, or the first models' single word


def need_transformers() -> None:
    """Raises ConfigError, with the command that installs it, if one of the extra's packages is not installed."""
    missing = [name for name in ("transformers", "tokenizers", "safetensors") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"bert_dir must be null without the package {missing[0]}, which is not installed. For a BERT: pip install "
            "'rankup[text]', in a checkout pip install -e '.[text]'"
        )


def find_folder(name: str, *, download: bool, pretrained: bool) -> Path:
    """The folder `name`; with `download`, also that of a model of this name at the Hugging Face hub.

    A download leaves out the weights unless `pretrained`. Raises DataError if there is no such folder or model.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists() or not HUB_NAME.fullmatch(name):
        problem = "a file" if folder.exists() else "which is not there"
        raise DataError(f"bert_dir must be a folder, got {folder}, {problem}. {LAYOUT}")
    if not download:
        raise DataError(
            f"bert_dir must be a folder, got {name}, which is not one here. Nothing is downloaded unasked: if this is "
            "a name at the Hugging Face hub, set --bert-download, or fetch it yourself and name its folder."
        )
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(name, allow_patterns=list(VOCABULARY)))
        if pretrained:
            for weights in WEIGHTS:  # the first of the two that is there: both hold the same
                if weight_files(folder, weights):
                    break
                stem, ending = weights.split(".")
                snapshot_download(name, allow_patterns=[weights, f"{weights}.index.json", f"{stem}-*-of-*.{ending}"])
    except Exception as error:  # many types: no network, no such name, no access
        raise DataError(f"bert_dir: {name} can't be downloaded from the Hugging Face hub: {one_line(error)}.") from None
    return folder


def weight_files(folder: Path, name: str) -> list[Path]:
    """The files that hold the weights `name`: one, or the parts that an index lists; [] if neither is there.

    Raises DataError if the index is no JSON object.
    """
    if (folder / name).exists():
        return [folder / name]
    index = folder / f"{name}.index.json"
    if not index.exists():
        return []
    listed = read_json(index).get("weight_map", {})
    return [folder / part for part in sorted(set(listed.values()))]


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of one file by name, on the CPU; floats as float32, because some are published in half precision.

    No code in the file is run. Raises DataError, naming the file, if it is missing or damaged.
    """
    from safetensors.torch import load_file

    try:
        with path.open("rb") as file:
            if file.read(24).startswith(b"version https://git-lfs"):
                raise DataError(
                    f"{path}: is Git LFS's pointer to the weights, not the weights. Run git lfs pull in that folder."
                )
        safe = path.suffix == ".safetensors"
        found = load_file(path) if safe else torch.load(path, map_location="cpu", weights_only=True)
        return {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in found.items()}
    except DataError:
        raise
    except FileNotFoundError:
        raise DataError(f"{path}: is missing, though the index beside it lists it.") from None
    except Exception as error:  # a damaged file raises one of half a dozen unrelated types
        raise DataError(f"{path}: must be weights that load without running code, got: {one_line(error)}") from None


def read_json(path: Path) -> dict[str, Any]:
    """A file that holds one JSON object. Raises DataError, naming the file, if it does not."""
    try:
        found = json.loads(read_text(path))
    except ValueError as error:
        raise DataError(f"{path}: must be JSON, got: {one_line(error)}.") from None
    if not isinstance(found, dict):
        raise DataError(f"{path}: must be a JSON object, got {type(found).__name__}.")
    return found


def read_text(path: Path) -> str:
    """A UTF-8 file, its lines ended by \\n. Raises DataError, naming the file, if it cannot be read."""
    try:
        return path.read_bytes().decode("utf-8").replace("\r\n", "\n")
    except FileNotFoundError:
        raise DataError(f"{path}: is missing. {LAYOUT}") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}).") from None
    except UnicodeDecodeError:
        raise DataError(f"{path}: must be UTF-8, got other bytes. {LAYOUT}") from None


def one_line(error: BaseException) -> str:
    """What an exception says, on one line of at most 200 characters."""
    return (" ".join(str(error).split()) or type(error).__name__)[:200].rstrip(".")
