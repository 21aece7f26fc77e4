"""Tracked state as files: tensors as safetensors, everything else as JSON. Nothing is pickled.

JSON alone loses int keys, tuples, inf and Counters; safetensors alone loses which tensors are one and the same, and how
a tensor lies in memory. So the JSON is a tree of tagged values: `{"$": "tuple", "v": [1, 2]}`. A tensor stands in it by
name, `{"$": "tensor", "is": "model/0.weight"}`, twice by the same name where it appears twice. `stride` is kept where a
tensor is dense but not in C order, as in channels_last.

`model/0.weight` is the tensor `0.weight` of the file `model.safetensors`: each tracked item has a file of its own. Of
split state each rank writes the parts that it holds, into `rank-00000.safetensors`, rank 0 with all that is not split.
Then the index, `shards.json` in place of `tree.json`, has a table beside the tree: type and whole shape of each tensor,
and rank and offset of each of its parts. So a copy loads at any number of ranks, split in any way or not at all.
"""

import base64
import json
import math
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from rankup.errors import UserError

TREE, INDEX = "tree.json", "shards.json"
ITEM = re.compile(r"[A-Za-z]\w*")  # an item's name is the name of a file
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint64: "U64", torch.uint32: "U32",
    torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}
TYPES = {name: dtype for dtype, name in DTYPES.items()}
MAPPINGS: dict[str, Any] = {kind.__name__: kind for kind in (dict, Counter, OrderedDict)}
Tensors = dict[str, torch.Tensor]


