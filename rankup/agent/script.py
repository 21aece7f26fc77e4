"""The user's script: its file, its imports, its command line, and what all nodes must have in common. No torch here."""

import ast
import contextlib
import functools
import hashlib
import importlib.metadata
import os
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from rankup.env.launchers import OWN_LAUNCHERS, must_be_started_by
from rankup.errors import UserError

# How a script declares the argument --local_rank, which older versions of torch's launcher passed
DECLARES_LOCAL_RANK = re.compile(r"""["']--(local[_-]rank)["']""")

# Installed packages whose import starts no threads and opens no device
SAFE = {
    "PIL", "fire", "fsspec", "numpy", "psutil", "pydantic", "safetensors", "tensorboard", "tokenizers", "torch",
    "torchvision", "tqdm", "transformers", "yaml",
}


# Modules through which ranks exchange data
GROUPS = re.compile(
    rb"torch\.distributed|from torch import .*\bdistributed\b|\b(rankup|lightning|pytorch_lightning|accelerate|trl|ray|"
    rb"deepspeed|transformers|horovod|mpi4py|colossalai|composer|megatron|torchtitan|fairscale|ignite|jax)\b"
)


@dataclass(frozen=True)
class Script:
    """The user's script and its arguments. `program`: "-m" and a module, or an absolute path. `words`: the arguments.
    `file`: None if only Python itself can find it. `name`: for messages. `run_name`: the default name of its run."""

    program: Sequence[str]
    words: Sequence[str]
    file: Path | None
    name: str
    run_name: str

    @staticmethod
    def find(words: Sequence[str]) -> "Script":
        """Find the script in `words`: its path and its arguments, or "-m", a module and its arguments."""
        if words[0] == "-m":
            return Script(words[:2], words[2:], _file_of(words[1]), f"-m {words[1]}", words[1])
        file = Path(words[0])
        return Script([str(file.absolute())], words[1:], file, file.name, file.stem)

    def check(self, environ: Mapping[str, str], *, world_size: int) -> None:
        """Raise UserError if the script does not exist, or if its ranks would not find each other, because it imports a
        package of OWN_LAUNCHERS: without that launcher's variables, each process silently trains alone."""
        if self.file is not None and not os.path.isfile(self.file):  # Path.is_file raises if it lacks permission
            if os.path.isdir(self.file):
                way_out = "Name a file in it, or start a package with -m PACKAGE."
                raise UserError(f"SCRIPT must be a file, got the folder {self.file}. {way_out}")
            way_out = f"Give its path from {os.getcwd()}, or start a module with -m."
            raise UserError(f"SCRIPT must be an existing file, got {self.file}. {way_out}")
        for package in OWN_LAUNCHERS if world_size > 1 else ():
            # Only top-level statements: an import under a condition may never run
            if any(package in _packages(tree.body) for tree in self._trees(package)):
                must_be_started_by(package, environ, world_size=world_size, script=self.name)

    @functools.cached_property
    def names_a_group(self) -> bool:
        """Whether the script or a file of its own names a module that connects ranks, or can't be read."""
        texts = [_read(file) for file in (self.file, *self._neighbours)]
        return not texts[0] or any(GROUPS.search(text) for text in texts)

    @functools.cached_property
    def imports_rankup(self) -> bool:
        """Whether the script imports rankup, or imports a file of its own that does."""
        return any("rankup" in _packages(ast.walk(tree)) for tree in self._trees("rankup"))

    def must_match(self) -> dict[str, str]:
        """Return what must be equal on all nodes, by name: versions, and digests of the script and of its own files."""
        torch = next((found.version for found in importlib.metadata.distributions(name="torch")), "not installed")
        return {
            "python version": ".".join(map(str, sys.version_info[:2])), "torch version": torch,
            "rankup's code": _digest(*sorted(Path(__file__).parents[1].rglob("*.py"))),
            f"script {self.name}": _digest(self.file) if self.file else "a module that Python itself finds",
            **{f"imported {os.path.relpath(file, self._path.parent)}": _digest(file) for file in self._neighbours},
        }

    def command(self, *, local_rank: int) -> list[str]:
        """Return the arguments for Python that start the script, with --local_rank if the script declares it."""
        found = DECLARES_LOCAL_RANK.search(_read(self.file).decode(errors="replace"))
        is_given = any(re.match(r"--local[_-]rank(=|$)", word) for word in self.words)
        more = [f"--{found[1]}={local_rank}"] if found and not is_given else []
        return [*self.program, *more, *self.words]

    def safe_imports(self) -> list[str]:
        """Return the names that the fork server may import before the script does: modules, or their attributes, of the
        packages in SAFE that the script imports before any other statement. A package is left out if the script's
        folder or the current folder has a module of the same name, which the script would import instead."""
        names: list[str] = []
        for statement in self._tree.body:
            if isinstance(statement, ast.Import | ast.ImportFrom):
                names += [name.removesuffix(".*") for level, name in _imports_of([statement]) if level == 0]
            elif not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)):
                break
        folders = [str(self._path.parent), os.getcwd()]
        safe = {package for package in SAFE if PathFinder.find_spec(package, folders) is None}
        return list(dict.fromkeys(name for name in names if name.partition(".")[0] in safe))

    def own_imports(self) -> tuple[list[str], str]:
        """Return the modules in the script's `__preload__ = ["package.module"]`, which the fork server may import, and
        the folder that contains the script or its package. ".module" names a module in the script's package."""
        names: list[str] = []
        for statement in self._tree.body:
            if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__preload__":
                with contextlib.suppress(ValueError, TypeError):
                    names = [str(name) for name in ast.literal_eval(statement.value)]
        folder, package = self._path.parent, ""
        while os.path.isfile(folder / "__init__.py"):
            folder, package = folder.parent, f"{folder.name}.{package}"
        return [package + name[1:] if name.startswith(".") else name for name in names], str(folder)

    def _trees(self, package: str) -> list[ast.Module]:
        """Return the syntax trees of the script, and of its own files that may import `package`."""
        return [self._tree, *(_parse(file) for file in self._neighbours if package.encode() in _read(file))]

    @functools.cached_property
    def _tree(self) -> ast.Module:
        return _parse(self.file)

    @functools.cached_property
    def _path(self) -> Path:
        return (self.file or Path()).resolve()

    @functools.cached_property
    def _neighbours(self) -> list[Path]:
        """The user's files that the script imports: below the first folder of sys.path, or in the script's package."""
        found = set[Path]()
        first = Path.cwd() if self.program[0] == "-m" else self._path.parent
        for level, name in _imports_of(ast.walk(self._tree)):
            for folder in self._path.parents[level - 1 : level] if level else [first]:
                for part in name.split("."):
                    folder /= part
                    found |= {folder / "__init__.py", folder.with_name(f"{part}.py")}
        return sorted(file for file in found if os.path.isfile(file))


