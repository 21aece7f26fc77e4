"""Tracked state as files: tensors as safetensors, everything else as JSON. Nothing is pickled.

Plain JSON loses int keys, tuples, inf and Counters. Safetensors loses which names share one tensor, and the memory
layout of a tensor. Therefore `tree.json` holds a tree of tagged values, such as `{"$": "tuple", "v": [1, 2]}`. The tree
refers to a tensor by name, `{"$": "tensor", "is": "model/0.weight"}`, and twice by the same name if the tensor appears
twice. `stride` is kept if a tensor is dense but not in C order, as in channels_last. A tensor whose memory is inside
that of another one has the other one's name, and its `view` there: its offset in elements, its shape and its strides.

`model/0.weight` is the tensor `0.weight` in the file `model.safetensors`: each tracked item has its own file. Of split
state each rank writes the parts that it holds, under their full names, into `rank-00000.safetensors`; rank 0 adds all
that is not split. The metadata of such a file has the offset of each part and the shape of the whole tensor. A copy can
therefore be loaded at any number of ranks, split in any way or not at all, see `rankup.state.reading`.
"""

import base64
import json
import math
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from rankup.errors import UserError

TREE, TENSORS = "tree.json", ".safetensors"
ITEM = re.compile(r"[A-Za-z]\w*")  # an item's name is the name of a file
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint64: "U64", torch.uint32: "U32",
    torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}
BY_NAME = {name: dtype for dtype, name in DTYPES.items()}
MAPPINGS: dict[str, Any] = {kind.__name__: kind for kind in (dict, Counter, OrderedDict)}
Tensors = dict[str, torch.Tensor]
Places = dict[str, tuple[list[int], list[int]]]  # for each part: its offset, and the shape of the whole tensor


