"""Folders that other programs read: sharded safetensors as Hugging Face's libraries save them, and the folders of
torch.distributed.checkpoint (DCP).

Hugging Face: `model.safetensors`, or `model-00001-of-00003.safetensors` and so on, with `model.safetensors.index.json`,
which maps each tensor to its file (huggingface_hub, `split_torch_state_dict_into_shards`). DCP: `.metadata`, a pickle
with the size and the place of each tensor, and `__<rank>_<number>.distcp` with their bytes. Of that pickle only DCP's
own data classes are read here, because a folder may come from the network.
"""

import contextlib
import os
import pickle
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from enum import Enum
from pathlib import Path, PurePath
from typing import Any

import torch

from rankup.errors import UserError, disk_errors
from rankup.places.files import open_regular, staged, write_json
from rankup.state.reading import OWN, Copy
from rankup.state.tree import TensorFile

INDEX = "model.safetensors.index.json"
DCP_METADATA = ".metadata"
SHARD_BYTES = 5 * 10**9  # as in Hugging Face's libraries: clients of their hub load files of this size
MODEL = "model"


def export(copy: Copy, file: Path, *, item: str = "") -> str:
    """Write the tracked items of a plain copy to `file`, for `torch.load(file, weights_only=True)`: a dict from the
    name of each item to its state. With `item`, write the state of that item alone. Return a description of the file.

    Raises UserError if the copy has no such item, or the file can't be written.
    """
    items = _items(copy, item)
    if file.exists() and not file.is_file():  # the rename would replace a device
        raise UserError(f"FILE must be a file, got {file}. To write a folder, give --format huggingface or dcp.")
    if file.suffix == ".safetensors":
        raise UserError(f"FILE must not end in .safetensors, got {file}: torch.save writes another format. Give a "
                        "folder and --format huggingface.")
    target = Path(os.path.realpath(file)) if file.is_symlink() else file  # the link stays
    with disk_errors("export", file.parent), staged(target) as staging, staging.open("wb") as opened, _torch_errors():
        torch.save(items[item] if item else items, opened)
    return f"{file}: {item or ', '.join(items)} of step {copy.step}, {file.stat().st_size / 1e6:.1f} MB"


def export_folder(copy: Copy, folder: Path, *, form: str, item: str = "", shard_bytes: int = SHARD_BYTES) -> str:
    """Write tracked items of a plain copy to `folder`. Return a description of it.

    `form`: "huggingface" writes the tensors of one item, by default `model`, in files of at most `shard_bytes` (one
    tensor may be larger). "dcp" writes all items, or the state of `item` alone, for torch.distributed.checkpoint.load.
    Raises UserError if there is no such item, the folder holds weights already, or it can't be written.
    """
    if form == "huggingface":
        item = item or MODEL
    items = _items(copy, item)
    if os.path.lexists(folder) and not folder.is_dir():
        raise UserError(f"FILE must be a folder with --format {form}, got {folder}.")
    # A model's config.json may be there already
    held = sorted(folder.glob("*")) if form == "dcp" else [*folder.glob("*.safetensors*"), *folder.glob("*.bin")]
    if held:
        what = "empty" if form == "dcp" else "a folder without weights"
        raise UserError(f"FILE must be {what}, got {folder}, which holds {held[0].name}. Name another folder.")
    with disk_errors("export", folder.parent):
        if form == "dcp":
            said = _write_dcp(items[item] if item else items, folder)
        else:
            said = _write_shards(items[item], folder, item, shard_bytes)
    return f"{folder}/: {item or ', '.join(items)} of step {copy.step}, {said}"


def _items(copy: Copy, item: str) -> dict[str, Any]:
    """Return what the user tracks. Raises UserError if `item` is given and not among it."""
    items = {name: state for name, state in copy.tracked.items() if not name.startswith(OWN)}
    if item and item not in items:
        raise UserError(f"--item must be one of {', '.join(items)}, got {item}.")
    return items


def _write_shards(state: Any, folder: Path, item: str, shard_bytes: int) -> str:
    entries = state.items() if isinstance(state, dict) else ()
    tensors = {name: each for name, each in entries if isinstance(name, str) and isinstance(each, torch.Tensor)}
    if not tensors:
        raise UserError(f"--item must be a module, whose state has tensors by name, got {item}. Name a module.")
    shards, size = list[dict[str, torch.Tensor]](), shard_bytes + 1
    for name, tensor in tensors.items():
        if size + tensor.nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    files = {f"model-{number:05d}-of-{len(shards):05d}.safetensors": shard for number, shard in enumerate(shards, 1)}
    if len(shards) == 1:
        files = {"model.safetensors": shards[0]}
    for name, shard in files.items():
        with staged(folder / name) as staging, staging.open("wb") as opened:
            for part in TensorFile(shard):
                opened.write(part)
    total = sum(tensor.nbytes for tensor in tensors.values())
    if len(shards) > 1:  # last: readers look for it first
        where = {name: file for file, shard in files.items() for name in shard}
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": where})
    left = [str(name) for name in state if name not in tensors]
    more = f"; not written, because they are no tensors: {', '.join(left)}" if left else ""
    return f"{len(files)} files of safetensors, {total / 1e6:.1f} MB{more}"


