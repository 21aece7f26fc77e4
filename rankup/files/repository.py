"""What stands in the user's repository: its script, its list of packages, its environment; and where rankup came from.

Reads files and changes nothing. Everything worth saying is a line in `notes`.
"""

import codecs
import json
import os
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from rankup.errors import UserError
from rankup.files import HEADER, leads_outside

LISTS = ("uv.lock", "pylock.toml", "requirements.txt", "pyproject.toml", "setup.py")  # the first one that exists counts
CONDA_LISTS = ("environment.yml", "environment.yaml", "conda.yaml")
FOREIGN_LISTS = (*CONDA_LISTS, "poetry.lock", "Pipfile.lock", "pixi.lock")  # no command of ours installs them
PROJECT = {  # what rankup reads in pyproject.toml, tables first
    "project": "a table", "project.dependencies": "a list of texts", "project.dynamic": "a list of texts",
    "project.optional-dependencies": "a table", "project.scripts": "a table", "project.requires-python": "a text",
    "build-system": "a table", "build-system.requires": "a list of texts", "tool": "a table", "tool.uv": "a table",
}
ENVIRONMENT = "/opt/env"  # where uv installs
PIP = "python -m pip install"
SCM = "SETUPTOOLS_SCM_PRETEND_VERSION=0 "
_CONDA_NAME = re.compile(r"""^name:[ \t]*["']?([\w.-]+)""", re.MULTILINE)
NEEDS_GIT = re.compile(r'git\+|git = "')  # in a list of packages


@dataclass(frozen=True)
class Packages:
    """How an image gets the user's packages.

    `file`: the list of packages, or "" if there is none. `copy`: the files that `install` reads; "." stands for all.
    `install`: shell commands that come before the user's code, so that a change of code keeps their layer.
    `project`: shell commands after it. `names`: the packages in the list, or None if only an installer can tell.
    `environment`: the virtual environment that uv makes, or "" for the image's own Python.
    """

    file: str = ""
    copy: Sequence[str] = ()
    install: Sequence[str] = ()
    project: Sequence[str] = ()
    names: frozenset[str] | None = frozenset()
    environment: str = ""
    notes: Sequence[str] = ()

    @property
    def copies(self) -> dict[str, list[str]]:
        """The files in `copy` by their folder."""
        folders: dict[str, list[str]] = {}
        for path in self.copy:
            folders.setdefault(os.path.dirname(path) or ".", []).append(path)
        return folders


def find_packages(folder: Path, wanted: str = "", *, extras: Sequence[str] = (), near: str = ".") -> Packages:
    """Return how to install what the repository in `folder` needs, from its first list or from the list `wanted`.
    `extras`: the project's optional dependencies to install too. `near`: the script's folder, whose list is the best to
    name if `folder` has none. Raises UserError if a list can't be read."""
    if wanted and not (folder / wanted).is_file():
        raise UserError(f"add: --requirements must be a file in this folder, got {wanted}.")
    found = [wanted] if wanted else [name for name in LISTS if (folder / name).is_file()]
    project = read_project(folder)
    if not {"project", "build-system"} & {*project} and wanted != "pyproject.toml":
        found = [name for name in found if name != "pyproject.toml"]  # it only configures tools
    listed = [path.relative_to(folder) for where in ("", "*/") for path in folder.glob(f"{where}requirements*.txt")]
    more = [path.as_posix() for path in sorted(listed, key=lambda path: (path.parent != Path(near), path))]
    if not found:
        return Packages(notes=[f"packages  {_nothing_found(folder, more)}"])
    file, *others = [*found, *(name for name in more if "/" not in name and name not in found)]
    others = [name for name in others if file != "uv.lock" or name not in ("pyproject.toml", "setup.py")]
    notes = [f"packages  from {file}{f', not from {others[0]}, which is here too' if others else ''}"]
    optional = project.get("project", {}).get("optional-dependencies", {})
    if optional and not extras and file in ("uv.lock", "pyproject.toml"):
        notes.append(f"packages  without the extras {', '.join(optional)}: give --extra NAME for each that you need")
    if extras and file in ("pylock.toml", *more):
        raise UserError(f"add: --extra must come with uv.lock, pyproject.toml or setup.py, got {file}.")
    if file != "setup.py" and (unknown := [name for name in extras if name not in optional]):
        raise UserError(f"add: --extra must be one of {', '.join(optional) or 'none'}, got {unknown[0]}.")
    # In place, as the owner installs it, so that modules find the files beside them. Without .git there is no version
    scm = any(re.search("scm|vcs", each) for each in project.get("build-system", {}).get("requires", []))
    in_place = f"{SCM * scm}{PIP}"
    own = [f"{in_place} --no-deps -e ."] if installs_itself(folder) else []
    if file in ("uv.lock", "pylock.toml"):
        return _locked(folder, file, notes, project, own, extras)
    listing = project.get("project", {"dynamic": ["dependencies"]})  # other tools have lists of their own
    if file == "setup.py" or (file == "pyproject.toml" and "dependencies" in listing.get("dynamic", [])):
        this = f"'.[{','.join(extras)}]'" if extras else "."
        return Packages(file, ["."], [f"{in_place} -e {this}"], names=None, notes=notes)
    if file == "pyproject.toml":
        wants = [*listing.get("dependencies", []), *(each for name in extras for each in optional[name])]
        for want in wants:
            find_local(folder, file, want)
        lists = ["*p.get('dependencies', [])", *(f"*p['optional-dependencies']['{name}']" for name in extras)]
        code = f"p = tomllib.load(open('pyproject.toml', 'rb'))['project']; print({', '.join(lists)}, sep=chr(10))"
        return Packages(file, [file], [f'python -c "import tomllib; {code}" > /tmp/list', f"{PIP} -r /tmp/list"],
                        own, frozenset(map(name_of, wants)), notes=notes)
    read = Requirements(folder, file)
    if read.local:
        notes.append(f"packages  {read.local} installs from this folder, so each change of code installs all again")
    return Packages(file, ["."] if read.local else read.files, [f"{PIP} -r {file}"], own if not read.local else [],
                    frozenset(read.names), notes=notes)


