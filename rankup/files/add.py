"""`rankup add`: render the templates for a script, and write the files that are not there yet."""

import difflib
import json
import os
import re
import shlex
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import jinja2

from rankup.agent.script import Script
from rankup.errors import UserError
from rankup.files import HEADER, IN_IMAGE, JOB_KINDS, KINDS
from rankup.files.k8s import k8s_variables, same_name
from rankup.files.repository import (
    NEEDS_GIT,
    PIP,
    Origin,
    Packages,
    activation,
    find_gaps,
    find_origin,
    find_packages,
    imports_from_root,
    other_dockerfile,
    python_minor,
    read_project,
)
from rankup.places.files import staged

Parse = Callable[[Sequence[str]], Namespace]

# Where launch files may stand, for `rankup add --diff`
PLACES = ("*.y*ml", "*.sbatch", "Dockerfile*", ".dockerignore", "*/*.y*ml", "*/*.sbatch", "*/Dockerfile*")
ENVIRONMENT = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"), undefined=jinja2.StrictUndefined,
    trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, autoescape=False,  # no HTML
)
ENVIRONMENT.filters |= {"tojson": lambda value: json.dumps(value, ensure_ascii=False), "shell": shlex.join}


@dataclass(frozen=True)
class File:
    """A file to write: its path in the repository, and its text, or the bytes of a wheel. `launches`: whether the user
    starts a job with it, unlike with a Dockerfile."""

    path: str
    content: str = ""
    wheel: bytes = b""
    launches: bool = True

    @property
    def bytes(self) -> bytes:
        return self.wheel or self.content.encode()


@dataclass
class Plan:
    """What one command adds. `notes`: lines to say. `next`: the commands to type."""

    files: list[File] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    next: list[str] = field(default_factory=list)

    @property
    def texts(self) -> list[File]:
        return [file for file in self.files if not file.wheel]


def add(given: Namespace, folder: Path, parse: Parse) -> str:
    """Write the launch files that `given` asks for into `folder`: all of them, or none. A file that exists stays as it
    is. Returns what to print. `parse` reads the words of a header. Raises UserError for a mistake, and if a file can't
    be written."""
    try:
        if given.diff and not given.script:
            return _compare_all(folder, parse)
        plan = plan_files(given, folder)
    except OSError as error:
        raise UserError(f"add: {error.filename} must be readable, got {error.strerror}.") from None
    if given.diff:
        return "".join(_difference(folder / file.path, file.content) for file in plan.texts)
    if given.stdout:
        shown = [file.content for file in plan.texts if file.launches]
        return ("---\n" if set(given.kinds) == {"k8s"} else "").join(shown)
    said = [f"add: {note}" for note in plan.notes]
    present = [file for file in plan.files if (folder / file.path).exists()]
    absent = [file for file in plan.files if file not in present]
    _write(folder, absent)
    said += [f"add: wrote {file.path}" for file in absent]
    compare = given.line.replace("add", "add --diff", 1)
    for file in present:
        if file.bytes != (folder / file.path).read_bytes():
            way_out = "remove it to get the installed one" if file.wheel else f"compare: {compare}"
            way_out += "; another file: --file FILE" if file.launches and not file.wheel else ""
            said.append(f"add: {file.path} exists: left as it is ({way_out})")
    return "\n".join([*said, "next:", *(f"  {line}" for line in plan.next)]) + "\n"


