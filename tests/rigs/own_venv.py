"""A virtual environment of a user: rankup from its wheel, and links to some of the packages that the tests have."""

import importlib.metadata
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

from tests.rigs.jobs import ROOT, environment


def pip(*words: str | Path) -> None:
    command = [sys.executable, "-m", "pip", *words, "--quiet", "--no-deps", "--disable-pip-version-check"]
    subprocess.run(command, check=True, env=environment({"PYTHONPATH": "", "PYTHONWARNINGS": ""}))


def source(folder: Path) -> Path:
    """Copy the files from which the wheel is built."""
    for name in ("rankup", "train"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


def wheel(folder: Path, *, source: Path) -> Path:
    """Build the wheel in `folder`."""
    pip("wheel", source, "--no-build-isolation", "--wheel-dir", folder)
    (made,) = folder.glob("rankup-*.whl")
    return made


def own_venv(folder: Path, wheel: Path, *packages: str) -> Path:
    """Make a virtual environment with rankup and these packages, by default all that it needs. Returns its bin/."""
    packages = packages or tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for name in needed(packages):
        found = importlib.metadata.distribution(name)
        for first in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            if not (site / first).exists():
                (site / first).symlink_to(str(found.locate_file(first)))
    pip("--python", folder / "bin" / "python", "install", "--no-index", wheel)
    return folder / "bin"


def needed(packages: Iterable[str]) -> set[str]:
    """Return these packages and what they need, without extras."""
    found, waiting = set[str](), [*packages]
    while waiting:
        name = re.split(r"[^\w.-]", waiting.pop())[0].lower()
        try:
            requires = importlib.metadata.distribution(name).requires or ()
        except importlib.metadata.PackageNotFoundError:  # needed on another platform
            continue
        if name not in found:
            found.add(name)
            waiting += [each for each in requires if "extra ==" not in each]
    return found
