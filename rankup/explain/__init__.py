"""What do the logs of a failed job say? Which rank failed first, why, what to do, and what the others suffered from it.

The logs may be anybody's: of torchrun, a scheduler, containers or `rankup launch`. No torch here.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rankup.errors import UserError
from rankup.explain.diagnosis import Diagnosis, Search, diagnose
from rankup.explain.logs import find_files
from rankup.explain.report import format_report

FAULTY = 20  # exit code of the command where the logs show a fault

__all__ = ["FAULTY", "Diagnosis", "advice", "diagnose", "diagnose_files", "explain_logs", "format_report"]


def explain_logs(paths: Sequence[Path], *, as_json: bool, run_dir: Path = Path()) -> tuple[str, bool]:
    """What the command `explain` prints about logs, and whether they show a fault.

    `run_dir`: where a name that is no path is looked up. Raises UserError where there is nothing to read.
    """
    found = diagnose_files(paths, run_dir=run_dir)
    if as_json:
        text = json.dumps([asdict(each) for each in found])
    elif found or find_files(paths, run_dir=run_dir):
        text = format_report(found)
    else:
        text = "nothing wrong was found: the run has finished."
    return text, not all(each.harmless for each in found)


def diagnose_files(paths: Sequence[Path], *, run_dir: Path = Path()) -> list[Diagnosis]:
    """The faults that these logs show, the root cause first, harmless ones last. Raises UserError."""
    search = Search()
    try:
        for file in find_files(paths, run_dir=run_dir):
            search.read(file.lines(), file=file.name, rank=file.rank, host=file.host, failed=bool(file.ends))
    except OSError as error:
        got = f"{error.filename}: {error.strerror}"
        raise UserError(f"explain needs a file or folder that it can read, got {got}.") from None
    return search.result()


def advice(text: str) -> str:
    """One line about a traceback if it shows a known fault, otherwise ""."""
    known = [each for each in diagnose(text.splitlines()) if each.name and not each.harmless]
    return f"this is: {known[0].title}. {known[0].why} {known[0].remedy}" if known else ""