def plan_files(given: Namespace, folder: Path) -> Plan:
    """Return what `rankup add` would write. `given`: the parsed options; `given.script`: the script and its words."""
    plan = Plan()
    words, module, file = _script(given.script, folder, plan)
    name = _name(given.name or folder.resolve().name, plan)
    least, most = given.nodes
    gpus = given.gpus
    options = ["--nnodes", f"{least}:{most}"] if least < most else []
    stem = Path(words[0]).stem if not module else module.rpartition(".")[2]
    command = given.line
    variables: dict[str, Any] = {
        "name": name, "image": given.image or name, "command": command, "words": words, "options": options,
        "least": least, "most": most, "gpus": gpus, "data": [_data(each, folder) for each in given.data],
        "outputs": [_inside(each, folder, "--output") for each in given.output],
        "gpu_ids": lambda rank: [str(rank * gpus + number) for number in range(gpus)],
        "uid": os.getuid() or 1000, "gid": os.getgid() or 1000, "in_image": IN_IMAGE,
    }
    if (most > 1 or gpus > 1) and not Script.find(words).names_a_group:
        plan.notes.append(
            f"script  {module or words[0]} names no torch.distributed: each of its ranks would train alone, "
            "and all write the same files. Give --nodes 1, or see train/migrate.md"
        )
    kinds = given.kinds or KINDS
    if given.file and len(kinds) > 1:
        raise UserError("add: --file must come with one kind of launch file: compose, slurm or k8s.")
    if given.file:
        _inside(given.file, folder, "--file")
    if given.kind and "k8s" not in kinds:
        raise UserError("add: --kind must come with k8s: compose and slurm have one kind of job.")
    given.kind = given.kind or JOB_KINDS[0]
    build_base = ""
    if {"compose", "k8s"} & {*kinds}:
        _image(given, folder, plan, variables, file)
        build_base = f"docker build -t {variables['base']} . && " if variables["own_base"] else ""
    if "compose" in kinds:
        _compose(given, plan, variables)
        plan.next.append(f"{build_base}docker compose up --build")
    if "slurm" in kinds:
        path = given.file or f"{stem}.sbatch"
        modules, environment = activation(folder, os.environ)
        seed = not module and bool(re.search(r"--seed\b", _read(file)))
        more = {"path": path, "modules": modules, "environment": environment, "seed": seed}
        plan.files.append(File(path, render("train.sbatch", variables | more)))
        plan.next.append(f"sbatch {path}")
    if "k8s" in kinds:
        _k8s(given, folder, plan, variables | {"path": given.file or f"k8s/{stem}.yaml"}, build_base)
    return plan


def _compose(given: Namespace, plan: Plan, variables: dict[str, Any]) -> None:
    """Plan the compose file."""
    most, gpus = variables["most"], variables["gpus"]
    if gpus and most > 1:
        plan.notes.append(f"gpus  compose.yaml takes {most * gpus} GPUs of one machine, {gpus} for each node: give "
                          "--nodes 1, or edit its device_ids, if the machine has fewer")
    path = given.file or "compose.yaml"
    plan.files.append(File(path, render("compose.yaml", variables | {"path": path})))


def _k8s(given: Namespace, folder: Path, plan: Plan, variables: dict[str, Any], build_base: str) -> None:
    """Plan the manifest of the job, and that of the volume."""
    path, image = variables["path"], variables["image"]
    plan.notes += same_name(folder / path, variables["name"])
    more = k8s_variables(given, variables, folder)
    plan.files += [File(more["volume"], render("k8s/volume.yaml", more)),
                   File(path, render(f"k8s/{given.kind}.yaml", more))]
    of_file = f"-f {variables['dockerfile']} " if variables["dockerfile"] != "Dockerfile" else ""
    plan.next.append(f"{build_base}docker build {of_file}-t {image} . && docker push {image} && {more['run']}")
    if not given.image:
        plan.notes.append(f"image  {image} is in no registry: give --image REGISTRY/{image} for nodes that pull")


def render(template: str, variables: dict[str, Any]) -> str:
    """Return the file that `template` makes with `variables`. Raises jinja2.UndefinedError if one is missing."""
    return ENVIRONMENT.get_template(template).render(variables)


