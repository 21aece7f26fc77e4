"""What stands in the user's repository: its script, its list of packages, its environment; and where rankup came from.

Reads files and changes nothing. Everything worth saying is a line in `notes`.
"""

import json
import os
import re
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
UV_ENVIRONMENT = "/opt/env"
UV = f"UV_PROJECT_ENVIRONMENT={UV_ENVIRONMENT} uv sync --frozen --inexact --no-dev"


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
    """Return how to install what the repository in `folder` needs, by its first list or the list `wanted`. Raises
    UserError if a list can't be read."""
    if wanted and not (folder / wanted).is_file():
        raise UserError(f"add: --requirements must be a file in this folder, got {wanted}.")
    if wanted and wanted not in LISTS:
        return _from_requirements(folder, wanted, [f"packages  from {wanted}"], has_project=False)
    found = [wanted] if wanted else [name for name in LISTS if (folder / name).is_file()]
    project: dict[str, Any] = _toml(folder / "pyproject.toml") if "pyproject.toml" in found else {}
    if "pyproject.toml" in found and "project" not in project:
        found.remove("pyproject.toml")  # it only configures tools
    if not found:
        foreign = [name for name in FOREIGN_LISTS if (folder / name).is_file()]
        said = f"{foreign[0]} can't be installed with pip: give --base IMAGE, an image that has its packages" if foreign \
            else f"no list of packages ({', '.join(LISTS[:4])}): the image has only rankup and what it brings"
        return Packages(notes=(f"packages  {said}",))
    file, *others = found
    notes = [f"packages  from {file}" + (f", not from {' or '.join(others)}, which is here too" if others else "")]
    installs_project = "build-system" in project
    if file == "uv.lock":
        whole = "workspace" in project.get("tool", {}).get("uv", {})
        names = frozenset(each["name"] for each in _toml(folder / file).get("package", []))
        return Packages(
            file, ["."] if whole else ["pyproject.toml", "uv.lock"],
            ["python -m pip install uv", f"uv venv --quiet --system-site-packages {UV_ENVIRONMENT}",
             UV if whole else f"{UV} --no-install-project"],
            [] if whole else [UV], names, UV_ENVIRONMENT, notes,
        )
    if file == "pylock.toml":
        names = frozenset(each["name"] for each in _toml(folder / file).get("packages", []))
        return Packages(
            file, [file], ["python -m pip install uv", f"uv venv --quiet --system-site-packages {UV_ENVIRONMENT}",
                           f"uv pip install --python {UV_ENVIRONMENT} -r {file}"],
            [f"uv pip install --python {UV_ENVIRONMENT} --no-deps ."] if installs_project else [], names, UV_ENVIRONMENT, notes,
        )
    if file == "requirements.txt":
        return _from_requirements(folder, file, notes, has_project=installs_project)
    listed = project.get("project", {})
    if file == "setup.py" or "dependencies" in listed.get("dynamic", []):
        return Packages(file, ["."], ["python -m pip install ."], [], None, notes=notes)
    read_list = ("import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project'].get('dependencies', []), "
                 "sep='\\n')")
    return Packages(
        file, [file], [f'python -c "{read_list}" > /tmp/list', "python -m pip install -r /tmp/list", "rm /tmp/list"],
        ["python -m pip install --no-deps ."] if installs_project else [], frozenset(map(name_of, listed.get("dependencies", []))), notes=notes,
    )


def _from_requirements(folder: Path, file: str, notes: list[str], *, has_project: bool) -> Packages:
    read = _requirements(folder, file)
    if read.outside:
        raise UserError(
            f"{read.outside[0]}: a requirement must be inside this folder to get into an image, got {read.outside[1]}. "
            "Move it here, or name an address."
        )
    if read.local:
        notes.append(f"packages  {read.local} installs from this folder: a change of code installs all packages again")
    return Packages(
        file, ["."] if read.local else list(read.files), [f"python -m pip install -r {file}"],
        ["python -m pip install --no-deps ."] if has_project and not read.local else [], frozenset(read.names), notes=notes,
    )


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path.name}: it must be TOML, got {error}. Mend the file.") from None


def name_of(requirement: str) -> str:
    """Return a requirement's package, normalized: `Foo_bar[x]>=1; python_version > "3"` is `foo-bar`."""
    found = re.match(r"[A-Za-z0-9][A-Za-z0-9._-]*", requirement.strip())
    return re.sub(r"[-_.]+", "-", found[0]).lower() if found else ""


@dataclass
class _Requirements:
    """What a requirements file says. `files`: it and those that it includes. `local`: a line that installs from the folder.
    `outside`: a file and its line that needs something outside of the folder."""

    files: list[str]
    names: set[str]
    local: str = ""
    outside: tuple[str, str] | None = None


def _requirements(folder: Path, name: str) -> _Requirements:
    read = _Requirements([name], set())
    for file in read.files:  # grows on the way
        for line in _lines(folder / file):
            option = re.match(r"(-r|--requirement|-c|--constraint|-e|--editable)[ =]?\s*(.+)", line)
            value = option[2].strip() if option else line
            if option and option[1] in ("-r", "--requirement", "-c", "--constraint"):
                path = os.path.normpath(Path(file).parent / value)
                if "://" in value:
                    continue
                if path.startswith(("..", "/")):
                    read.outside = (file, line)
                elif not (folder / path).is_file():
                    raise UserError(f"{file}: {line} must name an existing file. Mend the line.")
                elif path not in read.files:
                    read.files.append(path)
            elif (option or value.startswith((".", "/", "file:")) or value.endswith((".whl", ".tar.gz"))) and "://" not in value:
                path = os.path.normpath(value.removeprefix("file:").partition("[")[0])
                if path.startswith(("..", "/")):
                    read.outside = (file, line)
                read.local = read.local or f'"{line}" in {file}'
            elif not line.startswith("-"):
                read.names.add(name_of(value))
    return read


def _lines(path: Path) -> Iterator[str]:
    """Iterate over the lines of a requirements file, joined where they end in a backslash, without comments."""
    for line in re.sub(r"\\\r?\n", " ", path.read_text(errors="replace")).splitlines():
        if stripped := re.sub(r"(^|\s)#.*", "", line).strip():
            yield stripped


# Where rankup comes from ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Origin:
    """How an image gets this version of rankup. `requirement`: for pip. `wheel`: the file to put beside the Dockerfile."""

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
        lines.append("source .venv/bin/activate")
    elif named and named != "base":
        lines.append(f'source "{environ.get("CONDA_EXE", "conda").removesuffix("/bin/conda")}/etc/profile.d/conda.sh" '
                     f"&& conda activate {named}")
    elif environment := environ.get("VIRTUAL_ENV"):
        inside = os.path.relpath(environment, folder)
        lines.append(f"source {environment if inside.startswith('..') else inside}/bin/activate")
    return lines
