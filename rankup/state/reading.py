"""Reading and verifying copies. One rank reads a plain copy and sends it to the others. A sharded copy is on storage
that all nodes share, and each rank reads the slices that it needs."""

import contextlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch

from rankup.errors import UserError, disk_errors
from rankup.group.group import Group
from rankup.places.files import open_regular, staged
from rankup.places.lease import RUN_ID
from rankup.state.copies import STATE, Check, Damaged, list_copies, no_check, read_manifest, verify
from rankup.state.tree import TENSORS, TREE, TensorFile, decode, encode, local_parts

OWN = "rankup_"  # names of items that the library adds to the user's items begin with this


@dataclass(frozen=True, slots=True)
class Copy:
    """A verified copy of the state.

    `record`: the content of `state.json`, including `step`, `run` and `attempt`. `tracked`: the tracked items, on the
    CPU. For a `sharded` copy it is {}, because the items are still in the files.
    """

    path: Path
    record: dict[str, Any]
    tracked: dict[str, Any]
    sharded: bool = False

    @property
    def step(self) -> int:
        return int(self.record["step"])

    def as_plain(self) -> Self:
        """Return the copy with all shards read into this process, as if it were saved plain. Raises Damaged."""
        if not self.sharded:
            return self
        with _fitting(self.path):
            return replace(self, tracked=CopyFiles(self.path).read_all(), sharded=False)


def load_newest(directory: Path, warn: Callable[[str], None], check: Check = no_check) -> Copy | None:
    """Return the newest copy in `directory` that verifies, or None if there are no copies. Warns of skipped copies.

    Raises UserError if all copies are damaged, and if `check` refuses the newest good one.
    """
    each = ((f"checkpoint {path.name}", partial(read, path, check)) for path in reversed(list_copies(directory)))
    return newest_whole(directory, each, warn)


def newest_whole(
    place: Path | str, copies: Iterable[tuple[str, Callable[[], Copy]]], warn: Callable[[str], None] | None
) -> Copy | None:
    """Return the first whole copy, or None if there are no copies. `copies`: name and reading function of each copy.

    `place` says where they are. `warn` is called for each skipped copy; None if another rank warns. Raises UserError if
    all are damaged, because a silent fresh start would lose days of work.
    """
    damaged = dict[str, str]()
    for name, read_it in copies:
        try:
            found = read_it()
        except Damaged as error:
            damaged[name] = error.why
            continue
        if warn is not None:
            for other, why in damaged.items():
                warn(f"{other} was skipped: {why}")
        return found
    if damaged:
        said = "; ".join(f"{name}: {why}" for name, why in damaged.items())
        raise UserError(
            f"checkpoint: {place} must hold a whole checkpoint, got only damaged ones: {said}. Restore one from a "
            "backup, or set --fresh to start anew, which keeps them aside.", printed_elsewhere=warn is None,
        )
    return None


def read(path: Path, check: Check = no_check) -> Copy:
    """Read the copy in the folder `path`. Raises Damaged, and UserError if `check` refuses the copy."""
    record = verify(path)
    with _fitting(path):
        check(path, record)  # before the files are read: this process may be unable to read a copy of another kind
        if not RUN_ID.fullmatch(run := str(record.get("run", ""))):  # the id becomes the name of folders
            raise UserError(f'checkpoint: {path} must be of a run with an id, got "{run:.80}".')
        if not isinstance(record.get("attempt"), str):
            raise ValueError(f"{STATE}: attempt is missing")
        files = CopyFiles(path)
        return Copy(path, record, {} if files.sharded else files.read_all(), files.sharded)


@contextlib.contextmanager
def _fitting(path: Path) -> Iterator[None]:
    """Turn every error but UserError into Damaged. The digests are right, so the files were wrong when written."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        why = f"its files don't fit together ({' '.join(str(error).split())[:200]})"
        raise Damaged(path, why) from None


def share(read_it: Callable[[], Copy], group: Group, *, source: int = 0) -> Copy:
    """Return on all ranks the copy that `read_it` returns on rank `source`. All ranks call this. If `read_it` raises
    Damaged, UserError or PeerLost, all ranks raise it."""
    copy: Copy | None = None

    def call() -> tuple[str, str] | None:
        nonlocal copy
        try:
            copy = read_it()
        except Damaged as error:
            return error.path, error.why
        return None

    if damage := group.on_rank0(call, source=source):
        raise Damaged(*damage, printed_elsewhere=not group.is_rank0)
    if copy is not None and group.world_size == 1:
        return copy
    from safetensors.torch import load

    nodes, tensors = encode(copy.tracked) if copy is not None else ({}, {})
    about = [str(copy.path), copy.record, copy.sharded, nodes] if copy is not None else []
    path, record, sharded, nodes = group.broadcast(about, source=source)
    # Sent as safetensors: torch.load with weights_only would take ten times as long
    content = group.broadcast_bytes(b"".join(TensorFile(tensors)), source=source)
    return copy or Copy(Path(path), record, decode(nodes, load(content).__getitem__), sharded)


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a tensor, or all of it. `tensor` is mapped from the file. `whole`: the shape of the whole tensor."""

    tensor: torch.Tensor
    offset: list[int]
    whole: list[int]


