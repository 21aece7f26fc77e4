"""The folder `shards/` of a checkpoint: each rank writes and reads its own tensors, by torch.distributed.checkpoint.

`__0_0.distcp` is rank 0's part and so on; `.metadata`, by rank 0, says where each part of a tensor is, so that they
load on any number of ranks. The folder has to be on storage that all nodes share.

torch's `save` and `load` have the ranks unpickle what they send each other. So the steps of `save`, which its classes
of planner and writer have for themselves, are taken here one by one, and the group carries what passes between ranks.
"""

import errno
import hashlib
import io
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import WriteResult

from rankup.errors import UserError, disk_error
from train.group.group import Group, on_rank0
from train.run.shard_pickles import SENT, SafeReader

FOLDER = "shards"
VISIBLE_S = 10.0  # NFS caches directories: a node may see another node's new file this much later
Fingerprint = dict[str, Any]  # {"bytes": int, "sha256": str} of one file


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


def _wait_until_visible(path: Path, *, size: int = 0) -> bool:
    until_s = time.monotonic() + VISIBLE_S
    while not path.exists() or path.stat().st_size != size:
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

    All ranks call this. Each takes the digest of what it writes as it writes it, and rank 0, which publishes, has to
    see all files in their sizes. Raises UserError on all ranks.
    """
    directory = folder.parent.parent
    # Rank 0 writes what all ranks hold, such as a batch norm's buffers; torch's default spreads it over the ranks
    planner, writer = DefaultSavePlanner(dedup_save_to_lowest_rank=True), FileSystemWriter(folder)
    writer.fs = files = _HashedFiles()
    planner.set_up_planner(tensors, writer.storage_meta(), group.is_rank0)
    writer.set_up_storage_writer(group.is_rank0)
    local = _on_all_ranks(group, directory, lambda: writer.prepare_local_plan(planner.create_local_plan()))
    # All come to the same plans for all, from the same local ones: none has to be sent back
    plans, metadata = planner.create_global_plan(local)
    plan = planner.finish_plan(writer.prepare_global_plan(plans)[group.rank])
    results = _on_all_ranks(group, directory, lambda: _write(writer, plan, planner))
    _on_all_ranks(group, directory, lambda: writer.finish(metadata, results) if group.is_rank0 else None)
    written = {name: entry for part in group.gather(files.fingerprints()) for name, entry in part.items()}
    seen = not group.is_rank0 or all(
        _wait_until_visible(folder / name, size=entry["bytes"]) for name, entry in written.items()
    )
    if not group.broadcast(seen):
        raise _not_shared([0], directory, group)
    return written


class _HashedFiles(FileSystem):
    """Where torch's writer writes to. Takes the digest of each file on the way: each is written from its beginning."""

    def __init__(self) -> None:
        self.written: dict[str, _Hashed] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        self.written[Path(path).name] = file = _Hashed(path, mode)
        with io.BufferedWriter(file) as stream:
            yield stream

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.written[Path(new_path).name] = self.written.pop(Path(path).name)

    def fingerprints(self) -> dict[str, Fingerprint]:
        return {name: {"bytes": file.size, "sha256": file.sha256.hexdigest()} for name, file in self.written.items()}


class _Hashed(io.FileIO):
    def __init__(self, path: str | os.PathLike[str], mode: str) -> None:
        super().__init__(path, mode)
        self.size, self.sha256 = 0, hashlib.sha256()

    def write(self, data: Any) -> int:
        count = super().write(data)
        self.sha256.update(memoryview(data)[:count])
        self.size += count
        return count


def _on_all_ranks(group: Group, directory: Path, work: Callable[[], Any]) -> list[Any]:
    """Call `work` on each rank, and return what it returned on all ranks, in their order.

    Raises UserError on all ranks where one can't write to `directory`. Any other error is a fault, which the others see
    as a lost peer.
    """
    result, problem = None, ""
    try:
        result = work()
    except OSError as error:
        problem = str(disk_error("checkpoint", directory, error))
    with torch.serialization.safe_globals([*SENT]):
        found = group.gather_tensors((result, problem))
    if problems := [problem for _, problem in found if problem]:
        raise UserError(problems[0], printed_elsewhere=not group.is_rank0)
    return [result for result, _ in found]


def _write(writer: FileSystemWriter, plan: SavePlan, planner: DefaultSavePlanner) -> list[WriteResult]:
    """Write this rank's part. Raises OSError where the disk is full."""
    try:
        return writer.write_data(plan, planner).wait()
    except RuntimeError as error:
        # On a full disk torch.save raises "unexpected pos 64 vs 0", and the system's error is only its context
        cause = error.__context__
        raise cause if isinstance(cause, OSError) else OSError(errno.EIO, str(error).splitlines()[0]) from None


def fingerprint_file(path: Path) -> Fingerprint:
    """Size in bytes and SHA-256 of a file, read piece by piece: a shard may be larger than the memory that is free."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}


def read_shards_into(folder: Path, tensors: dict[str, Any], group: Group) -> None:
    """Fill `tensors`, a nested mapping, in place, each rank its part. All ranks call this.

    Raises, on all ranks, RuntimeError where names or shapes don't fit, and UserError where `.metadata` can't be read.
    """
    problem, unreadable = "", False
    try:
        SafeReader(folder).read_metadata()  # `load` would hide why it can't be read, and print two tracebacks
        _load(folder, tensors)
    except UserError as unread:
        problem, unreadable = str(unread), True
    except CheckpointException as failure:
        ((error, _),) = failure.failures.values()
        problem = str(error)
    for rank, (text, by_nobody) in enumerate(group.gather((problem, unreadable))):
        if by_nobody:
            raise UserError(text, printed_elsewhere=not group.is_rank0)
        if text:
            raise RuntimeError(f"rank {rank}: {text}")


def _load(folder: Path, tensors: dict[str, Any]) -> None:
    """Fill `tensors` in place. No rank has to ask another what to read: `.metadata` says where each part is."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as intended
        load(tensors, storage_reader=SafeReader(folder), no_dist=True)


def read_all_shards(folder: Path) -> dict[str, Any]:
    """All tensors whole, on the CPU of one process: the nested mapping that `write_shards` was given."""
    metadata = SafeReader(folder).read_metadata()
    entries = metadata.state_dict_metadata.items()
    flat = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in entries
            if isinstance(entry, TensorStorageMetadata)}
    _load(folder, flat)
    nested: dict[str, Any] = {}
    for name, tensor in flat.items():
        # "model.layer.weight" is model -> "layer.weight": the dots alone don't say where to split
        *parents, last = (metadata.planner_data or {})[name]
        inner = nested
        for key in parents:
            inner = inner.setdefault(key, {})
        inner[last] = tensor
    return nested
