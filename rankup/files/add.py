"""`rankup add`: write the launch files that are not there yet, or compare those that are."""

import difflib
import os
import shlex
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from rankup.errors import UserError
from rankup.files import HEADER
from rankup.files.plan import File, plan_files
from rankup.files.repository import read
from rankup.places.files import staged

Parse = Callable[[Sequence[str]], Namespace]
# Where launch files may stand, for `rankup add --diff`
PLACES = ("*.y*ml", "*.sbatch", "Dockerfile*", ".dockerignore", "*/*.y*ml", "*/*.sbatch", "*/Dockerfile*")


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
    present = [file for file in plan.files if os.path.lexists(folder / file.path)]  # also a link to nowhere
    absent = [file for file in plan.files if file not in present]
    _write(folder, absent)
    said += [f"add: wrote {file.path}" for file in absent]
    compare = given.line.replace("add", "add --diff", 1)
    for file in present:
        if not (folder / file.path).is_file() or file.bytes != (folder / file.path).read_bytes():
            way_out = "remove it to get the installed one" if file.wheel else f"compare: {compare}"
            way_out += "; another file: --file FILE" if file.launches and not file.wheel else ""
            said.append(f"add: {file.path} exists: left as it is ({way_out})")
    return "\n".join([*said, "next:", *(f"  {line}" for line in plan.next)]) + "\n"


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
    present = read(path) if path.is_file() else ""
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
        header = HEADER.search("\n".join(read(path, 4096).splitlines()[:8]))
        if header:
            try:
                made = plan_files(parse(shlex.split(header[1])[2:]), folder).texts
            except (UserError, ValueError) as error:  # shlex raises ValueError for a quote without an end
                raise UserError(f"{path}: its header must be a command that works, got {header[1]}. {error}") from None
            yield from ((path, file.content) for file in made if folder / file.path == path)
