"""The user's script: which file it is, what must be the same of it on all nodes, its command line. No torch here."""

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

from rankup.errors import UserError

# As a script of old declares it, which got its local rank as an argument
DECLARES_LOCAL_RANK = re.compile(r"""["']--(local[_-]rank)["']""")

# Installed packages that start no threads and open no device while they are imported
SAFE = {
    "PIL", "fire", "fsspec", "numpy", "psutil", "pydantic", "safetensors", "tensorboard", "tokenizers", "torch",
    "torchvision", "tqdm", "transformers", "yaml",
}


@dataclass(frozen=True)
class Script:
    """`program`: -m and a module, or a file that any folder finds; `words`: its arguments. `file`: None where only
    Python can find it. `name`: for messages. `run_name`: of a run that got no other one."""

    program: Sequence[str]
    words: Sequence[str]
    file: Path | None
    name: str
    run_name: str

    @staticmethod
    def find(words: Sequence[str]) -> "Script":
        """`words`: the script and its arguments, or -m, a module and those."""
        if words[0] == "-m":
            return Script(words[:2], words[2:], _file_of(words[1]), f"-m {words[1]}", words[1])
        file = Path(words[0])
        return Script([str(file.absolute())], words[1:], file, file.name, file.stem)

    def check(self, environ: Mapping[str, str], *, world_size: int) -> None:
        """Raises UserError where there is none, and where its ranks would not find each other: Horovod without
        HOROVOD_SIZE, which horovodrun sets, is a world of one in each process, and says nothing."""
        if self.file is not None and not os.path.isfile(self.file):  # Path.is_file raises where it may not look
            raise UserError(f"SCRIPT must be a file, got {self.file}: there is none.")
        given, by_mpi = environ.get("HOROVOD_SIZE", ""), environ.get("HOROVOD_CONTROLLER", "") == "mpi"
        imports = _packages(self._tree.body)  # under a condition it may be one that never runs
        if world_size > 1 and given != str(world_size) and not by_mpi and "horovod" in imports:
            raise UserError(
                f"{self.name}: HOROVOD_SIZE must be {world_size} for its import of horovod, got {given or 'nothing'}: "
                f"each rank would train alone. Start the script itself: horovodrun -np {world_size} --gloo python "
                f"{self.name}, or mpirun -np {world_size} python {self.name} where Horovod was built with MPI."
            )

    @functools.cached_property
    def imports_rankup(self) -> bool:
        """Whether it, or a file of its own that it imports directly, imports rankup."""
        trees = [self._tree, *(_parse(file) for file in self._neighbours if b"rankup" in _read(file))]
        return any("rankup" in _packages(ast.walk(tree)) for tree in trees)

    def must_match(self) -> dict[str, str]:
        """What all nodes must have in common, by name: the script and its own imports."""
        torch = next((found.version for found in importlib.metadata.distributions(name="torch")), "not installed")
        return {
            "python version": ".".join(map(str, sys.version_info[:2])), "torch version": torch,
            "rankup's code": _digest(*sorted(Path(__file__).parents[1].rglob("*.py"))),
            f"script {self.name}": _digest(self.file) if self.file else "a module that Python itself finds",
            **{f"imported {os.path.relpath(file, self._path.parent)}": _digest(file) for file in self._neighbours},
        }

    def command(self, *, local_rank: int) -> list[str]:
        """Python's words for it, with the local rank where it declares such an argument."""
        found = DECLARES_LOCAL_RANK.search(_read(self.file).decode(errors="replace"))
        is_given = any(re.match(r"--local[_-]rank(=|$)", word) for word in self.words)
        more = [f"--{found[1]}={local_rank}"] if found and not is_given else []
        return [*self.program, *more, *self.words]

    def safe_imports(self) -> list[str]:
        """What the server may import in its place: of its first imports, up to another statement, those of SAFE, also a
        class of a module. A package is left out where the script would find one of the user's: in its folder, or in
        the current one."""
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
        """What it lets the server import itself, by a line `__preload__ = ["package.module"]`, ".module" for one beside
        it in a package; and the folder of the script, or of the package that it is part of."""
        names: list[str] = []
        for statement in self._tree.body:
            if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__preload__":
                with contextlib.suppress(ValueError):
                    names = [str(name) for name in ast.literal_eval(statement.value)]
        folder, package = self._path.parent, ""
        while os.path.isfile(folder / "__init__.py"):
            folder, package = folder.parent, f"{folder.name}.{package}"
        return [package + name[1:] if name.startswith(".") else name for name in names], str(folder)

    @functools.cached_property
    def _tree(self) -> ast.Module:
        return _parse(self.file)

    @functools.cached_property
    def _path(self) -> Path:
        return (self.file or Path()).resolve()

    @functools.cached_property
    def _neighbours(self) -> list[Path]:
        """The files of its own that its imports run: below the first folder of Python's path, or in its package."""
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
    """Empty where Python itself says what is wrong with it."""
    with contextlib.suppress(SyntaxError, ValueError), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they come when the script runs
        return ast.parse(_read(file))
    return ast.parse("")


def _imports_of(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """(level, name) of all that these statements import."""
    for found in nodes:
        if isinstance(found, ast.Import):
            yield from ((0, alias.name) for alias in found.names)
        elif isinstance(found, ast.ImportFrom):
            yield from ((found.level, f"{found.module or ''}.{alias.name}".strip(".")) for alias in found.names)


def _packages(nodes: Iterable[ast.AST]) -> set[str]:
    """The packages that they import and that are not the importer's own, as far as that shows."""
    return {name.split(".")[0] for level, name in _imports_of(nodes) if level == 0}


def _file_of(module: str) -> Path | None:
    """The file that `python -m module` runs. Found without an import: a package's own code may be slow, or print."""
    folders, name, file = [os.getcwd(), *sys.path], "", ""  # Python puts the current folder first for -m
    for part in (*module.split("."), "__main__"):
        name = f"{name}.{part}".strip(".")
        # An editable install has a finder of its own, which knows whole names
        others = (finder.find_spec(name, None) for finder in sys.meta_path if finder is not PathFinder)
        if (spec := PathFinder.find_spec(part, folders) or next(filter(None, others), None)) is None:
            return None
        file = spec.origin or ""
        if spec.submodule_search_locations is None:
            break
        folders = [*spec.submodule_search_locations]
    return Path(file) if os.path.isfile(file) else None
