"""Reading and verifying copies. A plain copy is shipped to the memory of each node, where all ranks map it. The files
of a sharded copy, on storage that all nodes share, are mapped where they are: each rank reads the slices it needs."""

import contextlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import torch

from rankup.errors import UserError, disk_errors
from rankup.places.files import staged
from rankup.places.lease import RUN_ID
from rankup.state.copies import STATE, Check, Damaged, Part, list_copies, no_check, part_of, read_manifest, read_record
from rankup.state.shipping import Memory, Shipment, ship
from rankup.state.tree import TENSORS, TREE, Tensors, decode, encode, local_parts, tensor_at, tensors_in

OWN = "rankup_"  # names of items that the library adds to the user's items begin with this
# The group of a process that reads a copy alone
ALONE = SimpleNamespace(rank=0, world_size=1, is_rank0=True, gather=lambda value: [value],
                        on_rank0=lambda work, source=0: work(), collective=lambda call: call())
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Copy:
    """A verified copy of the state, in the folder `path`. `record`: the content of `state.json`, including `step`,
    `run` and `attempt`. `files`: its other files."""

    path: Path
    record: dict[str, Any]
    files: "CopyFiles"

    @property
    def step(self) -> int:
        return int(self.record["step"])

    @property
    def sharded(self) -> bool:
        return self.files.sharded

    @property
    def tracked(self) -> dict[str, Any]:
        """The tracked items, on the CPU, with whole tensors. Their memory is that of the copy. Raises Damaged."""
        with _fitting(self.path):
            return self.files.read_all()


def load_newest(directory: Path, warn: Callable[[str], None], check: Check = no_check) -> Copy | None:
    """Return the newest copy in `directory` that verifies, or None if there are no copies. Warns of skipped copies.

    Raises UserError if all copies are damaged, and if `check` refuses the newest good one.
    """
    each = ((f"checkpoint {path.name}", partial(read, path, check)) for path in reversed(list_copies(directory)))
    return newest_whole(directory, each, warn)


def newest_whole(
    place: Path | str, copies: Iterable[tuple[str, Callable[[], T]]], warn: Callable[[str], None] | None
) -> T | None:
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
    return load(ALONE, lambda: path, check=check, in_place=lambda path: path)


def load(
    group: Any, find: Callable[[], Path], *, source: int = 0, check: Check = no_check, others: Sequence[Path] = (),
    in_place: Callable[[Path], Path] | None = None,
) -> Copy:
    """Read the copy in a folder of rank `source`, which `find` returns there, on all ranks. All ranks call this.
    `others`: folders in which this rank may have the same files. `in_place`: returns where this rank sees the folder;
    the files of a sharded copy are then used there. Raises on all ranks: Damaged, and UserError if `check` refuses."""
    def look() -> dict[str, Any]:
        try:
            where = find()
            manifest, parts = read_manifest(where)
            about = {"where": str(where), "from_anywhere": str(where.absolute()), "files": manifest["files"]}
            return {**about, "record": _record(where, parts, check)}
        except Damaged as error:
            return {"damaged": [error.path, error.why]}

    about = group.on_rank0(look, source=source)
    if "damaged" in about:
        raise Damaged(*about["damaged"], printed_elsewhere=not group.is_rank0)
    parts = [part_of(name, entry) for name, entry in about["files"].items() if name != STATE]
    path, folders = Path(about["where"]), [*others, Path(about["from_anywhere"])]
    sharded = any(is_shard(part.name) for part in parts)
    seen = in_place(path) if in_place is not None else None
    if sharded and all(group.gather(seen is not None and _same_files(seen, about["files"]))):
        path = seen or path
        shipments = [Shipment(part, [range(group.world_size)], [path / part.name], in_place=True) for part in parts]
        memory = Memory.alone(group)
    else:
        memory = Memory.shared(group)
        nodes = sorted(memory.nodes, key=lambda ranks: source not in ranks)
        folders = folders[-1:] if group.rank in nodes[0] else folders
        shipments = [Shipment(part, nodes, [folder / part.name for folder in folders]) for part in parts]
    try:
        buffers, problems = ship(group, shipments, memory)
    finally:
        memory.close()
    if problems:
        raise Damaged(path, problems[min(problems)], printed_elsewhere=not group.is_rank0)
    with _fitting(path):
        files = CopyFiles({part.name: buffers[n] for n, part in enumerate(parts)})
        if group is ALONE or not files.sharded:  # otherwise each rank checks its own slices as it reads them
            files.check()
        return Copy(path, about["record"], files)