def _nothing_found(folder: Path, more: Sequence[str]) -> str:
    """Say that no list of packages is in the folder, and what to do. `more`: lists in its folders."""
    if more:
        return f"no list of packages in this folder: give --requirements {more[0]}"
    if name := next((name for name in FOREIGN_LISTS if (folder / name).is_file()), ""):
        return f"pip can't install {name}: list the packages in requirements.txt, or give --base IMAGE, which has them"
    return f"no list of packages ({', '.join(LISTS[:4])}): the image has only rankup and what it brings"


def _locked(
    folder: Path, file: str, notes: list[str], project: dict[str, Any], own: list[str], extras: Sequence[str],
) -> Packages:
    """Return how uv installs a lock file, into an environment of its own: a lock lists all packages."""
    if file == "uv.lock" and not (folder / "pyproject.toml").is_file():
        raise UserError("add: uv.lock must have its pyproject.toml beside it, got none. Give --requirements FILE.")
    listed = _toml(folder / file).get("package" if file == "uv.lock" else "packages") or []
    if not isinstance(listed, list) or not all(isinstance(each, dict) and "name" in each for each in listed):
        raise UserError(f"{file}: it must be a lock file, got packages without a name. Lock again.")
    names = frozenset(name_of(each["name"]) for each in listed)
    sources = [each.get("source", each) for each in listed]  # uv's; pylock.toml has the same words without a table
    kinds = ("editable", "directory", "path", "virtual", "archive", "wheel")
    named = [source[kind] for source in sources if isinstance(source, dict) for kind in kinds if kind in source]
    paths = [path.get("path") if isinstance(path, dict) else path for path in named]
    local = [path for path in paths if path and path != "." and find_local(folder, file, path, f"file:{path}")]
    made = ["python -m pip install uv", f"uv venv --quiet --system-site-packages {ENVIRONMENT}"]
    uv = f"UV_PYTHON={ENVIRONMENT} uv pip install"
    if file == "pylock.toml":
        own = [command.replace(PIP, uv) for command in own]
        copy = ["."] if local else [file]
        return Packages(file, copy, [*made, f"{uv} -r {file}"], own, names, ENVIRONMENT, notes)
    sync = f"UV_PROJECT_ENVIRONMENT={ENVIRONMENT} uv sync --frozen --inexact --no-dev"
    sync = f"{SCM * (SCM in ' '.join(own))}{sync}{''.join(f' --extra {name}' for name in extras)}"
    if local or "workspace" in project.get("tool", {}).get("uv", {}):  # uv reads the project files of all members
        return Packages(file, ["."], [*made, sync], [], names, ENVIRONMENT, notes)
    first = [*made, f"{sync} --no-install-project"]
    return Packages(file, ["pyproject.toml", file], first, [sync], names, ENVIRONMENT, notes)


