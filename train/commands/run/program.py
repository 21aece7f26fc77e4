"""Which file the script is, what must be the same of it on all nodes, and how its command line looks. No torch here."""

import ast
import hashlib
import os
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from rankup.errors import ConfigError

# As a script declares it for torch.distributed.launch, which gave each process its local rank so
DECLARES_LOCAL_RANK = re.compile(r"""["']--(local[_-]rank)["']""")


@dataclass(frozen=True, slots=True)
class Program:
    """`words`: the script and its arguments, or -m, a module and those. `file`: None where only Python can find it."""

    words: Sequence[str]
    file: Path | None

    @staticmethod
    def find(words: Sequence[str]) -> "Program":
        """Raises ConfigError for a -m without a module."""
        if words[0] != "-m":
            return Program(words, Path(words[0]))
        if len(words) < 2:
            raise ConfigError("-m must be followed by a module, got nothing.")
        return Program(words, _file_of(words[1]))

    @property
    def name(self) -> str:
        """For messages."""
        return f"-m {self.words[1]}" if self.words[0] == "-m" else Path(self.words[0]).name

    @property
    def missing(self) -> bool:
        # Not Path.is_file, which raises where a folder may not be read
        return self.file is not None and not os.path.isfile(self.file)

    def refuse_missing(self) -> None:
        """Raises ConfigError for a script that is nowhere."""
        if self.missing:
            raise ConfigError(f"SCRIPT must be a file, got {self.file}: there is none.")

    def must_match(self) -> dict[str, str]:
        """What all nodes must have in common, by name. Says itself what is wrong with a file that differs."""
        version = ".".join(map(str, sys.version_info[:2]))
        return {"python version": version, f"script {self.name}": self._digest(), **self._modules()}

    def _modules(self) -> dict[str, str]:
        """The digest of each file below the script's folder that it imports, directly or not. Found in the sources."""
        if self.file is None or self.missing:
            return {}
        file = self.file.resolve()
        root = Path.cwd() if self.words[0] == "-m" else file.parent  # as Python's path begins
        found, waiting = {file}, [file]
        while waiting:
            new = set(_imports(waiting.pop(), root)) - found
            found |= new
            waiting += new
        return {f"imported {each.relative_to(root).as_posix()}": _digest(each) for each in sorted(found - {file})}

    def check(self, environ: Mapping[str, str], *, world_size: int) -> None:
        """Raises ConfigError for a script that no node has, and for one whose ranks would not find each other.

        Horovod without HOROVOD_SIZE, which horovodrun sets, is a world of one in each process, and says nothing.
        """
        self.refuse_missing()
        given, by_mpi = environ.get("HOROVOD_SIZE", ""), environ.get("HOROVOD_CONTROLLER", "") == "mpi"
        if world_size > 1 and given != str(world_size) and not by_mpi and self._imports_horovod():
            raise ConfigError(
                f"{self.name}: HOROVOD_SIZE must be {world_size} for its import of horovod, got {given or 'nothing'}: "
                f"each rank would train alone. Start it with horovodrun -np {world_size} --gloo python -m train.main "
                f"run {self.name}, or under mpirun, where Horovod was built with MPI, with HOROVOD_CONTROLLER=mpi."
            )

    def _imports_horovod(self) -> bool:
        """At its top level: an import in a function or under a condition may be one that never runs."""
        if self.file is None:
            return False
        try:
            body = _compiled(self.file, self.file.read_bytes(), flags=ast.PyCF_ONLY_AST).body
        except (SyntaxError, ValueError):
            return False  # Python itself says what is wrong with it
        names = [alias.name for statement in body if isinstance(statement, ast.Import) for alias in statement.names]
        names += [found.module or "" for found in body if isinstance(found, ast.ImportFrom) and found.level == 0]
        return any(name.split(".")[0] == "horovod" for name in names)

    def _digest(self) -> str:
        if self.file is None:
            return "a module that Python itself finds"
        if self.missing:
            return "no such file"
        source = self.file.read_bytes()
        digest = hashlib.sha256(source).hexdigest()[:12]
        try:
            _compiled(self.file, source)
        except (SyntaxError, ValueError) as error:
            line = getattr(error, "lineno", None)
            return f"{digest} with a syntax error{f' in line {line}' if line else ''} ({getattr(error, 'msg', error)})"
        return digest

    def command(self, *, local_rank: int, option: str) -> list[str]:
        """Python's words for it. `option`: of `--pass-local-rank`. The file's name works in any folder."""
        script = ["-m", self.words[1]] if self.words[0] == "-m" else [str(Path(self.words[0]).absolute())]
        arguments = list(self.words[len(script):])
        if option == "auto":
            option = self._declared_local_rank()
        given = any(re.match(r"--local[_-]rank(=|$)", word) for word in arguments)
        if option not in ("", "no") and not given:
            arguments = [f"--{option}={local_rank}", *arguments]
        return [*script, *arguments]

    def _declared_local_rank(self) -> str:
        if self.file is None or self.missing:
            return ""
        found = DECLARES_LOCAL_RANK.search(self.file.read_text(errors="replace"))
        return found[1] if found else ""


def _digest(file: Path) -> str:
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()[:12]
    except OSError:
        return "can't be read"


def _compiled(file: Path, source: bytes, *, flags: int = 0) -> Any:
    """Raises SyntaxError and ValueError. Python's warnings come when the script runs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return compile(source, str(file), "exec", flags)


def _imports(file: Path, root: Path) -> Iterator[Path]:
    """The files below `root`, the first folder of Python's path, that `file` imports, also under a condition."""
    try:
        tree = _compiled(file, file.read_bytes(), flags=ast.PyCF_ONLY_AST)
    except (SyntaxError, ValueError, OSError):
        return  # Python itself says what is wrong with it
    for node in ast.walk(tree):
        names, folder = [], root
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            folder = [root, *file.parents][node.level] if node.level <= len(file.parents) else root
            names = [".".join(filter(None, (node.module, alias.name))) for alias in node.names]
        for name in names:
            path = folder
            for part in name.split("."):
                path /= part
                files = (path / "__init__.py", path.with_suffix(".py"))
                yield from (found for found in files if os.path.isfile(found) and root in found.parents)


def _file_of(module: str) -> Path | None:
    """The file that `python -m module` runs. Found without an import: a package's own code may be slow, or print."""
    top, *rest = module.split(".")
    # Python puts the current folder first for -m
    spec = PathFinder.find_spec(top, ["", *sys.path])
    if spec is None:
        return None
    if not spec.submodule_search_locations:
        return Path(spec.origin) if spec.origin and not rest else None
    for folder in spec.submodule_search_locations:
        path = Path(folder, *rest)
        for file in (path / "__main__.py", path.with_suffix(".py") if rest else path / "__main__.py"):
            if os.path.isfile(file):
                return file
    return None