def _record(path: Path, parts: Sequence[Part], check: Check) -> dict[str, Any]:
    """Return the record of a copy that may be read."""
    record = read_record(path, parts)
    with _fitting(path):
        check(path, record)
        if not RUN_ID.fullmatch(run := str(record.get("run", ""))):  # the id becomes the name of folders
            raise UserError(f'checkpoint: {path} must be of a run with an id, got "{run:.80}".')
        if not isinstance(record.get("attempt"), str):
            raise ValueError(f"{STATE}: attempt is missing")
    return record


def _same_files(path: Path, files: dict[str, Any]) -> bool:
    with contextlib.suppress(Damaged):
        return bool(read_manifest(path)[0]["files"] == files)
    return False


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


@dataclass(frozen=True, slots=True)
class _Slice:
    """A part of a tensor, or all of it. `at`: see `tensor_at`. `whole`: the shape of the whole tensor."""

    at: tuple[Any, str, list[int], int, int]
    offset: list[int]
    whole: list[int]

    @property
    def shape(self) -> list[int]:
        return self.at[2]

    def tensor(self) -> torch.Tensor:
        return tensor_at(*self.at)


class CopyFiles:
    """The tree and the tensors in the files of a copy, plain or sharded. The tensors share the memory of the buffers.
    `items`: the names of the tracked items. Files that no rank wrote may raise any error."""

    def __init__(self, buffers: Mapping[str, Any]) -> None:
        self._tree = json.loads(bytes(buffers[TREE]))["tree"]
        self.items = [*self._tree]
        self._slices, self.sharded = defaultdict[str, list[_Slice]](list), False
        self._whole = Tensors()  # that were read, because names share tensors
        for name, content in buffers.items():
            if not name.endswith(TENSORS):
                continue
            self.sharded |= (split := is_shard(name))
            item = "" if split else f"{name.removesuffix(TENSORS)}/"
            tensors, metadata = tensors_in(content)
            places = json.loads(metadata.get("places", "{}"))
            for key, at in tensors.items():
                offset, whole = places.get(key, ([0] * len(at[1]), at[1]))
                self._slices[item + key].append(_Slice((content, *at), offset, whole))

    def check(self) -> None:
        """Raise an error if the tree and the tensors do not fit together. This copies no tensor."""
        decode(self._tree, lambda name: self._take(name, "meta"))

    def read_all(self, *items: str) -> dict[str, Any]:
        """Return the tracked items, or only `items` if any are named, with whole tensors on the CPU."""
        return self._items(items or self._tree, self._take, self._whole)

    def _take(self, name: str, device: str = "cpu") -> torch.Tensor:
        """Return a whole tensor, which shares the memory of its file if one file has all of it."""
        part = self._slices[name][0]
        tensor = part.tensor().to(device)
        if part.shape == part.whole:
            return tensor
        whole = torch.empty(part.whole, dtype=tensor.dtype, device=device)
        self._fill(name, whole, [0] * whole.ndim)
        return whole

    def read_into(self, target: dict[str, Any]) -> dict[str, Any]:
        """Fill the tensors of `target` in place, each split as this rank needs it. Return the tracked items with these
        tensors. `target` may lack items. Raises ValueError if names or shapes differ."""
        _, tensors = encode(target)
        local, places = local_parts(tensors)
        for name, (offset, shape) in places.items():
            if name not in self._slices:
                raise ValueError(f"{name} is not in it")
            if shape != (there := self._slices[name][0].whole):
                raise ValueError(f"{name} has the shape {there} there, {shape} here")
            self._fill(name, local[name], offset)

        def take(name: str) -> torch.Tensor:
            if name not in tensors:
                raise ValueError(f"{name} has no place here")
            return tensors[name]

        return self._items(target, take)

    def _items(
        self, wanted: Iterable[str], take: Callable[[str], torch.Tensor], known: Tensors | None = None
    ) -> dict[str, Any]:
        return dict(decode({item: node for item, node in self._tree.items() if item in wanted}, take, known))

    def _fill(self, name: str, local: torch.Tensor, offset: list[int]) -> None:
        """Fill `local`, a rank's part of the tensor `name`, which begins at `offset` of the whole tensor."""
        left = local.numel()
        for part in self._slices[name]:
            low = [max(own, other) for own, other in zip(offset, part.offset, strict=True)]
            high = [min(own + n, other + m) for own, n, other, m
                    in zip(offset, local.shape, part.offset, part.shape, strict=True)]
            if all(a < b for a, b in zip(low, high, strict=True)):
                here, there = (
                    tuple(slice(a - o, b - o) for a, b, o in zip(low, high, origin, strict=True))
                    for origin in (offset, part.offset)
                )
                tensor = part.tensor()[there]
                local[here].copy_(tensor.to("meta") if local.is_meta else tensor)
                left -= local[here].numel()
        if left:
            raise ValueError(f"{name} lacks {left} elements")


def is_shard(name: str) -> bool:
    """Return whether a file holds the part of one rank."""
    return name.startswith("rank-") and name.endswith(TENSORS)


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