class TensorFile:
    """The bytes of a safetensors file of tensors on any device. Iteration copies one tensor at a time to host memory.
    Equal tensors under equal names give equal bytes, whatever their device and memory format."""

    def __init__(self, tensors: Tensors, places: Places | None = None) -> None:
        """`places`: set if the tensors are parts, see `local_parts`."""
        # The order of safetensors itself: large elements first, so that each tensor is aligned
        self._tensors = dict(sorted(tensors.items(), key=lambda pair: (-pair[1].itemsize, pair[0])))
        metadata = {"format": "pt"}  # transformers requires it
        if places is not None:
            metadata["places"] = json.dumps(places)
        header: dict[str, Any] = {"__metadata__": metadata}
        end = 0
        for name, tensor in self._tensors.items():
            begin, end = end, end + tensor.nbytes
            header[name] = {"dtype": DTYPES[tensor.dtype], "shape": [*tensor.shape], "data_offsets": [begin, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._header = len(text).to_bytes(8, "little") + text
        self._size = len(self._header) + end

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[bytes | memoryview]:
        yield self._header
        for tensor in self._tensors.values():
            if tensor.numel():
                whole = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
                flat = whole.as_strided([whole.numel()], [1])  # view() needs stride 1; one element may have any stride
                yield flat.view(torch.uint8).numpy().data


@dataclass(frozen=True, slots=True)
class Slice:
    """A tensor in the safetensors file `content`, at the bytes from `begin` to `end`. It is a part of a tensor of the
    shape `whole`, in which it begins at `offset`, or all of it."""

    content: Any
    dtype: str
    shape: list[int]
    begin: int
    end: int
    offset: list[int]
    whole: list[int]

    def tensor(self) -> torch.Tensor:
        """Return the tensor, which shares the memory of the file. Raises an error if its bytes don't fit."""
        if not 8 <= self.begin <= self.end <= len(self.content):
            raise ValueError("a tensor is cut")
        flat = torch.frombuffer(self.content, dtype=torch.uint8)[self.begin:self.end]
        if self.begin % BY_NAME[self.dtype].itemsize:  # another program has written the file
            flat = flat.clone()
        return flat.view(BY_NAME[self.dtype]).view(self.shape)


def slices_in(content: Any) -> dict[str, Slice]:
    """Return what a safetensors file in the buffer `content` holds, by name. Raises any error for a file that
    `TensorFile` did not write."""
    begin = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(bytes(content[8:begin]))
    places = json.loads(header.pop("__metadata__", {}).get("places", "{}"))
    found = dict[str, Slice]()
    for name, about in header.items():
        (low, high), shape = about["data_offsets"], about["shape"]
        offset, whole = places.get(name, ([0] * len(shape), shape))
        found[name] = Slice(content, about["dtype"], shape, begin + low, begin + high, offset, whole)
    return found


def encode(tracked: dict[str, Any]) -> tuple[dict[str, Any], Tensors]:
    """Return the tree of the tracked items, ready for JSON, and the tensors in it by name. No tensor is copied. Raises
    UserError with the path of a value that can't be kept."""
    tensors: Tensors = {}
    known: dict[object, dict[str, Any]] = {}
    try:
        nodes = {item: _node(value, f"{item}/", tensors, known) for item, value in tracked.items()}
    except RecursionError:
        raise UserError(
            f"state: {', '.join(tracked)} must be nested less deeply, got dicts or lists that hold themselves or "
            "hundreds of others. Leave them out."
        ) from None
    _find_views({leaf["is"]: leaf for leaf in known.values()}, tensors)
    return nodes, tensors


# Not a recursive closure: its reference cycle would keep all tensors in memory until the next garbage collection
def _node(value: Any, path: str, tensors: Tensors, known: dict[object, dict[str, Any]]) -> Any:
    of, kind = partial(_node, tensors=tensors, known=known), type(value)
    if value is None or kind in (str, int, bool) or (kind is float and math.isfinite(value)):
        return value
    if kind is float:
        return {"$": "float", "v": str(value)}
    if kind is bytes:
        return {"$": "bytes", "v": base64.b64encode(value).decode()}
    if kind in (list, tuple):
        entries = [of(entry, _join(path, number)) for number, entry in enumerate(value)]
        return entries if kind is list else {"$": "tuple", "v": entries}
    if kind is dict and all(type(key) is str for key in value) and "$" not in value:
        return {key: of(entry, _join(path, key)) for key, entry in value.items()}
    if kind in MAPPINGS.values():
        pairs = [[of(key, path), of(entry, _join(path, key))] for key, entry in value.items()]
        more = {"metadata": of(value._metadata, path)} if hasattr(value, "_metadata") else {}
        return {"$": kind.__name__, "v": pairs} | more
    if isinstance(value, torch.Tensor):
        return _tensor_node(value, path, tensors, known)
    raise _unkept(path, f"{kind.__module__}.{kind.__qualname__}", value)


def _tensor_node(
    value: Any, path: str, tensors: Tensors, known: dict[object, dict[str, Any]]
) -> dict[str, Any]:
    local = value.to_local() if hasattr(value, "to_local") else value  # this rank's part of a DTensor
    usual = type(local) in (torch.Tensor, torch.nn.Parameter) and local.layout == torch.strided
    if not usual or local.is_quantized or local.is_nested:
        raise _unkept(path, f"a tensor of the kind {type(value).__name__}, {value.layout}")
    if local.dtype not in DTYPES or local.device.type == "meta":
        raise _unkept(path, f"a tensor of {local.dtype} on {local.device.type}")
    if torch._debug_has_internal_overlap(local) == 1:  # a resume could not fill it: torch refuses to write to it
        raise _unkept(path, "a tensor whose elements share memory, such as one of expand()", value)
    place = place_of(value)
    if place not in known or not local.numel():
        name = path if not path.endswith("/") else f"{path}value"
        while name in tensors or name.endswith("/__metadata__"):  # {"a": {"b": ...}, "a.b": ...} has a.b twice
            name += "_"
        dense = local is value and not value.is_contiguous() and is_dense(value.shape, value.stride())
        known[place] = {"$": "tensor", "is": name} | ({"stride": [*value.stride()]} if dense else {})
        tensors[name] = value.detach()
    return known[place]


def _find_views(leaves: dict[str, dict[str, Any]], tensors: Tensors) -> None:
    """Let each tensor that lies within the memory of a larger one, such as a slice of a buffer, be a view of it: a
    change of one must change the other after a resume too. `leaves`: by name."""
    in_memory: dict[Any, list[str]] = {}
    for name in leaves:
        tensor = tensors[name]
        if not hasattr(tensor, "to_local") and tensor.numel():
            in_memory.setdefault((tensor.untyped_storage()._cdata, tensor.dtype), []).append(name)
    for names in in_memory.values():
        largest, *others = sorted(names, key=lambda name: -tensors[name].numel())
        whole = tensors[largest]
        if not others or whole.is_conj() or whole.is_neg() or not is_dense(whole.shape, whole.stride()):
            continue
        for name in others:
            tensor, begin = tensors[name], tensors[name].storage_offset() - whole.storage_offset()
            last = begin + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
            if begin >= 0 and last < whole.numel() and not (tensor.is_conj() or tensor.is_neg()):
                leaves[name].update(leaves[largest], view=[begin, [*tensor.shape], [*tensor.stride()]])
                if "stride" not in leaves[largest]:
                    leaves[name].pop("stride", None)
                del tensors[name]


def view_of(whole: torch.Tensor, begin: int, shape: Any, stride: Any) -> torch.Tensor:
    """Return the view of a dense tensor that begins at this element of its memory. Its attribute `whole` is `whole`."""
    view = whole.as_strided(shape, stride, whole.storage_offset() + begin)
    view.whole = whole  # type: ignore[attr-defined]
    return view


def place_of(tensor: Any) -> tuple[Any, ...]:
    """Return what two tensors share if they are one tensor under two names, such as a weight and its `detach()`."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    if local.layout != torch.strided:  # it has no storage
        return (id(tensor),)
    lazy = local.is_conj(), local.is_neg()
    return local.untyped_storage()._cdata, local.storage_offset(), tensor.shape, local.stride(), local.dtype, *lazy


def decode(tree: Any, take: Callable[[str], torch.Tensor], known: Tensors | None = None) -> Any:
    """Return the value of a tree. `take` returns the tensor of a name that is not in `known` yet. A tree that `encode`
    did not make may raise any of half a dozen errors, because trees come from files."""
    known = {} if known is None else known
    of = partial(decode, take=take, known=known)
    if isinstance(tree, list):
        return [of(entry) for entry in tree]
    if not isinstance(tree, dict):
        return tree
    if "$" not in tree:
        return {key: of(entry) for key, entry in tree.items()}
    match tree["$"]:
        case "float":
            return float(tree["v"])
        case "bytes":
            return base64.b64decode(tree["v"], validate=True)
        case "tuple":
            return tuple(of(entry) for entry in tree["v"])
        case "tensor":
            name = tree["is"]
            if name not in known:
                known[name] = _laid_out(take(name), tree["stride"]) if "stride" in tree else take(name)
            return view_of(known[name], *tree["view"]) if "view" in tree else known[name]
    made = MAPPINGS[tree["$"]]({of(key): of(entry) for key, entry in tree["v"]})
    if "metadata" in tree:
        made._metadata = of(tree["metadata"])
    return made


def files_of(tree: dict[str, Any], tensors: Tensors) -> dict[str, bytes | TensorFile]:
    """Return the files of a plain copy, for what `encode` returned. `tensors`: whole tensors, or copies of them."""
    by_item: dict[str, Tensors] = {}
    for name, tensor in tensors.items():
        item, _, rest = name.partition("/")
        by_item.setdefault(item, {})[rest] = tensor
    return {TREE: to_file(tree), **{f"{item}{TENSORS}": TensorFile(part) for item, part in by_item.items()}}


def to_file(tree: dict[str, Any]) -> bytes:
    return json.dumps({"tree": tree}).encode()


def _join(path: str, key: object) -> str:
    """`model/` -> `model/0.weight` -> `model/0.weight.x`"""
    return f"{path}{key}" if path.endswith("/") else f"{path}.{key}"


def _way_out(value: Any) -> str:
    """Return what the user can do about an object that a copy can't hold."""
    if type(value).__name__ in ("Generator", "Random", "RandomState"):  # of torch, numpy and Python
        return "Draw from torch, numpy.random or random, which rankup seeds, or make it anew in each step."
    if hasattr(value, "state_dict"):
        return "Give job.track each such object under a name of its own."
    if isinstance(value, torch.Tensor):
        return "Give it memory of its own by .clone(), or leave it out."
    return "Convert it, or leave it out."


def _unkept(path: str, what: str, value: Any = None) -> UserError:
    return UserError(
        f"state: {path.rstrip('/')} must be a dense tensor, a number, a text, None, or a list, tuple or dict of these, "
        f"got {what}. {_way_out(value)}"
    )


def is_dense(shape: Any, stride: Any) -> bool:
    """Return whether the elements fill their memory without holes or overlap, in any order of the dimensions. Only then
    does torch give a new tensor the same strides."""
    return torch.empty_like(torch.empty_strided(shape, stride, device="meta")).stride() == tuple(stride)


def _laid_out(tensor: torch.Tensor, stride: list[int]) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


# Split among ranks ----------------------------------------------------------------------------------------------------


def file_of(rank: int) -> str:
    return f"rank-{rank:05d}{TENSORS}"


def mesh_position(tensor: Any, *, replica: bool = False) -> list[int]:
    """Return this rank's coordinates in the sharded dimensions of a DTensor's mesh: ranks with equal coordinates hold
    equal parts. With `replica`, return the coordinates in the replicated dimensions, which tell such ranks apart."""
    at = zip(tensor.device_mesh.get_coordinate() or (), tensor.placements, strict=False)
    return [place for place, kind in at if kind.is_replicate() == replica]


def own_parts(tensors: dict[str, Any], rank: int) -> dict[str, Any]:
    """Return the plain tensors and DTensors that this rank writes. Of ranks with equal parts, only one writes."""
    return {
        name: tensor for name, tensor in tensors.items()
        if (not any(mesh_position(tensor, replica=True)) if hasattr(tensor, "to_local") else rank == 0)
    }


def local_parts(tensors: dict[str, Any]) -> tuple[Tensors, Places]:
    """Return what this rank holds of plain tensors and DTensors, and the place of each part in its whole tensor. Raises
    UserError for a part that is not a slice."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    parts, places = Tensors(), Places()
    for name, tensor in tensors.items():
        parts[name], offset = tensor, [0] * tensor.ndim
        if hasattr(tensor, "to_local"):
            if not all(type(kind) in (Replicate, Shard) for kind in tensor.placements):
                raise UserError(f"state: {name} must be split by Shard and Replicate, got {tensor.placements}.")
            _, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
            parts[name], offset = tensor.to_local(), [*start]
        places[name] = offset, [*tensor.shape]
    return parts, places
