"""Reading and verifying copies. A plain copy is shipped to the memory of each node, where all ranks map it. The files
of a sharded copy, on storage that all nodes share, are mapped where they are: each rank reads the slices it needs."""

import contextlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import torch

from rankup.errors import UserError
from rankup.places.lease import RUN_ID
from rankup.state.copies import STATE, Check, Damaged, Part, list_copies, no_check, part_of, read_manifest, read_record
from rankup.state.memory import node_id
from rankup.state.place import PARTS, Candidate
from rankup.state.shipping import InPlace, Memory, Shipment, Shipping
from rankup.state.tree import DTYPES, TENSORS, TREE, Slice, Tensors, decode, encode, local_parts, slices_in

OWN = "rankup_"  # names of items that the library adds to the user's items begin with this
# The group of a process that reads a copy alone
ALONE = SimpleNamespace(rank=0, world_size=1, is_rank0=True, gather=lambda value: [value],
                        on_rank0=lambda work, source=0: work(), collective=lambda call: call())
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Copy:
    """A verified copy of the state, in the folder `path`. `record`: the content of `state.json`, including `step`,
    `run` and `attempt`. `files`: its other files. `in_place`: those that are used where they are."""

    path: Path
    record: dict[str, Any]
    files: "CopyFiles"
    in_place: Sequence[InPlace] = ()

    @property
    def step(self) -> int:
        return int(self.record["step"])

    @property
    def tracked(self) -> dict[str, Any]:
        """The tracked items, on the CPU, with whole tensors. Their memory is that of the copy, but each one has its own
        storage: torch.save writes whole storages, and refuses one with tensors of several types. Raises Damaged."""
        with _fitting(self.path):
            return self.files.read_apart()

    def check_unchanged(self) -> None:
        """Raise UserError if somebody has written to a file since it was verified."""
        if any(each.changed for each in self.in_place):
            raise UserError(
                f"checkpoint: {self.path} must stay as it is while a run resumes from it, got a change. Start the job "
                "again."
            )


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
    return load(ALONE, Candidate(where=str(path)), check=check, in_place=lambda path: path)


def load(
    group: Any, one: Candidate, opened: Callable[[Candidate], Path] = lambda one: Path(one.where), *,
    check: Check = no_check, others: Sequence[Path] = (), in_place: Callable[[Path], Path] | None = None,
    on_disk: bool = False,
) -> Copy:
    """Read the copy `one`: the same files on all ranks, or on each rank the part of its state that is in memory. All
    ranks call this. Instead of a damaged part the same part on another node is read.

    `opened`: called on rank `one.rank`, returns the folder with the files. `others`: folders in which this rank may
    have the same files. `in_place`: returns where this rank sees the folder; the files of a sharded copy are then used
    there. `on_disk`: so are files on a disk of this machine, and the caller calls `Copy.check_unchanged` once it has
    what it needs. Raises on all ranks: Damaged, and UserError if `check` refuses the copy.
    """
    able, why = [[one]] * group.world_size, ""
    if one.parts:
        nodes = group.gather(node_id())
        able = [[] for _ in nodes]
        for part in one.parts:
            for rank in {*part.ranks}:  # nobody has verified what a part says of itself
                if 0 <= rank < len(able):
                    able[rank].append(part)
        able = [sorted(ones, key=lambda each: each.node != node) for ones, node in zip(able, nodes, strict=True)]
    while all(able):
        copy, damaged = _read(group, [ones[0] for ones in able], opened, check, others, in_place, on_disk)
        if copy is not None:
            return copy
        mine, why = able[group.rank][0], next(iter(damaged.values()))
        if one.parts and mine.node == node_id() and (mine.rank, mine.where) in damaged:
            group.log.warning(f"a part in memory was skipped: {mine.where}: {damaged[mine.rank, mine.where]}")
        able = [[each for each in ones if (each.rank, each.where) not in damaged] for ones in able]
    raise Damaged(one.where, why, printed_elsewhere=not group.is_rank0)


