"""No file or message from elsewhere, whatever it contains, crashes its reader, runs code or opens other files. Bad
input gives one line. Each format gets 1,000 inputs here and 10,000 in `make soak`. A failure names its seed, to be set
as FUZZ=name:seed.
"""

import os
import random
import resource
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rankup.errors import UserError
from rankup.state.copies import MANIFEST
from tests.rigs.fuzz import FORMATS, Files, Format, code, flip, nest, number, rearrange, replace, retype, sealed

INPUTS = 100 * int(os.environ.get("RANKUP_RUNS", "10"))
ROOM = 3 << 30  # bytes of address space that a reader may use
UNSAFE = {"os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "os.fork", "pickle.find_class"}


@pytest.fixture(scope="module")
def seen() -> Iterator[list[str]]:
    """The forbidden events that a reader caused. An audit hook can't be removed, so `looking` switches it off."""
    found: list[str] = []
    looking = [True]

    def hook(event: str, given: tuple[Any, ...]) -> None:
        elsewhere = event in ("open", "os.mkdir") and str(given[0]).endswith(("outside", "proof"))
        if looking and (event in UNSAFE or elsewhere):
            found.append(f"{event} {given}")

    sys.addaudithook(hook)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + ROOM, limits[1]))
    yield found
    resource.setrlimit(resource.RLIMIT_AS, limits)
    looking.clear()


def mutated(dice: random.Random, form: Format, files: Files, folder: Path) -> None:
    """Write the files to `folder`, one or two of them damaged."""
    files = dict(files)
    names = [name for name in files if name != MANIFEST or dice.random() < 0.5]
    for name in dice.choices(names, k=dice.choice((1, 1, 2))):
        change = dice.choice((flip, rearrange, number, nest, retype, retype, retype, code))
        files[name] = change(dice, files[name] or b"0")
    if form.sealed and dice.random() < 0.7:
        files = sealed(files)
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    if form.replaced and dice.random() < 0.1:
        replace(dice, folder / dice.choice([*files]))


@pytest.mark.parametrize("name", FORMATS)
def test_damaged_input_gives_a_value_or_one_line(tmp_path: Path, seen: list[str], name: str) -> None:
    form, (only, _, chosen) = FORMATS[name], os.environ.get("FUZZ", "").partition(":")
    files = form.files()
    folder = tmp_path / "before" / "step-00000003"
    for turn in range(INPUTS if not only else name == only):
        seed = int(chosen or turn)
        shutil.rmtree(folder.parent, ignore_errors=True)
        folder = tmp_path / str(turn) / "step-00000003"  # threads of the last turn may still write to its folder
        folder.mkdir(parents=True)
        mutated(random.Random(f"{name}:{seed}"), form, files, folder)
        seen.clear()
        lines: list[str] = []
        try:
            form.read(folder)
        except UserError as error:
            lines = str(error).splitlines()
        except Exception as error:
            raise AssertionError(f"FUZZ={name}:{seed}: {type(error).__name__}: {str(error)[:500]}") from error
        assert all(len(line) < 1500 for line in lines), f"FUZZ={name}:{seed}: {lines}"
        assert not seen, f"FUZZ={name}:{seed}: {seen}"
        assert not Path("proof").exists(), f"FUZZ={name}:{seed}"
