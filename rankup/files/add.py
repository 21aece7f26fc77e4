"""`rankup add`: render the templates for a script, and write the files that are not there yet."""

import difflib
import json
import os
import re
import shlex
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import jinja2

from rankup.errors import UserError
from rankup.files.repository import Origin, Packages, find_origin, find_packages
from rankup.places.files import staged

KINDS = ("compose", "slurm", "k8s")
HEADER = re.compile(r"^# (rankup add .+)$", re.MULTILINE)
# Where launch files may stand, for `rankup add --diff`
PLACES = ("*.y*ml", "*.sbatch", "Dockerfile*", ".dockerignore", "*/*.y*ml", "*/*.sbatch", "*/Dockerfile*")
ENVIRONMENT = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"), undefined=jinja2.StrictUndefined,
    trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, autoescape=False,  # no HTML
)
ENVIRONMENT.filters |= {"tojson": lambda value: json.dumps(value, ensure_ascii=False), "shell": shlex.join}


@dataclass(frozen=True)
class File:
    """A launch file: its path in the repository and its content, text or the bytes of a wheel."""

    path: str
    content: str | bytes


@dataclass
class Plan:
    """What one command adds. `notes`: lines to say. `next`: the commands to type."""

    files: list[File] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    next: list[str] = field(default_factory=list)


def add(given: Namespace, folder: Path) -> str:
    """Write the launch files that `given` asks for into `folder`. Returns what to print. Writes all files or none, and no
    file that exists. Raises UserError for a mistake, or if a file can't be written."""
    if given.diff and not given.script:
        return _compare_all(folder)
    plan = plan_files(given, folder)
    if given.diff:
        return "".join(_difference(folder / file.path, file.content) for file in plan.files if isinstance(file.content, str))
    if given.stdout:
        return "".join(file.content for file in plan.files if isinstance(file.content, str))
    said = [f"add: {note}" for note in plan.notes]
    present = [file for file in plan.files if (folder / file.path).exists()]
    absent = [file for file in plan.files if file not in present]
    _write(folder, absent)
    said += [f"add: wrote {file.path}" for file in absent]
    said += [f"add: {file.path} exists: left as it is (compare: {given.line.replace('add', 'add --diff', 1)})"
             for file in present if file.content not in (_read(folder / file.path), (folder / file.path).read_bytes())]
    return "\n".join([*said, "next:", *(f"  {line}" for line in plan.next)]) + "\n"


def plan_files(given: Namespace, folder: Path) -> Plan:
    """Return what `rankup add` would write. `given`: the parsed options; `given.script`: the script and its words."""
    plan = Plan()
    words, module = _script(given.script, folder, plan)
    name = _name(given.name or folder.resolve().name, plan)
    least, most = given.nodes
    gpus = given.gpus
    options = ["--nnodes", f"{least}:{most}"] if least < most else []
    stem = Path(words[0]).stem if not module else module.rpartition(".")[2]
    command = given.line
    variables: dict[str, Any] = {
        "name": name, "image": given.image or name, "command": command, "words": words, "options": options,
        "least": least, "most": most, "gpus": gpus, "data": [_data(each, folder) for each in given.data],
        "gpu_ids": lambda rank: [str(rank * gpus + number) for number in range(gpus)],
        "uid": os.getuid() or 1000, "gid": os.getgid() or 1000, "given": given, "folder": folder, "stem": stem,
    }
    kinds = given.kinds or KINDS
    if {"compose", "k8s"} & {*kinds}:
        _image(given, folder, plan, variables)
    if "compose" in kinds:
        plan.files.append(File("compose.yaml", render("compose.yaml", variables)))
        build = f"docker build -t {variables['base']} . && " if variables["own_base"] else ""
        plan.next.append(f"{build}docker compose up --build")
    return plan


def render(template: str, variables: dict[str, Any]) -> str:
    """Return the file that `template` makes with `variables`. Raises jinja2.UndefinedError if one is missing."""
    return ENVIRONMENT.get_template(template).render(variables)


def _script(words: Sequence[str], folder: Path, plan: Plan) -> tuple[list[str], str]:
    """Return the words for `rankup launch`, and the module's name if it is one. Raises UserError if there is none."""
    if not words or words == ["-m"]:
        raise UserError("add: SCRIPT must be given, got nothing. For example: rankup add compose slurm k8s train.py --lr 0.1")
    first, *rest = words
    if first == "-m":
        module = rest[0]
        path = module.replace(".", "/")
        if not any((folder / root / path).with_suffix(".py").is_file() or (folder / root / path / "__main__.py").is_file()
                   for root in ("", "src")):
            raise UserError(f"add: -m must name a module of this folder or its src/, got {module}.")
        return list(words), module
    if not (folder / first).is_file() and "\\" in first and (folder / first.replace("\\", "/")).is_file():
        plan.notes.append(f"script  {first} is written with / in launch files")
        first = first.replace("\\", "/")
    if not (folder / first).is_file():
        near = difflib.get_close_matches(first, [path.name for path in folder.glob("*.py")], n=1)
        raise UserError(f"add: SCRIPT must be an existing file, got {first}.{f' Did you mean {near[0]}?' if near else ''}")
    inside = os.path.relpath(os.path.realpath(folder / first), os.path.realpath(folder))
    if inside.startswith(".."):
        raise UserError(f"add: SCRIPT must be in this folder, which becomes the image, got {first}. Type the command there.")
    return [inside, *rest], ""