def _read(
    group: Any, chosen: Sequence[Candidate], opened: Callable[[Candidate], Path], check: Check, others: Sequence[Path],
    in_place: Callable[[Path], Path] | None, on_disk: bool,
) -> tuple[Copy | None, dict[tuple[int, str], str]]:
    """Read for each rank the folder that is `chosen` for it. Return this rank's copy; or None, and by rank and path of
    each damaged folder why it is damaged. The rest: see `load`."""
    folders, ranks_of = {(one.rank, one.where): one for one in chosen}, defaultdict[tuple[int, str], list[int]](list)
    for rank, one in enumerate(chosen):
        ranks_of[one.rank, one.where].append(rank)

    def look() -> list[Any]:
        return [_described(one, opened, check) for one in folders.values() if one.rank == group.rank]

    # Only the rank that opens and checks a copy may fail: then it is the only folder
    told = group.on_rank0(look, source=chosen[0].rank) if len(folders) == 1 else [*chain(*group.gather(look()))]
    about = {(rank, where): rest for rank, where, *rest in told}
    if damaged := {key: why for key, (*_, why) in about.items() if why}:
        return None, damaged
    own, shipments, keys = chosen[group.rank], list[Shipment](), list[tuple[int, str]]()
    path = Path(about[own.rank, own.where][0])
    with contextlib.closing(Memory.shared(group)) as memory:
        node_of = {rank: node for node, ranks in enumerate(memory.nodes) for rank in ranks}
        for key, (_, absolute, files, *_) in about.items():
            by_node = {node_of[key[0]]: list[int]()}
            for rank in ranks_of[key]:
                by_node.setdefault(node_of[rank], []).append(rank)
            to = [ranks or [key[0]] for ranks in by_node.values()]
            where = [*(others if group.rank not in to[0] else ()), Path(absolute)]
            for name, entry in files.items():
                paths = [folder / name for folder in where]
                shipments.append(Shipment(part_of(name, entry), to, paths, on_disk=on_disk))
                keys.append(key)
        if in_place is not None and any(is_shard(each.part.name) for each in shipments):
            seen, everyone = in_place(path), range(group.world_size)
            if all(group.gather(_same_files(seen, shipments))):
                path = seen
                shipments = [Shipment(each.part, [everyone], [path / each.part.name], in_place=True)
                             for each in shipments]
        shipping = Shipping(group, shipments, memory)
        buffers, problems = shipping.result()
    if problems:
        return None, {keys[n]: why for n, why in sorted(problems.items(), reverse=True)}
    mine = {shipments[n].part.name: each for n, each in buffers.items() if group.rank in ranks_of[keys[n]]}
    with _fitting(path) if len(folders) == 1 else contextlib.nullcontext():
        files = CopyFiles(mine)
        if group is ALONE or not files.sharded:  # otherwise each rank checks its own slices as it reads them
            files.check()
        # All ranks get rank 0's record, because only rank 0 may know the values of the last evaluation
        return Copy(path, about[chosen[0].rank, chosen[0].where][3], files, shipping.in_place), {}


def _described(one: Candidate, opened: Callable[[Candidate], Path], check: Check) -> list[Any]:
    """Return what all ranks must know of a folder: which, where it is opened, its files, its record, and why it is
    damaged."""
    try:
        manifest, parts = read_manifest(path := opened(one))
        record = read_record(path, parts) if one.kind == PARTS else _record(path, parts, check)
        if one.kind == PARTS and 0 not in one.ranks:
            record = {}  # nobody needs it
        files = {name: entry for name, entry in manifest["files"].items() if name != STATE}
        return [one.rank, one.where, str(path), str(path.absolute()), files, record, ""]
    except Damaged as error:
        return [one.rank, one.where, "", "", {}, {}, error.why]


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


