"""What `rankup add` writes for a script: the templates, rendered with what stands in the repository."""

import difflib
import json
import os
import re
import shlex
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import jinja2

from rankup.agent.script import Script
from rankup.errors import UserError
from rankup.files import HEADER, IN_IMAGE, JOB_KINDS, KINDS
from rankup.files.k8s import IMAGE, k8s_variables, same_name
from rankup.files.repository import (
    NEEDS_GIT,
    PIP,
    Origin,
    Packages,
    activation,
    blank_arguments,
    find_gaps,
    find_origin,
    find_packages,
    import_roots,
    installs_itself,
    other_dockerfile,
    python_minor,
    read,
    read_project,
)

OTHER_COMPOSE = ("compose.yml", "docker-compose.yaml", "docker-compose.yml", "compose.override.yaml",
                 "compose.override.yml", "docker-compose.override.yml")
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


def plan_files(given: Namespace, folder: Path) -> Plan:
    """Return what `rankup add` would write. `given`: the parsed options; `given.script`: the script and its words."""
    if len(given.line.splitlines()) > 1:  # it is the header of the files
        raise UserError(f"add: each word must be on one line, got {given.line!r}. Put the text into a file.")
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
        "least": least, "most": most, "gpus": gpus,
        "data": [*dict.fromkeys(_data(each, folder) for each in given.data)],
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
    _check(given, folder, kinds)
    for each in variables["data"]:
        if each.source.removeprefix("./") in variables["outputs"]:
            raise UserError(f"add: --output must not be a folder of --data, which is read-only, got {each.source}.")
    given.kind = given.kind or JOB_KINDS[0]
    build_base = ""
    if {"compose", "k8s"} & {*kinds}:
        _image(given, folder, plan, variables, file)
        build_base = _build_base(folder, plan, variables)
    if "compose" in kinds:
        _compose(given, folder, plan, variables, build_base)
    if "slurm" in kinds:
        _slurm(folder, plan, variables | {"path": given.file or f"{stem}.sbatch"}, file)
    if "k8s" in kinds:
        _k8s(given, folder, plan, variables | {"path": given.file or f"k8s/{stem}.yaml"}, build_base)
    return plan


def _check(given: Namespace, folder: Path, kinds: Sequence[str]) -> None:
    """Raise UserError for options that have a wrong value or don't go together."""
    for flag, text in (("--image", given.image), ("--base", given.base)):
        if text and not IMAGE.fullmatch(text):
            raise UserError(f"add: {flag} must be the name of an image, got {text}.")
    for flag, path in (("--file", given.file), ("--dockerfile", given.dockerfile)):
        if path:
            _inside(path, folder, flag)
    if given.file and len(kinds) > 1:
        raise UserError("add: --file must come with one kind of launch file: compose, slurm or k8s.")
    if given.kind and "k8s" not in kinds:
        raise UserError("add: --kind must come with k8s: compose and slurm have one kind of job.")


def _compose(given: Namespace, folder: Path, plan: Plan, variables: dict[str, Any], build_base: str) -> None:
    """Plan the compose file."""
    most, gpus = variables["most"], variables["gpus"]
    if gpus and most > 1:
        plan.notes.append(f"gpus  compose.yaml takes {most * gpus} GPUs of one machine, {gpus} for each node: give "
                          "--nodes 1, or edit its device_ids, if the machine has fewer")
    path = given.file or "compose.yaml"
    for name in OTHER_COMPOSE if path == "compose.yaml" else ():
        if (folder / name).is_file():
            order = "and then it" if "override" in name else "in its place"
            plan.notes.append(f"compose  {name} is here: compose reads compose.yaml {order}, unless you give --file")
    where = "--project-directory . " if os.path.dirname(path) else ""
    options = "" if path == "compose.yaml" else f"{where}-f {shlex.quote(path)} "
    line = f"docker compose {options}up --build"
    plan.files.append(File(path, render("compose.yaml", variables | {"line": line})))
    plan.next.append(f"{build_base}{line}")


def _slurm(folder: Path, plan: Plan, variables: dict[str, Any], script: Path) -> None:
    """Plan the batch file."""
    modules, environment = activation(folder, os.environ)
    is_module = variables["words"][0] == "-m"
    more = {
        "line": f"sbatch {shlex.quote(variables['path'])}", "modules": modules, "environment": environment,
        "pythonpath": [f"$PWD{root}" for root in import_roots(script, folder, is_module, installs_itself(folder))],
        "seed": not is_module and bool(re.search(r"--seed\b", read(script))),
    }
    plan.files.append(File(variables["path"], render("train.sbatch", variables | more)))
    plan.next.append(str(more["line"]))


def _k8s(given: Namespace, folder: Path, plan: Plan, variables: dict[str, Any], build_base: str) -> None:
    """Plan the manifest of the job, and that of the volume."""
    path, image = variables["path"], variables["image"]
    plan.notes += same_name(folder / path, variables["name"])
    more = k8s_variables(given, variables, folder)
    plan.files += [File(more["volume"], render("k8s/volume.yaml", more)),
                   File(path, render(f"k8s/{given.kind}.yaml", more))]
    of_file = f"-f {shlex.quote(variables['dockerfile'])} " if variables["dockerfile"] != "Dockerfile" else ""
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
    first, *rest = words
    if Path(first).suffix in (".sh", ".bash", ".ipynb", ".yaml", ".yml", ".toml", ".sbatch"):
        started = re.search(r"[\w./-]+\.py\b", read(folder / first)) if (folder / first).is_file() else None
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
        command = str(read_project(folder).get("project", {}).get("scripts", {}).get(first, ""))
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
    theirs = (folder / "Dockerfile").is_file() and not HEADER.search(read(folder / "Dockerfile"))
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
    git = "git+" in origin.requirement or any(NEEDS_GIT.search(read(folder / path)) for path in lists)
    plan.notes += [f"packages  {path} names git+ssh, but a build has no key: name the repository by https"
                   for path in lists if "git+ssh" in read(folder / path)]
    mounted = [each.target if each.inside else each.source for each in variables["data"]]
    left_out = ["runs", *variables["outputs"], *(each.source[2:] for each in variables["data"] if each.inside)]
    plan.notes += find_gaps(folder, variables["words"], mounted, left_out)
    if re.search(r"(?m)^\s*(from|import) hydra\b", read(script)) and not given.output:
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
        "pythonpath": [f"{IN_IMAGE}{root}" for root in import_roots(
            script, folder, variables["words"][0] == "-m", installs_itself(folder) and not own_base)],
    }
    plan.files += [File(variables["dockerfile"], render("Dockerfile", variables), launches=False),
                   File(".dockerignore", render("dockerignore", variables), launches=False)]
    if origin.wheel:
        plan.files.append(File(wheel, wheel=origin.wheel.read_bytes()))


def _build_base(folder: Path, plan: Plan, variables: dict[str, Any]) -> str:
    """Return the beginning of a command that builds the user's own Dockerfile first, or ""."""
    if not variables["own_base"]:
        return ""
    if blank := blank_arguments(read(folder / "Dockerfile")):
        plan.notes.append(f"base  your Dockerfile needs {', '.join(blank)}: replace each VALUE below")
    values = "".join(f"--build-arg {name}=VALUE " for name in blank)
    return f"docker build {values}-t {variables['base']} . && "