def _script(words: Sequence[str], folder: Path, plan: Plan) -> tuple[list[str], str, Path]:
    """Return the words for `rankup launch`, the module's name if it is one, and the script's file. Raises UserError if
    there is none."""
    if not words or words == ["-m"]:
        raise UserError("add: SCRIPT must be given, got nothing. For example: rankup add compose slurm k8s train.py")
    if broken := next((word for word in words if len(word.splitlines()) > 1), ""):
        raise UserError(f"add: each word must be on one line, got {broken!r}. Put the text into a file.")
    first, *rest = words
    if Path(first).suffix in (".sh", ".bash", ".ipynb", ".yaml", ".yml", ".toml", ".sbatch"):
        started = re.search(r"[\w./-]+\.py\b", _read(folder / first)) if (folder / first).is_file() else None
        hint = f" Name the one that it starts: {started[0]}." if started else ""
        raise UserError(f"add: SCRIPT must be a Python file, got {first}.{hint}")
    if first == "-m":
        module = rest[0]
        path = module.replace(".", "/")
        files = (folder / root / f"{path}{end}" for root in ("", "src") for end in (".py", "/__main__.py"))
        if not (file := next(filter(Path.is_file, files), None)):
            raise UserError(f"add: -m must name a module of this folder or its src/, got {module}.")
        return list(words), module, file
    if not (folder / first).is_file() and "\\" in first and (folder / first.replace("\\", "/")).is_file():
        plan.notes.append(f"script  {first} is written with / in launch files")
        first = first.replace("\\", "/")
    if not (folder / first).is_file():
        near = difflib.get_close_matches(first, [path.name for path in folder.glob("*.py") if path.is_file()], n=1)
        command = read_project(folder).get("project", {}).get("scripts", {}).get(first, "")
        meant = near[0] if near else f"-m {command.partition(':')[0]}" if command else ""
        hint = f" Did you mean {meant}?" if meant else ""
        raise UserError(f"add: SCRIPT must be an existing file, got {first}.{hint}")
    inside = os.path.relpath(os.path.realpath(folder / first), os.path.realpath(folder))
    if inside.startswith(".."):
        raise UserError(f"add: SCRIPT must be in this folder, got {first}. Change to its repository.")
    return [inside, *rest], "", folder / inside


def _name(wanted: str, plan: Plan) -> str:
    """Return `wanted` as a name that Kubernetes, Docker and Slurm take."""
    name = re.sub(r"[^a-z0-9]+", "-", wanted.lower()).strip("-")[:40].strip("-")
    if not name[:1].isalpha() or name in ("true", "false", "null", "yes", "no", "on", "off", "y", "n"):
        name = f"job-{name}".strip("-")  # YAML reads these words as something else
    if name != wanted:
        plan.notes.append(f"name  {name}, as Kubernetes allows only lower-case letters, digits and -, not {wanted!r}")
    return name


@dataclass(frozen=True)
class Data:
    """What the job reads. `source`: on this machine. `target`: in a container. `inside`: whether it is in the
    repository."""

    source: str
    target: str
    inside: bool


def _data(given: str, folder: Path) -> Data:
    path = Path(os.path.abspath(folder / given))
    if not path.exists():
        raise UserError(f"add: --data must be an existing folder or file, got {given}.")
    inside = os.path.relpath(path, os.path.abspath(folder))
    if inside == ".":
        raise UserError("add: --data must not be this folder itself, which becomes the image. Name a folder in it.")
    if inside.startswith(".."):
        return Data(str(path), str(path), inside=False)
    return Data(f"./{inside}", f"{IN_IMAGE}/{inside}", inside=True)


def _inside(given: str, folder: Path, flag: str) -> str:
    """Return a path below `folder`, relative to it. Raises UserError if it is elsewhere."""
    path = os.path.relpath(folder / given, folder)
    if path == "." or path.startswith(".."):
        raise UserError(f"add: {flag} must be a path inside this folder, got {given}.")
    return path


