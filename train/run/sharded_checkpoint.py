"""Tensors that each rank writes and reads by itself, through torch.distributed.checkpoint: the folder `shards/` of a
checkpoint, on storage that all nodes share.

What is in it: `__0_0.distcp` of rank 0 and so on, and `.metadata`, which says where each part of a tensor is. They load on
any number of ranks.
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
from train.group.group import Group
from train.group.watchdog import Watchdog

FOLDER = "shards"
VISIBLE_S = 10.0  # how long a network file system may take to show one node what another has written
Fingerprint = dict[str, Any]


class _Writer(FileSystemWriter):
    """Says when this rank writes and when it waits for others, and gives a full disk its name back."""

    def __init__(self, folder: Path, watch: Watchdog) -> None:
        super().__init__(folder)
        self.watch = watch

    def write_data(self, plan: Any, planner: Any) -> Future[list[Any]]:
        self.watch.wait_for_others(False)
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            # torch.save into a file on a full disk: its own complaint hides the system's
            cause = error.__context__
            raise cause if isinstance(cause, OSError) else OSError(errno.EIO, str(error).splitlines()[0]) from None
        finally:
            self.watch.wait_for_others(True)


class _Reader(FileSystemReader):
    """Reads `.metadata`, which is pickled, without running what somebody may have put into it."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        _Known((Path(self.path) / ".metadata").open("rb")).check()
        return super().read_metadata(*args, **kwargs)


class _Known(pickle.Unpickler):
    NAMES = frozenset({
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties", "ChunkStorageMetadata",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING", "_StorageInfo", "_get_layout", "Size", "PosixPath",
        "WindowsPath",
    })

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self.file = file

    def check(self) -> None:
        with self.file:
            self.load()

    def find_class(self, module: str, name: str) -> Any:
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if module.split(".")[0] in ("torch", "pathlib") and (dtype or name in self.NAMES):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in it")


def check_shared(directory: Path, group: Group) -> None:
    """Raises UserError on all ranks where one does not see what rank 0 writes into `directory`."""
    mark = directory / f".shared-{group.attempt}"
    problem = ""
    if group.is_rank0:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            mark.touch()
        except OSError as error:
            problem = str(disk_error("checkpoint", directory, error))
    if problem := group.broadcast(problem):
        raise _echoed(problem, group)
    unseen = [rank for rank, seen in enumerate(group.gather(_appears(mark))) if not seen]
    if group.is_rank0:
        mark.unlink(missing_ok=True)
    if unseen:
        raise _not_shared(unseen, directory, group)


def _appears(path: Path) -> bool:
    until_s = time.monotonic() + VISIBLE_S
    while not path.exists():
        if time.monotonic() > until_s:
            return False
        time.sleep(0.1)
    return True


def _not_shared(unseen: list[int], directory: Path, group: Group) -> UserError:
    named = ", ".join(f"rank {rank} on {group.hosts[rank]}" for rank in unseen[:4])
    text = (
        f"checkpoint_format sharded needs a run directory that all nodes share, got {directory}, in which {named} can't see "
        "what others write. Set --run-dir to shared storage, or --checkpoint-format plain."
    )
    return _echoed(text, group)


def _echoed(text: str, group: Group) -> UserError:
    return UserError(text, printed_elsewhere=not group.is_rank0)


def write_shards(folder: Path, tensors: dict[str, Any], group: Group) -> dict[str, Fingerprint]:
    """Write every rank's part, and return size and digest of each file by its name. All ranks call this.

    What a rank has written is read again by the next one, maybe on another machine. Raises UserError on all ranks.
    """
    try:
        # A buffer, such as a batch norm's, is rank 0's; torch would deal such tensors out
        planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
        save(tensors, storage_writer=_Writer(folder, group.watch), planner=planner)
    except CheckpointException as failure:
        rank, (error, _) = min(failure.failures.items())
        if not isinstance(error, OSError):
            raise RuntimeError(f"rank {rank}: {error}") from None
        raise _echoed(str(disk_error("checkpoint", folder.parent.parent, error)), group) from None
    finally:
        group.watch.wait_for_others(False)
    own = sorted(folder.glob(f"__{group.rank}_*")) + ([folder / ".metadata"] if group.is_rank0 else [])
    written = group.gather({path.name: fingerprint_file(path) for path in own})
    problem = _problem(folder, written, group)
    wrong = {rank: text for rank, text in enumerate(group.gather(problem)) if text}
    if any(text == "not there" for text in wrong.values()):
        raise _not_shared(sorted(wrong), folder.parent.parent, group)
    if wrong:
        raise _echoed(f"checkpoint: {folder.parent.parent} must give back what was written, got {min(wrong.items())[1]}.", group)
    return {name: print_ for part in written for name, print_ in part.items()}


def _problem(folder: Path, written: list[dict[str, Fingerprint]], group: Group) -> str:
    """What is wrong with the files of the next rank; rank 0, which will list all of them, looks whether they are there."""
    everything = [folder / name for part in written for name in part] if group.is_rank0 else []
    following = written[(group.rank + 1) % group.world_size]
    if not all(_appears(path) for path in [*everything, *(folder / name for name in following)]):
        return "not there"
    return ", ".join(f"another {name}" for name, expected in following.items() if fingerprint_file(folder / name) != expected)


def fingerprint_file(path: Path) -> Fingerprint:
    """Size and SHA-256 of a file, read piece by piece."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}


def read_shards_into(folder: Path, tensors: dict[str, Any]) -> None:
    """Fill the tensors, each rank its part. All ranks call this. Raises RuntimeError where they don't fit."""
    try:
        load(tensors, storage_reader=_Reader(folder))
    except CheckpointException as failure:
        rank, (error, _) = min(failure.failures.items())
        raise RuntimeError(f"rank {rank}: {error}") from None


def read_all_shards(folder: Path) -> dict[str, Any]:
    """All tensors, in one process: the mapping that `write` was given."""
    metadata = _Reader(folder).read_metadata()
    entries = metadata.state_dict_metadata.items()
    flat = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in entries
            if isinstance(entry, TensorStorageMetadata)}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # that is what is meant
        load(flat, storage_reader=_Reader(folder), no_dist=True)
    nested: dict[str, Any] = {}
    for name, tensor in flat.items():
        place, path = nested, (metadata.planner_data or {})[name]
        for key in path[:-1]:
            place = place.setdefault(key, {})
        place[path[-1]] = tensor
    return nested
