"""What may be unpickled of a sharded checkpoint: its `.metadata`, and what the ranks send each other as they save.

A pickle runs whatever it names. So both know the classes that torch.distributed.checkpoint writes, and nothing else.
"""

import enum
import pickle
import platform
import re
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from rankup.errors import UserError

PART = re.compile(r"__\d+_\d+\.distcp")  # a file of one rank, beside `.metadata`


def enum_member(kind: type[enum.Enum], name: str) -> enum.Enum:
    """What Python 3.11.0 to 3.11.3, Debian 12's among them, call `getattr` for when they unpickle a member of an Enum.

    Raises pickle.UnpicklingError for an attribute of anything else.
    """
    if not (isinstance(kind, type) and issubclass(kind, enum.Enum)) or name not in kind.__members__:
        raise pickle.UnpicklingError(f"getattr({kind!r}, {name!r}) has no place in it")
    return kind[name]


# What a rank's plan, and the places to which it wrote, consist of beside plain values. None of them does anything when
# it is made, so what another process sends can only be a wrong plan.
SENT = (
    SavePlan, WriteItem, WriteItemType, TensorWriteData, MetadataIndex, ChunkStorageMetadata, TensorProperties,
    _MEM_FORMAT_ENCODING, WriteResult, _StorageInfo, (enum_member, "builtins.getattr"),
)


class SafeReader(FileSystemReader):
    """Reads `.metadata`, which is pickled, without running code that somebody may have put into it."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Raises UserError where this Python and this torch can't read what others wrote."""
        path = Path(self.path) / ".metadata"
        try:
            with path.open("rb") as file:
                metadata: Metadata = _SafeUnpickler(file).load()
            for info in getattr(metadata, "storage_data", {}).values():
                if not PART.fullmatch(info.relative_path):
                    raise pickle.UnpicklingError(f"it names a file elsewhere, {info.relative_path}")
            return metadata
        except Exception as error:  # of a class that moved, pickle raises nearly anything
            # Never "set --fresh": the digest was right, so all of the training is in there
            raise UserError(
                f"checkpoint: {path} is whole, but Python {platform.python_version()} with torch {torch.__version__} "
                f"can't read it ({' '.join(str(error).split())[:200]}). Nothing is lost: run the same command with the "
                "versions that wrote it, which state.json beside it names."
            ) from None


class _SafeUnpickler(pickle.Unpickler):
    """Knows the classes that torch.distributed.checkpoint writes of tensors, and refuses every other name.

    `BytesStorageMetadata` is of values that torch itself would unpickle without a limit.
    """

    NAMES = frozenset({
        "Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING", "_StorageInfo", "_get_layout", "Size", "PosixPath",
    })

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return enum_member
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if module.split(".")[0] in ("torch", "pathlib") and (dtype or name in self.NAMES):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in it")
