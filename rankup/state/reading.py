"""Copies as read and verified, and the format of sharded ones.

One rank reads a plain copy, and the others get its files over the network: nodes need no shared disk, and all ranks go
on from the same copy.

Of a sharded one each rank writes the parts of tensors that it holds, and reads the slices that it needs.
`rank-00000.safetensors` is rank 0's part and so on. Tensors that all ranks hold whole are in rank 0's. The index,
`shards.json` in place of `tree.json`, has a table beside the tree: the type and the whole shape of each tensor, and
rank and offset of each of its parts. So a copy loads at any number of ranks, split in any way or not at all. The folder
has to be on storage that all nodes share.
"""

import errno
import json
import math
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import torch

from rankup.errors import UserError, disk_error
from rankup.group.group import Group
from rankup.places.files import read_json
from rankup.places.lease import RUN_ID
from rankup.state import tree
from rankup.state.copies import STATE, Fingerprint, known_damaged, list_copies, passed_over, verify, write_durably
from rankup.state.tree import DTYPES, TensorFile, decode, encode
from rankup.timing import VISIBLE_S

INDEX = "shards.json"
TYPES = {name: dtype for dtype, name in DTYPES.items()}
# check(path, record), and check(path, record, tracked) once they are read: looks at a copy. Raises UserError
# where it is of another kind than the caller's, and ValueError where it is damaged
Check = Callable[..., object]



def no_check(path: Path, record: dict[str, Any], tracked: dict[str, Any] | None = None) -> None:
    """Any record will do."""


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy of the state, verified.

    `record`: what `state.json` says, `step`, `run` and `attempt` among it. `tracked`: the tracked items, on the CPU; {}
    where all of that is still in the ranks' files, which `index` describes.
    """

    path: Path
    record: dict[str, Any]
    tracked: dict[str, Any]
    index: bytes = field(default=b"", repr=False)

    @property
    def step(self) -> int:
        return int(self.record["step"])

    @property
    def sharded(self) -> bool:
        return self.index != b""

    def as_plain(self) -> Self:
        """The same with all shards read into this process, as if it had been saved plain."""
        if not self.sharded:
            return self
        with Shards(self.path, self.index) as shards:
            return replace(self, tracked=shards.read_all(), index=b"")


def load(path: Path, check: Check = no_check) -> Copy:
    """Read the copy in the folder `path`. Raises UserError where it is damaged, refused by `check`, or no copy."""
    found, problem = read(path, check)
    if found is None:
        raise UserError(f"checkpoint: {path} must be a whole checkpoint, got a damaged one: {problem:.300}.")
    return found


def load_newest(directory: Path, warn: Callable[[str], None], check: Check = no_check) -> Copy | None:
    """The newest copy in `directory` that verifies, or None where there is none at all. Warns of those passed over.

    Raises UserError where all are damaged, and where `check` refuses the newest good one.
    """
    damaged: dict[str, str] = {}
    found = None
    for path in reversed(list_copies(directory)):
        found, problem = read(path, check)
        if found is not None:
            break
        damaged[f"checkpoint {path.name}"] = problem
        known_damaged.add(path)
    passed_over(directory, damaged, found, warn)
    return found


def share(copy: Copy | None, group: Group, *, source: int = 0) -> Copy | None:
    """The `copy` of rank `source` on all ranks, None where it has none. All ranks call this."""
    if group.world_size == 1:
        return copy
    own = tree.to_files(copy.tracked) if copy is not None and group.rank == source else {}
    about = [str(copy.path), copy.record, copy.index.decode(), [*own]] if copy is not None and own else None
    if (about := group.broadcast(about, source=source)) is None:
        return None
    path, record, index, names = about
    files = dict[str, bytes]()
    for name in names:
        content = own.get(name, b"")
        whole = content if isinstance(content, bytes) else b"".join(content)
        files[name] = group.broadcast_bytes(whole, source=source)
    return copy if own else Copy(Path(path), record, tree.from_files(files), index.encode())


def read(path: Path, check: Check = no_check) -> tuple[Copy | None, str]:
    """The copy in the folder `path`, or what is wrong with it. Raises UserError where `check` refuses it."""
    files, problem = verify(path)
    if problem:
        return None, problem
    try:
        record = json.loads(files[STATE])
        check(path, record)  # first: a copy of another kind may hold what nobody here can read
        if not RUN_ID.fullmatch(run := str(record.get("run", ""))):  # it names folders
            raise UserError(f'checkpoint: {path} must be of a run with an id, got "{run:.80}".')
        if not isinstance(record.get("attempt"), str):
            raise ValueError(f"{STATE}: attempt is missing")
        if INDEX in files:
            with Shards(path, files[INDEX]) as shards:
                shards.check()
            return Copy(path, record, {}, files[INDEX]), ""
        tracked = tree.from_files(files)
        check(path, record, tracked)
        return Copy(path, record, tracked), ""
    except UserError:
        raise
    except Exception as error:  # every digest is right, so somebody made them: it may be anything
        return None, f"its files don't fit together ({' '.join(str(error).split())[:200]})"


# Sharded: both ways --------------------------------------------------------------------------------------------------


def file_of(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def check_shared(folder: Path, token: str, group: Group) -> None:
    """Raises UserError on all ranks where one does not see in `folder` the lease with rank 0's `token`. All ranks call
    this.

    Before the training: without shared storage the first save would fail, hours later.
    """
    seen = _wait_until(lambda: sees(folder, token))
    if unseen := [rank for rank, each in enumerate(group.gather(seen)) if not each]:
        raise _not_shared(unseen, folder, group)


def sees(folder: Path, token: str) -> bool:
    """Whether this rank finds in `folder` what rank 0, whose lease has this token, has just written there."""
    return bool((read_json(folder / "lease.json") or {}).get("token") == token)


# Writing --------------------------------------------------------------------------------------------------------

Part = tuple[dict[str, list[int]], Fingerprint]  # what one rank writes: where its parts begin, and its file


def own_parts(tensors: dict[str, Any], rank: int) -> tuple[dict[str, torch.Tensor], dict[str, list[int]]]:
    """What this rank writes of plain tensors and DTensors, and where each part begins. Raises UserError."""
    parts = {name: part for name, tensor in tensors.items() if (part := _own_part(name, tensor, rank))}
    return {name: local for name, (local, _) in parts.items()}, {name: list(at) for name, (_, at) in parts.items()}


def write_part(staging: Path, rank: int, parts: dict[str, torch.Tensor]) -> Fingerprint:
    """Write a rank's part into `staging`, which rank 0 has made. Raises UserError."""
    try:
        if not _wait_until(staging.exists):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        return write_durably(staging / file_of(rank), TensorFile(parts))
    except OSError as error:
        raise disk_error("checkpoint", staging.parent, error) from None