def read(path: Path, limit: int = -1) -> str:
    """Return the text of a file, or its first `limit` characters."""
    with path.open(errors="replace") as file:
        return file.read(limit)


def read_project(folder: Path) -> dict[str, Any]:
    """Return what pyproject.toml says, or {} if there is none. Raises UserError for what no tool can read."""
    said = _toml(folder / "pyproject.toml") if (folder / "pyproject.toml").is_file() else {}
    for names, kind in PROJECT.items():
        value: Any = said
        for name in names.split("."):
            value = value.get(name) if value is not None else None
        kinds = {"a table": dict, "a list of texts": list, "a text": str}
        if value is not None and not (isinstance(value, kinds[kind]) and (kind != "a list of texts" or _texts(value))):
            raise UserError(f"pyproject.toml: {names} must be {kind}, got {value}. Correct the file.")
    optional = said.get("project", {}).get("optional-dependencies", {})
    if wrong := [name for name, value in optional.items() if not isinstance(value, list) or not _texts(value)]:
        raise UserError(f"pyproject.toml: the extra {wrong[0]} must be a list of texts, got {optional[wrong[0]]}.")
    return said


def _texts(values: list[Any]) -> bool:
    return all(isinstance(value, str) for value in values)


def python_minor(requires: str, running: int) -> int:
    """Return N of the Python 3.N for the image: the running one if the project's `requires` allows it, or the nearest
    that it does. uv would download another Python to where only root reads it."""
    least, most = 0, 99
    for operator, digits, patch in re.findall(r"(~=|===?|[<>]=?)\s*3\.(\d+)(\.[\d*]+)?", requires):
        minor, exact = int(digits), "==" in operator or (operator == "~=" and patch)
        least = max(least, minor) if exact or operator[0] in ">~" else least
        most = min(most, minor) if exact or operator == "<=" else most
        most = min(most, minor - 1 + bool(patch.strip(".0"))) if operator == "<" else most
    return min(max(running, least), most)


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path.name}: it must be TOML, got {error}. Correct the file.") from None


def name_of(requirement: str) -> str:
    """Return a requirement's package, normalized: `Foo_bar[x]>=1; python_version > "3"` is `foo-bar`."""
    found = re.match(r"[A-Za-z0-9][A-Za-z0-9._-]*", requirement.strip())
    return re.sub(r"[-_.]+", "-", found[0]).lower() if found else ""


class Requirements:
    """A requirements file and those that it includes. `files`: all of them. `names`: the packages. `local`: a line that
    installs from the folder itself, or "". Raises UserError for a line that needs a file outside of the folder."""

    def __init__(self, folder: Path, file: str) -> None:
        self.files, self.names, self.local = [file], set[str](), ""
        for name in self.files:  # grows on the way
            for line in _lines(folder / name):
                self._read(folder, name, line)

    def _read(self, folder: Path, file: str, line: str) -> None:
        option = re.match(r"(-r|--requirement|-c|--constraint|-e|--editable|-f|--find-links)[ =]?\s*(.+)", line)
        if line.startswith("-") and not option:
            return  # another option of pip
        if option and option[1] in ("-r", "--requirement", "-c", "--constraint"):
            if path := find_local(folder, file, line, f"file:{option[2]}", within=Path(file).parent):
                self.files += [path] * (path not in self.files)
        elif path := find_local(folder, file, line, option[2] if option else ""):
            self.local = self.local or f'"{line}" in {file}'
        elif "://" not in line:
            self.names.add(name_of(line))


def find_local(folder: Path, file: str, line: str, value: str = "", *, within: Path = Path()) -> str:
    """Return the path in `folder` that a line of a list names, or "" if it names a package or an address. `value`: the
    part of the line that is a path or an address. Relative paths begin in `within`. Raises UserError for a path that no
    image can have."""
    is_path = bool(value)
    value = re.sub(r"^[\w.\[\], -]+ *@ *(?=file:)", "", (value or line).strip().strip("\"'"))
    is_path = is_path or value.startswith((".", "/", "file:")) or value.endswith((".whl", ".tar.gz"))
    if not is_path or "://" in value.removeprefix("file://"):
        return ""
    path = os.path.normpath(within / re.sub(r"^file:(//)?", "", value).partition("[")[0])
    if path.startswith(("..", "/")):
        raise UserError(f"{file}: a path must be inside this folder to be in an image, got {line}. Move it in.")
    if not (folder / path).exists():
        raise UserError(f"{file}: a path must exist, got {line}. Correct the line.")
    return path