class TensorFile:
    """The bytes of a safetensors file, made of tensors on any device while they are iterated: one at a time is copied.
    Equal tensors under equal names give equal bytes, whatever their device and memory format."""

    def __init__(self, tensors: Tensors) -> None:
        # As safetensors itself orders them: large elements first, so that each tensor is aligned
        self._tensors = dict(sorted(tensors.items(), key=lambda pair: (-pair[1].itemsize, pair[0])))
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers asks for it
        end = 0
        for name, tensor in self._tensors.items():
            begin, end = end, end + tensor.numel() * tensor.itemsize
            header[name] = {"dtype": DTYPES[tensor.dtype], "shape": [*tensor.shape], "data_offsets": [begin, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._header = len(text).to_bytes(8, "little") + text
        self._size = len(self._header) + end

    def __len__(self) -> int:
        return self._size

    @property
    def layout(self) -> bytes:
        """Its beginning, which says where each tensor lies."""
        return self._header

    def put(self, content: torch.Tensor) -> None:
        """Make `content`, uint8 [len(self)], the bytes of the file. From a GPU they come in the order of its queue."""
        content[: len(self._header)] = torch.frombuffer(bytearray(self._header), dtype=torch.uint8)
        sizes = [tensor.nbytes for tensor in self._tensors.values()]
        parts = zip(torch.split(content[len(self._header) :], sizes), self._tensors.values(), strict=True)
        if views := [part.view(tensor.dtype).view(tensor.shape) for part, tensor in parts]:
            torch._foreach_copy_(views, [*self._tensors.values()], non_blocking=True)

    def __iter__(self) -> Iterator[bytes | memoryview]:
        yield self._header
        for tensor in self._tensors.values():
            if tensor.numel():
                whole = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
                yield whole.reshape(-1).view(torch.uint8).numpy().data


def encode(tracked: dict[str, Any]) -> tuple[dict[str, Any], Tensors]:
    """The tree of the tracked items, for JSON, and the tensors in it by their names. No tensor is copied. Raises
    UserError for a value that can't be kept, by its path."""
    tensors: Tensors = {}
    known: dict[object, str] = {}

    def of(value: Any, path: str) -> Any:
        kind = type(value)
        if value is None or kind in (str, int, bool) or (kind is float and math.isfinite(value)):
            return value
        if kind is float:
            return {"$": "float", "v": str(value)}
        if kind is bytes:
            return {"$": "bytes", "v": base64.b64encode(value).decode()}
        if kind is list:
            return [of(entry, _join(path, number)) for number, entry in enumerate(value)]
        if kind is tuple:
            return {"$": "tuple", "v": [of(entry, _join(path, number)) for number, entry in enumerate(value)]}
        if kind is dict and all(type(key) is str for key in value) and "$" not in value:
            return {key: of(entry, _join(path, key)) for key, entry in value.items()}
        if kind in MAPPINGS.values():
            pairs = [[of(key, path), of(entry, _join(path, key))] for key, entry in value.items()]
            more = {"metadata": of(value._metadata, path)} if hasattr(value, "_metadata") else {}
            return {"$": kind.__name__, "v": pairs} | more
        if isinstance(value, torch.Tensor):
            return tensor_of(value, path)
        raise _unkept(path, f"{kind.__module__}.{kind.__qualname__}")

    def tensor_of(value: torch.Tensor, path: str) -> dict[str, Any]:
        local = value.to_local() if hasattr(value, "to_local") else value  # of a DTensor: what this rank holds
        if type(local) not in (torch.Tensor, torch.nn.Parameter) or local.layout != torch.strided or local.is_quantized:
            raise _unkept(path, f"a tensor of the kind {type(value).__name__}, {value.layout}")
        if local.dtype not in DTYPES or local.device.type == "meta":
            raise _unkept(path, f"a tensor of {local.dtype} on {local.device.type}")
        place = (local.untyped_storage()._cdata, local.storage_offset(), value.shape, local.stride(), local.dtype)
        if place not in known or not local.numel():
            name = path if not path.endswith("/") else f"{path}value"
            while name in tensors or name.endswith("/__metadata__"):  # {"a": {"b": ...}, "a.b": ...}
                name += "_"
            known[place], tensors[name] = name, value.detach()
        leaf = {"$": "tensor", "is": known[place]}
        dense = local is value and not value.is_contiguous() and is_dense(value.shape, value.stride())
        return leaf | ({"stride": [*value.stride()]} if dense else {})

    try:
        for item in tracked:
            if not ITEM.fullmatch(item):
                raise UserError(f"state: an item's name must be letters, digits and _, got {item!r:.80}.")
        return {item: of(value, f"{item}/") for item, value in tracked.items()}, tensors
    except RecursionError:
        raise UserError("state: values must not hold themselves, got some that do or are nested too deep.") from None


def decode(tree: Any, take: Callable[[str], torch.Tensor]) -> Any:
    """The value of a tree. `take` gives the tensor of a name. Raises any of half a dozen errors for what `encode` did
    not make: trees come from files."""
    known: Tensors = {}

    def of(node: Any) -> Any:
        if isinstance(node, list):
            return [of(entry) for entry in node]
        if not isinstance(node, dict):
            return node
        if "$" not in node:
            return {key: of(entry) for key, entry in node.items()}
        match node["$"]:
            case "float":
                return float(node["v"])
            case "bytes":
                return base64.b64decode(node["v"], validate=True)
            case "tuple":
                return tuple(of(entry) for entry in node["v"])
            case "tensor":
                name = node["is"]
                if name not in known:
                    known[name] = _laid_out(take(name), node["stride"]) if "stride" in node else take(name)
                return known[name]
        made = MAPPINGS[node["$"]]({of(key): of(entry) for key, entry in node["v"]})
        if "metadata" in node:
            made._metadata = of(node["metadata"])
        return made

    return of(tree)


def files_of(tree: dict[str, Any], tensors: Tensors) -> dict[str, bytes | TensorFile]:
    """The files of what `encode` returned, or of copies of these tensors, if they are whole."""
    by_item: dict[str, Tensors] = {}
    for name, tensor in tensors.items():
        item, _, rest = name.partition("/")
        by_item.setdefault(item, {})[rest] = tensor
    files: dict[str, bytes | TensorFile] = {f"{item}.safetensors": TensorFile(part) for item, part in by_item.items()}
    return files | {TREE: json.dumps({"tree": tree}).encode()}


def from_files(files: dict[str, bytes]) -> dict[str, Any]:
    """The tracked items in the contents of files, on the CPU. Raises ValueError in one line where they are damaged."""
    from safetensors.torch import load

    try:
        loaded: dict[str, Tensors] = {}

        def take(name: str) -> torch.Tensor:
            item, _, rest = name.partition("/")
            if item not in loaded:
                loaded[item] = load(files[f"{item}.safetensors"])
            return loaded[item][rest]

        tracked = decode(json.loads(files[TREE])["tree"], take)
        if not isinstance(tracked, dict):
            raise TypeError("the tree is no mapping")
        return tracked
    except Exception as error:  # safetensors and torch raise half a dozen unrelated types
        raise ValueError(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}") from None


def _join(path: str, key: object) -> str:
    """`model/` -> `model/0.weight` -> `model/0.weight.x`"""
    return f"{path}{key}" if path.endswith("/") else f"{path}.{key}"


def _unkept(path: str, what: str) -> UserError:
    return UserError(
        f"state: {path.rstrip('/')} must be a dense tensor, a number, a text, None, or a list, tuple or dict of these, "
        f"got {what}. Convert it, or leave it out."
    )


def is_dense(shape: Any, stride: Any) -> bool:
    """Whether the elements fill their memory without holes or overlap, in any order of the dimensions."""
    expected = 1
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size == 1:
            continue
        if step != expected:
            return False
        expected *= size
    return True


def _laid_out(tensor: torch.Tensor, stride: list[int]) -> torch.Tensor:
    if not all(type(step) is int and step >= 0 for step in stride) or not is_dense(tensor.shape, stride):
        raise ValueError(f"stride {stride} does not fit {tuple(tensor.shape)}")
    return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


# Split among ranks ----------------------------------------------------------------------------------------------------


def file_of(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def own_parts(tensors: dict[str, Any], rank: int) -> tuple[Tensors, dict[str, list[int]]]:
    """What this rank writes of plain tensors and DTensors, and where each part begins: no other rank writes that.
    Raises UserError."""
    parts, offsets = Tensors(), dict[str, list[int]]()
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


def index(tree: dict[str, Any], tensors: Tensors, offsets: list[dict[str, list[int]]]) -> dict[str, bytes]:
    """The file that says where each tensor is. `offsets`: of each rank, where its parts begin."""
    table = {
        name: {
            "dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape),
            "parts": [[rank, at[name]] for rank, at in enumerate(offsets) if name in at],
        }
        for name, tensor in tensors.items()
    }
    return {INDEX: json.dumps({"tree": tree, "shards": table}).encode()}


class Shards:
    """The tensors of a sharded copy in the folder `path`, whose index is `content`. Every method raises ValueError,
    KeyError or another error where the files are not what a rank wrote."""

    def __init__(self, path: Path, content: bytes) -> None:
        values = json.loads(content)
        self.path, self.tree, self.table = path, values["tree"], values["shards"]
        self._files: dict[int, Any] = {}  # they are closed with this object

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
        `target` may lack items. Raises ValueError where names or shapes differ."""
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
                self._files[rank] = safe_open(self.path / file_of(rank), framework="pt")
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