class CopyFiles:
    """The tree and the tensors in the files of the copy `path`, plain or sharded. Until tensors are asked for, only the
    tree and the headers of the files are read. Files that no rank wrote may raise any error. `items`: the names of the
    tracked items."""

    def __init__(self, path: Path) -> None:
        from safetensors import safe_open

        with open_regular(path / TREE) as content:
            self._tree = json.load(content)["tree"]
        self.items = {*self._tree}
        self._parts, self.sharded = defaultdict[str, list[_Part]](list), False
        for name in read_manifest(path)["files"]:
            if not name.endswith(TENSORS):
                continue
            file: Any = safe_open(path / name, framework="pt")
            self.sharded |= (is_part := name.startswith("rank-"))
            item = "" if is_part else f"{name.removesuffix(TENSORS)}/"
            places = json.loads((file.metadata() or {}).get("places", "{}"))
            for key in file.keys():  # noqa: SIM118 (safe_open returns no dict)
                tensor = file.get_tensor(key)
                offset, whole = places.get(key, ([0] * tensor.ndim, [*tensor.shape]))
                self._parts[item + key].append(_Part(tensor, offset, whole))

    def read_all(self, *items: str) -> dict[str, Any]:
        """Return the tracked items, or only `items` if any are named, with whole tensors on the CPU."""
        def take(name: str) -> torch.Tensor:
            part = self._parts[name][0]
            whole = torch.empty(part.whole, dtype=part.tensor.dtype)
            self._fill(name, whole, [0] * whole.ndim)
            return whole

        return self._items(items or self._tree, take)

    def read_into(self, target: dict[str, Any]) -> dict[str, Any]:
        """Fill the tensors of `target` in place, each split as this rank needs it. Return the tracked items with these
        tensors. `target` may lack items. Raises ValueError if names or shapes differ."""
        _, tensors = encode(target)
        local, places = local_parts(tensors)
        for name, (offset, shape) in places.items():
            if name not in self._parts:
                raise ValueError(f"{name} is not in it")
            if shape != (there := self._parts[name][0].whole):
                raise ValueError(f"{name} has the shape {there} there, {shape} here")
            self._fill(name, local[name], offset)

        def take(name: str) -> torch.Tensor:
            if name not in tensors:
                raise ValueError(f"{name} has no place here")
            return tensors[name]

        return self._items(target, take)

    def _items(self, wanted: Iterable[str], take: Callable[[str], torch.Tensor]) -> dict[str, Any]:
        return dict(decode({item: node for item, node in self._tree.items() if item in wanted}, take))

    def _fill(self, name: str, local: torch.Tensor, offset: list[int]) -> None:
        """Fill `local`, a rank's part of the tensor `name`, which begins at `offset` of the whole tensor."""
        left = local.numel()
        for part in self._parts[name]:
            low = [max(own, other) for own, other in zip(offset, part.offset, strict=True)]
            high = [min(own + n, other + m) for own, n, other, m
                    in zip(offset, local.shape, part.offset, part.tensor.shape, strict=True)]
            if all(a < b for a, b in zip(low, high, strict=True)):
                here, there = (
                    tuple(slice(a - o, b - o) for a, b, o in zip(low, high, origin, strict=True))
                    for origin in (offset, part.offset)
                )
                local[here].copy_(part.tensor[there])
                left -= local[here].numel()
        if left:
            raise ValueError(f"{name} lacks {left} elements")


def export(copy: Copy, file: Path, *, item: str = "") -> str:
    """Write the tracked items of a plain copy to `file`, for `torch.load(file, weights_only=True)`: a dict from the
    name of each item to its state. With `item`, write the state of that item alone. Return a description of the file.

    Raises UserError if the copy has no such item, or the file can't be written.
    """
    items = {name: state for name, state in copy.tracked.items() if not name.startswith(OWN)}
    if item and item not in items:
        raise UserError(f"--item must be one of {', '.join(items)}, got {item}.")
    state = items[item] if item else items
    with disk_errors("export", file.parent), staged(file) as staging, staging.open("wb") as opened:
        torch.save(state, opened)
    return f"{file}: {item or ', '.join(items)} of step {copy.step}, {file.stat().st_size / 1e6:.1f} MB"