def _lines(path: Path) -> Iterator[str]:
    """Iterate over the lines of a requirements file, joined where they end in a backslash, without comments."""
    data = path.read_bytes()
    is_wide = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))  # PowerShell writes it
    text = data.decode("utf-16" if is_wide else "utf-8-sig", "replace")
    for line in re.sub(r"\\\r?\n", " ", text).splitlines():
        if stripped := re.sub(r"(^|\s)#.*", "", line).strip():
            yield stripped


# Where rankup comes from ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Origin:
    """How an image gets this version of rankup. `requirement`: for pip. `wheel`: a file beside the Dockerfile."""

    requirement: str
    wheel: Path | None = None


def find_origin(distribution: metadata.Distribution) -> Origin:
    """Return where the installed rankup came from. An installer writes that to `direct_url.json` (PEP 610), unless it
    took the package from an index. Raises UserError if an image can't get it from there."""
    text = distribution.read_text("direct_url.json")
    if not text:
        return Origin(f"rankup=={distribution.version}")
    found = json.loads(text)
    if vcs := found.get("vcs_info"):
        return Origin(f"rankup @ {vcs['vcs']}+{found['url']}@{vcs['commit_id']}")
    address = urlsplit(found["url"])
    if address.scheme != "file":
        return Origin(f"rankup @ {found['url']}")
    path = Path(unquote(address.path))
    if path.suffix == ".whl" and path.is_file():
        return Origin(path.name, path)
    if path.is_dir() and (wheels := sorted(path.glob("dist/rankup-*.whl"), key=lambda wheel: wheel.stat().st_mtime)):
        return Origin(wheels[-1].name, wheels[-1])
    if path.is_dir():
        raise UserError(
            f"add: rankup must have a wheel to get into an image, got the folder {path}. Make one: "
            f"pip wheel --no-deps -w {path}/dist {path}"
        )
    raise UserError(f"add: the wheel of rankup must still be at {path}, got no file. Install rankup from it again.")


# The environment on a cluster -----------------------------------------------------------------------------------------


def activation(folder: Path, environ: Mapping[str, str]) -> tuple[str, str]:
    """Return the shell lines that make the user's Python available in a batch job: one that loads the modules, or "",
    and one for the environment: .venv, the active one, one in the folder, or that of environment.yml, in this order."""
    modules = environ.get("LOADEDMODULES", "").replace(":", " ")
    load = f"module load {modules}" if modules else ""
    active, named = environ.get("VIRTUAL_ENV", ""), environ.get("CONDA_DEFAULT_ENV", "")
    inside = sorted(path.parent.name for each in ("pyvenv.cfg", "conda-meta") for path in folder.glob(f"*/{each}"))
    of_lists = (_CONDA_NAME.search(read(folder / name)) for name in CONDA_LISTS if (folder / name).is_file())
    of_list = next((found[1] for found in of_lists if found), "")
    if (folder / ".venv").is_dir() or (folder / "uv.lock").is_file():
        place = ".venv"
    elif (named and named != "base") or not (active or inside or not of_list):
        return load, _conda(named if named not in ("", "base") else of_list, folder, environ)
    else:
        place = active or min(inside, default=".venv")
    if (folder / place / "conda-meta").is_dir():
        return load, _conda(str(folder.absolute() / place), folder, environ)
    within = os.path.relpath(folder / place, folder)
    path = shlex.quote(place) if within.startswith("..") else f"$PWD/{shlex.quote(within)}"
    return load, f"export PATH={path}/bin:$PATH"


def _conda(environment: str, folder: Path, environ: Mapping[str, str]) -> str:
    """Return the line that activates an environment of conda, by its name or its path."""
    if "/" in environment and not (within := os.path.relpath(environment, folder)).startswith(".."):
        environment = f"./{within}"
    if micromamba := environ.get("MAMBA_EXE", "") if "CONDA_EXE" not in environ else "":
        hook, tool = f"{shlex.quote(micromamba)} shell hook --shell bash", "micromamba"
    else:
        hook, tool = f"{shlex.quote(environ.get('CONDA_EXE', 'conda'))} shell.bash hook", "conda"
    return f'eval "$({hook})" && {tool} activate {shlex.quote(environment)}'