def _write_dcp(state: dict[str, Any], folder: Path) -> str:
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    folder.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=".", dir=folder))  # inside, because `folder` may be "." or a link
    try:
        with _torch_errors():
            save(state, storage_writer=FileSystemWriter(staging), no_dist=True)
        for each in sorted(staging.iterdir(), key=lambda path: path.name == DCP_METADATA):  # last: readers look for it
            each.rename(folder / each.name)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return f"a folder of torch.distributed.checkpoint, {sum(f.stat().st_size for f in folder.iterdir()) / 1e6:.1f} MB"


@contextlib.contextmanager
def _torch_errors() -> Iterator[None]:
    """Within the block DCP works in this process alone. Raises the error of the disk or the file that torch hides: DCP
    behind an error that is no Exception, torch.save behind a RuntimeError."""
    from torch.distributed.checkpoint.api import CheckpointException

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # this process is alone, on purpose
        try:
            yield
        except (CheckpointException, RuntimeError) as error:
            hidden = next((each for each, _ in getattr(error, "failures", {}).values()), error)
            if isinstance(hidden, RuntimeError) and isinstance(hidden.__context__, OSError):
                hidden = hidden.__context__
            raise hidden from None


# Reading --------------------------------------------------------------------------------------------------------------


CLASSES = {
    "torch.distributed.checkpoint.metadata": (
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "MetadataIndex",
        "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo", "_StoragePrefix"),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size",),
    "collections": ("OrderedDict",),
    "pathlib": ("PosixPath", "PurePosixPath"),
    "pathlib._local": ("PosixPath", "PurePosixPath"),
}


def _member_of(enum: Any, name: str) -> Enum:
    """Return a member of an enum. Python 3.11.0 to 3.11.3 pickle it as a call of `getattr`."""
    if not (isinstance(enum, type) and issubclass(enum, Enum)):
        raise pickle.UnpicklingError(f"{DCP_METADATA} takes {name} from {enum}, which is no enum")
    return enum[name]


class _OnlyMetadata(pickle.Unpickler):
    """Reads the metadata of a DCP folder, and calls nothing but the constructors of DCP's data classes, enums and
    paths."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member_of
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype | torch.layout):
            return found
        if name not in CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"{DCP_METADATA} names {module}.{name}, which is no metadata of a checkpoint")
        return super().find_class(module, name)


def read_dcp(folder: Path, wanted: Sequence[str]) -> dict[str, torch.Tensor]:
    """Return the tensors of a DCP folder by name. If some are nested under one of the names in `wanted`, return those
    under the first such name, without it. Objects that are no tensors are not read. Raises various errors for a folder
    that DCP did not write."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import StorageMeta, TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    class Reader(FileSystemReader):
        def read_metadata(self, *_: Any, **__: Any) -> Any:
            with (folder / DCP_METADATA).open("rb") as file:
                found = _OnlyMetadata(file).load()
            for info in found.storage_data.values():
                if PurePath(info.relative_path).name != info.relative_path:
                    raise ValueError(f"{DCP_METADATA} names the file {info.relative_path}, which is not in the folder")
                open_regular(folder / info.relative_path).close()  # a pipe would never end
            found.storage_meta = found.storage_meta or StorageMeta()
            found.storage_meta.load_id = self.load_id
            return found

    reader = Reader(folder)
    metadata = reader.read_metadata()
    # DCP flattens nested dicts: "model.0.weight" was ("model", "0.weight")
    paths = metadata.planner_data or {}
    tensors = {key: (tuple(paths.get(key, (key,))), each) for key, each in metadata.state_dict_metadata.items()
               if isinstance(each, TensorStorageMetadata)}
    top = next((name for name in wanted if any(path[0] == name and path[1:] for path, _ in tensors.values())), None)
    named, state = dict[str, str](), dict[str, torch.Tensor]()
    for key, (path, each) in tensors.items():
        if top is None or (path[0] == top and path[1:]):
            named[".".join(map(str, path if top is None else path[1:]))] = key
            state[key] = torch.empty(each.size, dtype=each.properties.dtype)
    with _torch_errors():
        load(state, storage_reader=reader, no_dist=True)
    return {name: state[key] for name, key in named.items()}