def _read(file: Path | None) -> bytes:
    try:
        return file.read_bytes() if file is not None else b""
    except OSError:
        return b""


def _digest(*files: Path) -> str:
    return hashlib.sha256(b"".join(map(_read, files))).hexdigest()[:12]


def _parse(file: Path | None) -> ast.Module:
    """Return the syntax tree. It is empty after a syntax error, which Python reports when it runs the script."""
    with contextlib.suppress(SyntaxError, ValueError), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python shows these warnings when it runs the script
        return ast.parse(_read(file))
    return ast.parse("")


def _imports_of(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield (level, name) for everything that these nodes import. The level is the number of leading dots."""
    for found in nodes:
        if isinstance(found, ast.Import):
            yield from ((0, alias.name) for alias in found.names)
        elif isinstance(found, ast.ImportFrom):
            yield from ((found.level, f"{found.module or ''}.{alias.name}".strip(".")) for alias in found.names)


def _packages(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the packages that these nodes import, except by relative imports."""
    return {name.split(".")[0] for level, name in _imports_of(nodes) if level == 0}


def _file_of(module: str) -> Path | None:
    """Find the file that `python -m module` runs. Import nothing, because a package's code may be slow, or print."""
    folders, name, file = [os.getcwd(), *sys.path], "", ""  # for -m Python puts the current folder first
    for part in (*module.split("."), "__main__"):
        name = f"{name}.{part}".strip(".")
        # An editable install has a finder of its own, which takes the full name of a module
        others = (finder.find_spec(name, None) for finder in sys.meta_path if finder is not PathFinder)
        if (spec := PathFinder.find_spec(part, folders) or next(filter(None, others), None)) is None:
            return None
        file = spec.origin or ""
        if spec.submodule_search_locations is None:
            break
        folders = [*spec.submodule_search_locations]
    return Path(file) if os.path.isfile(file) else None