def _image(given: Namespace, folder: Path, plan: Plan, variables: dict[str, Any], script: Path) -> None:
    """Plan the Dockerfile and what belongs beside it. An existing Dockerfile of the user's becomes the base image."""
    theirs = (folder / "Dockerfile").is_file() and not HEADER.search(_read(folder / "Dockerfile"))
    dockerfile = given.dockerfile or ("Dockerfile.rankup" if theirs else "Dockerfile")
    own_base = given.base == "." or (theirs and not given.base)
    if own_base and not theirs:
        raise UserError("add: --base . must come with a Dockerfile of yours in this folder, got none.")
    if own_base:
        plan.notes.append("base  your Dockerfile, which stays. Dockerfile.rankup adds rankup and this folder's files")
        packages = Packages()
    else:
        near = os.path.relpath(script.parent, folder)
        packages = find_packages(folder, given.requirements, extras=given.extra, near=near)
        plan.notes += packages.notes
        if packages.file and "torch" not in (packages.names or {"torch"}) and not given.base:
            plan.notes.append(f"packages  {packages.file} does not name torch: rankup brings its newest version")
    vendored = (folder / "rankup" / "__init__.py").is_file()
    known = vendored or "rankup" in (packages.names or ())
    origin = Origin("") if known or given.stdout else find_origin(metadata.distribution("rankup"))
    wheel = origin.wheel.name if origin.wheel else ""
    requires = read_project(folder).get("project", {}).get("requires-python", "")
    minor = python_minor(requires, sys.version_info[1])
    if minor != sys.version_info[1] and not given.base and not own_base:
        plan.notes.append(f"python  3.{minor}, because pyproject.toml requires {requires}")
    lists = [path for path in {packages.file, *packages.copy} if (folder / path).is_file()]
    git = "git+" in origin.requirement or any(NEEDS_GIT.search(_read(folder / path)) for path in lists)
    from_src = (folder / "src").is_dir() and not (folder / "src/__init__.py").is_file() and not packages.project
    from_root = vendored or (variables["words"][0] != "-m" and imports_from_root(script, folder))
    mounted = [each.target if each.inside else each.source for each in variables["data"]]
    left_out = ["runs", *variables["outputs"], *(each.source[2:] for each in variables["data"] if each.inside)]
    plan.notes += find_gaps(folder, variables["words"], mounted, left_out)
    if re.search(r"(?m)^\s*(from|import) hydra\b", _read(script)) and not given.output:
        plan.notes.append("files  Hydra writes to outputs/, unless a setting says otherwise: give --output outputs")
    if not given.base and not own_base and (other := other_dockerfile(folder, dockerfile)):
        plan.notes.append(f"base  {other} is here: to build on its image, give --base IMAGE")
    parents = {path: os.path.dirname(path) for path in ("runs", *variables["outputs"])}
    variables |= {
        "links": [f"{f'mkdir -p {shlex.quote(parent)} && ' if parent else ''}rm -rf {shlex.quote(path)} && "
                  f"ln -s /runs {shlex.quote(path)}" for path, parent in parents.items()],
        "packages": packages, "own_base": own_base, "wheel": wheel,
        "dockerfile": dockerfile,
        "base": f"{variables['name']}-base" if own_base else given.base or f"python:3.{minor}-slim-bookworm",
        "install_rankup": f"{PIP} {f'/tmp/{wheel}' if wheel else shlex.quote(origin.requirement)}" if not known else "",
        "apt": [*given.apt, *["git"] * git],
        "pythonpath": ":".join([IN_IMAGE] * from_root + [f"{IN_IMAGE}/src"] * from_src),
    }
    plan.files += [File(variables["dockerfile"], render("Dockerfile", variables), launches=False),
                   File(".dockerignore", render("dockerignore", variables), launches=False)]
    if origin.wheel:
        plan.files.append(File(wheel, wheel=origin.wheel.read_bytes()))


# Files ----------------------------------------------------------------------------------------------------------------


def _read(path: Path, limit: int = -1) -> str:
    with path.open(errors="replace") as file:
        return file.read(limit)


def _write(folder: Path, files: Sequence[File]) -> None:
    """Write all files, or none. Raises UserError if the folder can't be written."""
    done: list[Path] = []
    try:
        for file in files:
            path = folder / file.path
            with staged(path) as staging:
                staging.write_bytes(file.bytes)
            done.append(path)
    except OSError as error:
        for path in done:
            with suppress(OSError):
                path.unlink()
        where = folder.resolve()
        raise UserError(f"add: {where} must be writable, got {error.strerror}. No file was written.") from None


def _difference(path: Path, content: str) -> str:
    """Return a diff from the file to what this version of rankup would write."""
    present = _read(path) if path.exists() else ""
    return "".join(difflib.unified_diff(
        present.splitlines(keepends=True), content.splitlines(keepends=True), str(path), f"{path} as added today",
    ))


def _compare_all(folder: Path, parse: Parse) -> str:
    """Render each file with a header again, and return the differences."""
    found = "".join(_difference(path, made) for path, made in rendered_again(folder, parse))
    return found or "add: no launch file differs from what this version of rankup writes\n"


def rendered_again(folder: Path, parse: Parse) -> Iterator[tuple[Path, str]]:
    """Iterate over the files in `folder` with a header, and what its command makes of each today."""
    for path in sorted({path for pattern in PLACES for path in folder.glob(pattern) if path.is_file()}):
        header = HEADER.search("\n".join(_read(path, 4096).splitlines()[:8]))
        if header:
            try:
                made = plan_files(parse(shlex.split(header[1])[2:]), folder).texts
            except (UserError, ValueError) as error:  # shlex raises ValueError for a quote without an end
                raise UserError(f"{path}: its header must be a command that works, got {header[1]}. {error}") from None
            yield from ((path, file.content) for file in made if folder / file.path == path)