def _same_files(path: Path, shipments: Sequence[Shipment]) -> bool:
    with contextlib.suppress(Damaged):
        return [part for part in read_manifest(path)[1] if part.name != STATE] == [each.part for each in shipments]
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


class CopyFiles:
    """The tree and the tensors in the files of a copy, plain or sharded. The tensors share the memory of the buffers.
    A file's header is read when a tensor in it is needed: of the files of a thousand ranks, each rank needs a few.
    `items`: the names of the tracked items. Files that no rank wrote may raise any error."""

    def __init__(self, buffers: Mapping[str, Any]) -> None:
        self._tree = json.loads(bytes(buffers[TREE]))["tree"]
        self.items = [*self._tree]
        self._buffers, self._shards = buffers, sorted(filter(is_shard, buffers))
        self.sharded = bool(self._shards)
        self._slices = dict[str, dict[str, Slice]]()  # in each file whose header was read
        self._whole = Tensors()  # that were read, because names share tensors

    def _files(self, name: str) -> list[str]:
        """Return the files that may have parts of the tensor `name`, in the order of ranks."""
        return self._shards or [f"{name.partition('/')[0]}{TENSORS}"]

    def _slice(self, name: str, file: str) -> Slice | None:
        """Return what a file has of the tensor `name`, or None."""
        if file not in self._slices:
            self._slices[file] = slices_in(self._buffers[file])
        return self._slices[file].get(name if self.sharded else name.partition("/")[2])

    def _first(self, name: str) -> tuple[int, Slice]:
        """Return the first part of the tensor `name`, and the number of its file."""
        for number, file in enumerate(self._files(name)):
            if (part := self._slice(name, file)) is not None:
                return number, part
        raise ValueError(f"{name} is not in it")

    def check(self) -> None:
        """Raise an error if the tree and the tensors do not fit together. This copies no tensor."""
        decode(self._tree, lambda name: self._take(name, "meta"))

    def read_all(self, *items: str) -> dict[str, Any]:
        """Return the tracked items, or only `items` if any are named, with whole tensors on the CPU."""
        return self._items(items or self._tree, self._take, self._whole)

    def read_apart(self) -> dict[str, Any]:
        """Return the tracked items, see `Copy.tracked`."""
        return self._items(self._tree, lambda name: _apart(self._take(name)))

    def _take(self, name: str, device: str = "cpu") -> torch.Tensor:
        """Return a whole tensor, which shares the memory of its file if one file has all of it."""
        _, part = self._first(name)
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
            there, own = self._first(name)[1], DTYPES[tensors[name].dtype]
            if shape != there.whole:
                raise ValueError(f"{name} has the shape {there.whole} there, {shape} here")
            if own != there.dtype:
                raise ValueError(f"{name} has the type {there.dtype} there, {own} here")
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
        number, first = self._first(name)
        # If the ranks, in their order, have equal parts, `likely` are the files with this one. Otherwise look into all

        def file_with(element: Iterable[int]) -> int:
            place = 0
            for at, whole, part in zip(element, first.whole, first.shape, strict=True):
                place = place * -(-whole // max(1, part)) + at // max(1, part)
            return number + place

        files, left = self._files(name), local.numel()
        every, end = range(len(files)), [begin + size - 1 for begin, size in zip(offset, local.shape, strict=True)]
        likely = every[file_with(offset):file_with(end) + 1]
        for n in chain(likely, every[:likely.start], every[likely.stop:]):
            if not left and n not in likely:
                return
            if (part := self._slice(name, files[n])) is None:
                continue
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


def _apart(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor over the same memory with a storage of its own."""
    if not tensor.numel():
        return tensor.clone()
    return torch.from_numpy(tensor.view(-1).view(torch.uint8).numpy()).view(tensor.dtype).view(tensor.shape)


def is_shard(name: str) -> bool:
    """Return whether a file holds the part of one rank."""
    return name.startswith("rank-") and name.endswith(TENSORS)
