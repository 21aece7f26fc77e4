"""Copies as read and verified, and the format of sharded ones.

One rank reads a plain copy, and the others get its files over the network: nodes need no shared disk, and all ranks go
on from the same copy.

Of a sharded one each rank writes the parts of tensors that it holds, and reads the slices that it needs.
`rank-00000.safetensors` is rank 0's part and so on. Tensors that all ranks hold whole are in rank 0's. The index,
`shards.json` in place of `tree.json`, has a table beside the tree: the type and the whole shape of each tensor, and
rank and offset of each of its parts. So a copy loads at any number of ranks, split in any way or not at all. The folder
has to be on storage that all nodes share.
"""

import json
import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import torch

from rankup.errors import UserError, disk_error
from rankup.group.group import Group
from rankup.places.files import staged
from rankup.places.lease import RUN_ID
from rankup.state import tree
from rankup.state.copies import STATE, Fingerprint, known_damaged, list_copies, passed_over, verify, write_durably
from rankup.state.tree import DTYPES, TensorFile, decode, encode

INDEX = "shards.json"
OWN = "rankup_"  # items whose names begin so are no objects of the user
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


def export(copy: Copy, file: Path, *, item: str = "") -> str:
    """Write the tracked items of a plain copy to `file`, for `torch.load(file, weights_only=True)`: a dict from the
    name of each item to its state. With `item`, the state of that item alone. Returns what was written, in words.

    Raises UserError where the copy has no such item, or the file can't be written.
    """
    items = {name: state for name, state in copy.tracked.items() if not name.startswith(OWN)}
    if item and item not in items:
        raise UserError(f"--item must be one of {', '.join(items)}, got {item}.")
    state = items[item] if item else items
    try:
        with staged(file) as staging, staging.open("wb") as opened:
            torch.save(state, opened)
            opened.flush()
            size = opened.tell()
    except OSError as error:
        raise UserError(f"export: the file must be one that can be written, got {file}: {error.strerror}.") from None
    what = "the weights" if item == "model" else item or ", ".join(items)
    count = f"{len(state)} tensors, " if item == "model" else ""
    return f"{file}: {what} of step {copy.step}, {count}{size / 1e6:.1f} MB"


# Sharded: both ways --------------------------------------------------------------------------------------------------


def file_of(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


# Writing --------------------------------------------------------------------------------------------------------

Part = tuple[dict[str, list[int]], Fingerprint]  # what one rank writes: where its parts begin, and its file


def own_parts(tensors: dict[str, Any], rank: int) -> tuple[dict[str, torch.Tensor], dict[str, list[int]]]:
    """What this rank writes of plain tensors and DTensors, and where each part begins: no other rank writes that.

    Raises UserError.
    """
    parts, offsets = dict[str, torch.Tensor](), dict[str, list[int]]()
    for name, tensor in tensors.items():
        local, offset = local_part(name, tensor)
        if hasattr(tensor, "to_local"):
            at = zip(tensor.device_mesh.get_coordinate(), tensor.placements, strict=True)
            own = local.numel() > 0 and not any(place for place, kind in at if kind.is_replicate())
        else:
            own = rank == 0
        if own:
            parts[name], offsets[name] = local, offset
    return parts, offsets


def write_part(staging: Path, rank: int, parts: dict[str, torch.Tensor]) -> Fingerprint:
    """Write a rank's part into `staging`, which rank 0 has made. Raises UserError."""
    try:
        return write_durably(staging / file_of(rank), TensorFile(parts))
    except OSError as error:
        raise disk_error("checkpoint", staging.parent, error) from None


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