# What an image would lack, or carry in vain --------------------------------------------------------------------------


def find_gaps(folder: Path, words: Sequence[str], mounted: Sequence[str], left_out: Sequence[str]) -> Iterator[str]:
    """Iterate over notes on what the image would lack, or carry in vain. `words`: the script and its words. `mounted`:
    the paths of --data. `left_out`: what the image needs least, in the words of .dockerignore."""
    modules = folder / ".gitmodules"
    paths = re.findall(r"(?m)^\s*path *= *(.+?)\s*$", read(modules)) if modules.is_file() else []
    if empty := [path for path in paths if not any((folder / path).glob("*"))]:
        yield f"files  {', '.join(empty)}: empty, as submodules are until you bring them with git"
    theirs = folder / ".dockerignore"
    ignored = {line.strip().strip("/") for line in _lines(theirs)} if theirs.is_file() else {*left_out}
    names_all = bool(ignored & {"*", "**"})  # and then what the image has
    lacking = [each for each in left_out if each.strip("/") not in ignored and (folder / each).exists()]
    if lacking and not names_all:
        yield f"files  your .dockerignore does not name {' '.join(lacking)}: add these lines, or the image has them too"
    for path in sorted(folder.iterdir()):
        if names_all or path.name in ignored or path.name in left_out:
            continue
        if path.is_symlink() and leads_outside(folder, path.name):
            target = os.path.realpath(path)
            yield f"files  {path.name} is a link to {target}, which no image has: give --data {path.name}"
        elif path.is_dir() and _is_large(path):
            yield f"files  {path.name} has more than 1 GB, which the image would carry: give --data {path.name}"
    for word in words[1:]:
        path = Path(word.rpartition("=")[2])
        if path.is_absolute() and path.exists() and not any(path.is_relative_to(each) for each in mounted):
            yield f"files  {path} is not in the image: give --data {path}"


def import_roots(script: Path, folder: Path, is_module: bool, is_installed: bool) -> list[str]:
    """Return where Python must look for the repository's own modules, besides the script's folder: "" is `folder`
    itself, for a script in a sub-folder that imports what lies there, as with PYTHONPATH=. in a shell; "/src" is src/,
    unless pip installs the repository."""
    names = re.findall(r"(?m)^\s*(?:from|import) (\w+)", read(script))
    from_root = not is_module and script.parent != folder and any(
        path.with_suffix(".py").is_file() or any(path.glob("*.py")) for path in (folder / name for name in names)
    )
    from_src = (folder / "src").is_dir() and not (folder / "src" / "__init__.py").is_file() and not is_installed
    return [""] * from_root + ["/src"] * from_src


def installs_itself(folder: Path) -> bool:
    """Return whether pip can install the repository."""
    return "build-system" in read_project(folder) or (folder / "setup.py").is_file()


def blank_arguments(dockerfile: str) -> list[str]:
    """Return the arguments without a default that name a base image in the text of a Dockerfile, sorted."""
    images = "\n".join(re.findall(r"(?im)^\s*FROM\s+(?:--platform=\S+\s+)?(\S+)", dockerfile))
    given = re.findall(r"(?im)^\s*ARG\s+(\w+)=", dockerfile)
    return sorted({*re.findall(r"\$\{?(\w+)\b(?!:-)", images)} - {*given})


def other_dockerfile(folder: Path, ours: str) -> str:
    """Return a Dockerfile of the user's under another name than Dockerfile, or ""."""
    found = [path for pattern in ("Dockerfile.*", "docker/*ockerfile*") for path in sorted(folder.glob(pattern))]
    theirs = (path.relative_to(folder).as_posix() for path in found if path.is_file()
              and not HEADER.search(read(path)))
    return next((path for path in theirs if path != ours), "")


def _is_large(folder: Path, limit: int = 10**9) -> bool:
    """Return whether the files in a folder have more than `limit` bytes. It stops there, or after 20,000 files."""
    total = 0
    files = (os.path.join(place, name) for place, _, names in os.walk(folder) for name in names)
    for path in islice(files, 20_000):
        with suppress(OSError):
            total += os.lstat(path).st_size
        if total > limit:
            return True
    return False