def _name(wanted: str, plan: Plan) -> str:
    """Return `wanted` as a name that Kubernetes, Docker and Slurm take."""
    name = re.sub(r"[^a-z0-9]+", "-", wanted.lower()).strip("-")[:40].strip("-")
    name = name if name[:1].isalpha() else f"job-{name}".strip("-")
    if name != wanted:
        plan.notes.append(f"name  {name}, as Kubernetes allows only lower-case letters, digits and -, not {wanted!r}")
    return name


@dataclass(frozen=True)
class Data:
    """A folder or file that the job reads. `source`: on this machine. `target`: in a container. `inside`: in the repository."""

    source: str
    target: str
    inside: bool


def _data(given: str, folder: Path) -> Data:
    path = Path(os.path.abspath(folder / given))
    if not path.exists():
        raise UserError(f"add: --data must be an existing folder or file, got {given}.")
    inside = os.path.relpath(path, os.path.abspath(folder))
    if inside == ".":
        raise UserError("add: --data must not be this folder itself, which becomes the image.")
    if inside.startswith(".."):
        return Data(str(path), str(path), inside=False)
    return Data(f"./{inside}", f"/work/{inside}", inside=True)


def _image(given: Namespace, folder: Path, plan: Plan, variables: dict[str, Any]) -> None:
    """Plan the Dockerfile and what belongs beside it. An existing Dockerfile of the user's becomes the base image."""
    theirs = (folder / "Dockerfile").is_file() and not HEADER.search(_read(folder / "Dockerfile"))
    own_base = given.base == "." or (theirs and not given.base)
    if own_base and not theirs:
        raise UserError("add: --base . must come with a Dockerfile of yours in this folder, got none.")
    if own_base:
        plan.notes.append("base  your Dockerfile, which stays: Dockerfile.rankup adds rankup and the files of this folder")
        packages = Packages()
    else:
        packages = find_packages(folder, given.requirements)
        plan.notes += packages.notes
        if packages.file and "torch" not in (packages.names or {"torch"}) and not given.base:
            plan.notes.append(f"packages  {packages.file} does not name torch: rankup brings the newest version. Name one")
    vendored = (folder / "rankup" / "__init__.py").is_file()
    known = vendored or "rankup" in (packages.names or ())
    origin = Origin("") if known else find_origin(metadata.distribution("rankup"))
    wheel = origin.wheel.name if origin.wheel else ""
    pip = f"uv pip install --python {packages.environment}" if packages.environment else "python -m pip install"
    variables |= {
        "packages": packages, "own_base": own_base, "wheel": wheel, "dockerfile": "Dockerfile.rankup" if theirs else "Dockerfile",
        "base": f"{variables['name']}-base" if own_base else given.base or f"python:3.{sys.version_info[1]}-slim-bookworm",
        "install_rankup": f"{pip} {f'/tmp/{wheel}' if wheel else shlex.quote(origin.requirement)}" if origin.requirement else "",
        "apt": [*given.apt, *(["git"] if "git+" in origin.requirement else [])],
        "pythonpath": ":".join(["/work"] * vendored + ["/work/src"] * ((folder / "src").is_dir() and not packages.project)),
    }
    plan.files += [File(variables["dockerfile"], render("Dockerfile", variables)),
                   File(".dockerignore", render("dockerignore", variables))]
    if origin.wheel:
        plan.files.append(File(wheel, origin.wheel.read_bytes()))


# Files ----------------------------------------------------------------------------------------------------------------


def _read(path: Path) -> str:
    return path.read_text(errors="replace")


def _write(folder: Path, files: Sequence[File]) -> None:
    """Write all files, or none. Raises UserError if the folder can't be written."""
    done: list[Path] = []
    try:
        for file in files:
            path = folder / file.path
            with staged(path) as staging:
                content = file.content.encode() if isinstance(file.content, str) else file.content
                staging.write_bytes(content)
            done.append(path)
    except OSError as error:
        for path in done:
            with suppress(OSError):
                path.unlink()
        raise UserError(f"add: {folder} must be writable, got {error.strerror}. No file was written.") from None


def _difference(path: Path, content: str) -> str:
    """Return a diff from the file to what this version of rankup would write."""
    present = _read(path) if path.exists() else ""
    return "".join(difflib.unified_diff(
        present.splitlines(keepends=True), content.splitlines(keepends=True), str(path.name), f"{path.name} as added today",
    ))


def _compare_all(folder: Path) -> str:
    """Render each file with a header again, and return the differences."""
    found = "".join(_difference(path, made) for path, made in rendered_again(folder))
    return found or "add: no launch file differs from what this version of rankup writes\n"


def rendered_again(folder: Path) -> Iterator[tuple[Path, str]]:
    """Iterate over the files in `folder` with a header, and what its command makes of each today."""
    from rankup.cli import COMMANDS

    for path in sorted({path for pattern in PLACES for path in folder.glob(pattern) if path.is_file()}):
        header = HEADER.search("\n".join(_read(path).splitlines()[:8]))
        if header:
            given = COMMANDS["add"].parse(shlex.split(header[1])[2:])
            kind = next((file for file in plan_files(given, folder).files
                         if Path(file.path).suffix == path.suffix and Path(file.path).stem.partition(".")[0] == path.stem.partition(".")[0]), None)
            if kind is not None and isinstance(kind.content, str):
                yield path, kind.content
