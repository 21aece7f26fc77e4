"""What stands in the user's repository: its script, its list of packages, its environment; and where rankup came from.

Reads files and changes nothing. Everything worth saying is a line in `notes`.
"""

import json
import os
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from rankup.errors import UserError

LISTS = ("uv.lock", "pylock.toml", "requirements.txt", "pyproject.toml", "setup.py")  # the first one that exists counts
# Lists that no command of ours installs
FOREIGN_LISTS = ("environment.yml", "environment.yaml", "conda.yaml", "poetry.lock", "Pipfile.lock", "pixi.lock")
ENVIRONMENT = "/opt/env"  # where uv installs
PIP = "python -m pip install"
PRINT_DEPENDENCIES = (
    "import tomllib; project = tomllib.load(open('pyproject.toml', 'rb'))['project']; "
    "print(*project.get('dependencies', []), sep='\\n')"
)


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


def find_packages(folder: Path, wanted: str = "") -> Packages:
    """Return how to install what the repository in `folder` needs, from its first list or from the list `wanted`.
    Raises UserError if a list can't be read."""
    if wanted and not (folder / wanted).is_file():
        raise UserError(f"add: --requirements must be a file in this folder, got {wanted}.")
    found = [wanted] if wanted else [name for name in LISTS if (folder / name).is_file()]
    project = _toml(folder / "pyproject.toml") if (folder / "pyproject.toml").is_file() else {}
    if "project" not in project and wanted != "pyproject.toml":
        found = [name for name in found if name != "pyproject.toml"]  # it only configures tools
    if not found:
        said = f"no list of packages ({', '.join(LISTS[:4])}): the image has only rankup and what it brings"
        for name in FOREIGN_LISTS:
            if (folder / name).is_file():
                said = f"pip can't install {name}: give --base IMAGE, an image that has these packages"
        return Packages(notes=[f"packages  {said}"])
    file, *others = found
    notes = [f"packages  from {file}{f', not from {others[0]}, which is here too' if others else ''}"]
    installs_itself = "build-system" in project
    if file in ("uv.lock", "pylock.toml"):
        return _locked(folder, file, notes, project)
    if file == "setup.py" or (file == "pyproject.toml" and "dependencies" in project["project"].get("dynamic", [])):
        return Packages(file, ["."], [f"{PIP} ."], names=None, notes=notes)
    if file == "pyproject.toml":
        wants = [str(each) for each in project["project"].get("dependencies", [])]
        return Packages(
            file, [file], [f"python -c {shlex.quote(PRINT_DEPENDENCIES)} > /tmp/list", f"{PIP} -r /tmp/list"],
            [f"{PIP} --no-deps ."] if installs_itself else [], frozenset(map(name_of, wants)), notes=notes,
        )
    read = Requirements(folder, file)
    if read.local:
        notes.append(f"packages  {read.local} installs from this folder, so each change of code installs all again")
    return Packages(
        file, ["."] if read.local else read.files, [f"{PIP} -r {file}"],
        [f"{PIP} --no-deps ."] if installs_itself and not read.local else [], frozenset(read.names), notes=notes,
    )


def _locked(folder: Path, file: str, notes: list[str], project: dict[str, Any]) -> Packages:
    """Return how uv installs a lock file, into an environment of its own: a lock lists all packages."""
    listed = _toml(folder / file).get("package" if file == "uv.lock" else "packages", [])
    names = frozenset(name_of(each["name"]) for each in listed)
    made = ["python -m pip install uv", f"uv venv --quiet --system-site-packages {ENVIRONMENT}"]
    if file == "pylock.toml":
        install = f"UV_PYTHON={ENVIRONMENT} uv pip install"
        own = [f"{install} --no-deps ."] if "build-system" in project else []
        return Packages(file, [file], [*made, f"{install} -r {file}"], own, names, ENVIRONMENT, notes)
    sync = f"UV_PROJECT_ENVIRONMENT={ENVIRONMENT} uv sync --frozen --inexact --no-dev"
    if "workspace" in project.get("tool", {}).get("uv", {}):  # uv reads the project files of all members
        return Packages(file, ["."], [*made, sync], [], names, ENVIRONMENT, notes)
    first = [*made, f"{sync} --no-install-project"]
    return Packages(file, ["pyproject.toml", file], first, [sync], names, ENVIRONMENT, notes)


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path.name}: it must be TOML, got {error}. Mend the file.") from None


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
        option = re.match(r"(-r|--requirement|-c|--constraint|-e|--editable)[ =]?\s*(.+)", line)
        value = (option[2] if option else line).strip().strip("\"'")
        includes = option is not None and option[1] not in ("-e", "--editable")
        is_path = includes or option or value.startswith((".", "/", "file:")) or value.endswith((".whl", ".tar.gz"))
        if "://" in value.removeprefix("file://") or (line.startswith("-") and not option):
            return  # an address, or an option of pip
        if not is_path:
            self.names.add(name_of(value))
            return
        relative = Path(file).parent if includes else Path()  # pip takes other paths from the current folder
        path = os.path.normpath(relative / re.sub(r"^file:(//)?", "", value).partition("[")[0])
        if path.startswith(("..", "/")):
            raise UserError(f"{file}: a path must be inside this folder to be in an image, got {line}. Move it here.")
        if not (folder / path).exists():
            raise UserError(f"{file}: a path must exist, got {line}. Mend the line.")
        if not includes:
            self.local = self.local or f'"{line}" in {file}'
        elif path not in self.files:
            self.files.append(path)


def _lines(path: Path) -> Iterator[str]:
    """Iterate over the lines of a requirements file, joined where they end in a backslash, without comments."""
    for line in re.sub(r"\\\r?\n", " ", path.read_text(errors="replace")).splitlines():
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


def activation(folder: Path, environ: Mapping[str, str]) -> list[str]:
    """Return the shell lines that make the user's Python available in a batch job."""
    lines = []
    if modules := environ.get("LOADEDMODULES", "").replace(":", " "):
        lines.append(f"module load {modules}")
    named = environ.get("CONDA_DEFAULT_ENV", "")
    if (folder / ".venv").is_dir() or (folder / "uv.lock").is_file():
        return lines  # the template has the line for it
    if named and named != "base":
        lines.append(f'source "{environ.get("CONDA_EXE", "conda").removesuffix("/bin/conda")}/etc/profile.d/conda.sh" '
                     f"&& conda activate {named}")
    elif environment := environ.get("VIRTUAL_ENV"):
        inside = os.path.relpath(environment, folder)
        lines.append(f"source {environment if inside.startswith('..') else inside}/bin/activate")
    return lines