def check_visible(staging: Path, parts: list[Part], group: Group) -> None:
    """Raises UserError where rank 0 does not see what another rank wrote, and OSError where `staging` is gone."""
    staging.stat()
    for rank, (_, entry) in enumerate(parts):
        path, size = staging / file_of(rank), entry["bytes"]
        if not _wait_until(lambda path=path, size=size: path.exists() and path.stat().st_size == size):  # type: ignore[misc]
            raise _not_shared([rank], staging.parent, group)


def index(tree: dict[str, Any], tensors: dict[str, Any], parts: list[Part]) -> dict[str, bytes]:
    """The file that says where each tensor is."""
    table = {
        name: {
            "dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape),
            "parts": [[rank, offsets[name]] for rank, (offsets, _) in enumerate(parts) if name in offsets],
        }
        for name, tensor in tensors.items()
    }
    return {INDEX: json.dumps({"tree": tree, "shards": table}).encode()}


# Reading --------------------------------------------------------------------------------------------------------


class Shards:
    """The tensors of a sharded copy in the folder `path`, whose index is `content`. `with` closes its files.

    Every method raises ValueError, KeyError or another error where the files are not what a rank wrote.
    """

    def __init__(self, path: Path, content: bytes) -> None:
        values = json.loads(content)
        self.path, self.tree, self.table = path, values["tree"], values["shards"]
        self._open = ExitStack()
        self._files: dict[int, Any] = {}

    def __enter__(self) -> "Shards":
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    def check(self) -> None:
        """Whether the parts are in the files and make up all tensors. Reads nothing but the heads of the files."""
        if not isinstance(self.tree, dict):
            raise ValueError("the tree is no mapping")
        for name, entry in self.table.items():
            if entry["dtype"] not in TYPES:
                raise ValueError(f"{name} has the type {entry['dtype']}")
            found = 0
            for _, offset, shape in self._parts(name):
                if not all(type(number) is int for number in (*offset, *entry["shape"])):
                    raise ValueError(f"{name} has places that are no whole numbers")
                if any(o < 0 or o + n > whole for o, n, whole in zip(offset, shape, entry["shape"], strict=True)):
                    raise ValueError(f"a part of {name} lies outside of it")
                found += math.prod(shape)
            if found != math.prod(entry["shape"]):
                raise ValueError(f"{name} has {found} of {math.prod(entry['shape'])} elements")
        decode(self.tree, lambda name: torch.empty(self.table[name]["shape"], device="meta"))

    def read_all(self, *items: str) -> dict[str, Any]:
        """The tracked items, or those of `items` that are there, with whole tensors, on the CPU of one process."""
        def take(name: str) -> torch.Tensor:
            entry = self.table[name]
            whole = torch.empty(entry["shape"], dtype=TYPES[entry["dtype"]])
            self._fill(name, whole, [0] * whole.ndim)
            return whole

        return dict(decode({item: node for item, node in self.tree.items() if item in (items or self.tree)}, take))

    def read_into(self, target: dict[str, Any]) -> dict[str, Any]:
        """The tracked items with the tensors of `target`, which are split as this rank needs them, filled in place.

        `target` has the same structure, but may lack items. Raises ValueError where names or shapes differ.
        """
        _, tensors = encode(target)
        for name, tensor in tensors.items():
            if name not in self.table:
                raise ValueError(f"{name} is not in it")
            if list(tensor.shape) != self.table[name]["shape"]:
                raise ValueError(f"{name} has the shape {self.table[name]['shape']} there, {list(tensor.shape)} here")
            self._fill(name, *local_part(name, tensor))

        def take(name: str) -> torch.Tensor:
            if name not in tensors:
                raise ValueError(f"{name} has no place here")
            return tensors[name]

        return dict(decode({item: node for item, node in self.tree.items() if item in target}, take))

    def _parts(self, name: str) -> list[tuple[Any, list[int], list[int]]]:
        """File, offset and shape of each part of a tensor."""
        from safetensors import safe_open

        parts = []
        for rank, offset in self.table[name]["parts"]:
            if rank not in self._files:
                file = safe_open(self.path / file_of(rank), framework="pt")
                self._files[rank] = self._open.enter_context(file)
            parts.append((self._files[rank], offset, self._files[rank].get_slice(name).get_shape()))
        return parts

    def _fill(self, name: str, local: torch.Tensor, offset: list[int]) -> None:
        """Fill what a rank holds of a tensor, from `offset` on."""
        left = local.numel()
        for file, begin, shape in self._parts(name):
            if not local.ndim:
                local.copy_(file.get_tensor(name))
                return
            low = [max(own, other) for own, other in zip(offset, begin, strict=True)]
            high = [min(own + n, other + m)
                    for own, n, other, m in zip(offset, local.shape, begin, shape, strict=True)]
            if all(a < b for a, b in zip(low, high, strict=True)):
                there, here = (
                    tuple(slice(a - o, b - o) for a, b, o in zip(low, high, origin, strict=True))
                    for origin in (begin, offset)
                )
                local[here].copy_(file.get_slice(name)[there])
                left -= local[here].numel()
        if left:
            raise ValueError(f"{name} lacks {left} elements")


def _own_part(name: str, tensor: Any, rank: int) -> tuple[torch.Tensor, list[int]] | None:
    """What this rank writes of a tensor, and its offset; None where others write all of it."""
    if not hasattr(tensor, "to_local"):
        return (tensor, [0] * tensor.ndim) if rank == 0 else None
    copies = [place for place, kind in zip(tensor.device_mesh.get_coordinate(), tensor.placements, strict=True)
              if kind.is_replicate()]
    local, offset = local_part(name, tensor)
    return (local, offset) if local.numel() and not any(copies) else None


def local_part(name: str, tensor: Any) -> tuple[torch.Tensor, list[int]]:
    """What this rank holds of a tensor, and its offset. Raises UserError for parts that are no slice."""
    if not hasattr(tensor, "to_local"):
        return tensor, [0] * tensor.ndim
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if not all(type(kind) in (Replicate, Shard) for kind in tensor.placements):
        raise UserError(f"state: {name} must be split by Shard and Replicate, got {tensor.placements}.")
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tensor.to_local(), [*offset]


def _wait_until(condition: Callable[[], bool]) -> bool:
    """Whether that comes to be: a network file system may show another machine's files seconds later."""
    until_s = time.monotonic() + VISIBLE_S
    while not condition():
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
