"""The folder `shards/` of a checkpoint: each rank writes and reads its own tensors, by torch.distributed.checkpoint.

`__0_0.distcp` is rank 0's part and so on; `.metadata`, by rank 0, says where each part of a tensor is, so that they
load on any number of ranks. The folder has to be on storage that all nodes share.
"""

import errno
import hashlib
import pickle
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.futures import Future

from train.errors import UserError, disk_error
from train.group.group import Group, on_rank0
from train.group.watchdog import Watchdog

FOLDER = "shards"
NOT_VISIBLE = "not visible"
VISIBLE_S = 10.0  # NFS caches directories: a node may see another node's new file this much later
Fingerprint = dict[str, Any]  # {"bytes": int, "sha256": str} of one file


class _Writer(FileSystemWriter):
    """Tells the watchdog when this rank writes and when it waits for others, and raises the OSError of a full disk."""

    def __init__(self, folder: Path, watch: Watchdog) -> None:
        super().__init__(folder)
        self.watch = watch

    def write_data(self, plan: Any, planner: Any) -> Future[list[Any]]:
        self.watch.wait_for_others(False)
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            # On a full disk torch.save raises "unexpected pos 64 vs 0", and the system's error is only its context
            cause = error.__context__
            raise cause if isinstance(cause, OSError) else OSError(errno.EIO, str(error).splitlines()[0]) from None
        finally:
            self.watch.wait_for_others(True)


class _Reader(FileSystemReader):
    """Reads `.metadata`, which is pickled, without running code that somebody may have put into it."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / ".metadata").open("rb") as file:
            _SafeUnpickler(file).load()  # raises; torch's own reader, which follows, would run anything
        return super().read_metadata(*args, **kwargs)


class _SafeUnpickler(pickle.Unpickler):
    """Knows the classes that torch.distributed.checkpoint writes, and refuses every other name."""

    NAMES = frozenset({
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties", "ChunkStorageMetadata",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING", "_StorageInfo", "_get_layout", "Size", "PosixPath",
        "WindowsPath",
    })

    def find_class(self, module: str, name: str) -> Any:
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if module.split(".")[0] in ("torch", "pathlib") and (dtype or name in self.NAMES):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in it")


def check_shared(directory: Path, group: Group) -> None:
    """Raises UserError on all ranks where one does not see what rank 0 writes into `directory`. All ranks call this.

    Before the training: without shared storage the first save would fail, hours later.
    """
    mark = directory / f".shared-{group.attempt}"

    def make_mark() -> None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            mark.touch()
        except OSError as error:
            raise disk_error("checkpoint", directory, error) from None

    on_rank0(group, make_mark)
    unseen = [rank for rank, seen in enumerate(group.gather(_wait_until_visible(mark))) if not seen]
    if group.is_rank0:
        mark.unlink(missing_ok=True)
    if unseen:
        raise _not_shared(unseen, directory, group)


def _wait_until_visible(path: Path) -> bool:
    until_s = time.monotonic() + VISIBLE_S
    while not path.exists():
        if time.monotonic() > until_s:
            return False
        time.sleep(0.1)
    return True


def _not_shared(unseen: list[int], directory: Path, group: Group) -> UserError:
    named = ", ".join(f"rank {rank} on {group.hosts[rank]}" for rank in unseen[:4])
    text = (
        f"checkpoint_format sharded needs a run directory that all nodes share, got {directory}, in which {named} "
        "can't see what others write. Set --run-dir to shared storage, or --checkpoint-format plain."
    )
    return UserError(text, printed_elsewhere=not group.is_rank0)


def write_shards(folder: Path, tensors: dict[str, Any], group: Group) -> dict[str, Fingerprint]:
    """Write each rank's part of `tensors`, a nested mapping, and return the fingerprints of all files by their names.

    All ranks call this. The next rank reads a rank's files back, from another machine where there are several: a file
    that only its writer's cache has does not pass. Raises UserError on all ranks.
    """
    directory = folder.parent.parent
    try:
        # Rank 0 writes what all ranks hold, such as a batch norm's buffers; torch's default spreads it over the ranks
        planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
        save(tensors, storage_writer=_Writer(folder, group.watch), planner=planner)
    except CheckpointException as failure:
        rank, (error, _) = min(failure.failures.items())
        if not isinstance(error, OSError):
            raise RuntimeError(f"rank {rank}: {error}") from None
        text = str(disk_error("checkpoint", directory, error))
        raise UserError(text, printed_elsewhere=not group.is_rank0) from None
    finally:
        group.watch.wait_for_others(False)
    own = sorted(folder.glob(f"__{group.rank}_*")) + ([folder / ".metadata"] if group.is_rank0 else [])
    written: list[dict[str, Fingerprint]] = group.gather({path.name: fingerprint_file(path) for path in own})
    problems = group.gather(_read_back(folder, written, group))
    if unseen := [rank for rank, problem in enumerate(problems) if problem == NOT_VISIBLE]:
        raise _not_shared(unseen, directory, group)
    if wrong := [problem for problem in problems if problem]:
        text = f"checkpoint: {directory} must give back what was written, got {wrong[0]}."
        raise UserError(text, printed_elsewhere=not group.is_rank0)
    return {name: entry for part in written for name, entry in part.items()}


def _read_back(folder: Path, written: list[dict[str, Fingerprint]], group: Group) -> str:
    """What is wrong with the next rank's files, or "". Rank 0, which publishes, has to see the files of all ranks."""
    following = written[(group.rank + 1) % group.world_size]
    expected = [name for part in written for name in part] if group.is_rank0 else list(following)
    if not all(_wait_until_visible(folder / name) for name in expected):
        return NOT_VISIBLE
    changed = [name for name, entry in following.items() if fingerprint_file(folder / name) != entry]
    return ", ".join(f"another {name}" for name in changed)


def fingerprint_file(path: Path) -> Fingerprint:
    """Size in bytes and SHA-256 of a file, read piece by piece: a shard may be larger than the memory that is free."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}


def read_shards_into(folder: Path, tensors: dict[str, Any]) -> None:
    """Fill `tensors`, a nested mapping, in place, each rank its part. All ranks call this.

    Raises RuntimeError where names or shapes don't fit.
    """
    try:
        load(tensors, storage_reader=_Reader(folder))
    except CheckpointException as failure:
        rank, (error, _) = min(failure.failures.items())
        raise RuntimeError(f"rank {rank}: {error}") from None


def read_all_shards(folder: Path) -> dict[str, Any]:
    """All tensors whole, on the CPU of one process: the nested mapping that `write_shards` was given."""
    metadata = _Reader(folder).read_metadata()
    entries = metadata.state_dict_metadata.items()
    flat = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in entries
            if isinstance(entry, TensorStorageMetadata)}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as intended
        load(flat, storage_reader=_Reader(folder), no_dist=True)
    nested: dict[str, Any] = {}
    for name, tensor in flat.items():
        # "model.layer.weight" is model -> "layer.weight": the dots alone don't say where to split
        *parents, last = (metadata.planner_data or {})[name]
        inner = nested
        for key in parents:
            inner = inner.setdefault(key, {})
        inner[last] = tensor
    return nested
