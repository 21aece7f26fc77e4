"""What do the logs of a failed job say? Which rank failed first, why, what to do, and what the others suffered from it.

The logs may be anybody's: of torchrun, a scheduler, containers or this program. No torch here.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rankup.errors import ConfigError
from train.commands.explain.diagnosis import Diagnosis, Search, diagnose
from train.commands.explain.faults import Language
from train.commands.explain.log_files import find_files
from train.commands.explain.report import format_report


def explain_logs(
    paths: Sequence[Path], *, as_json: bool, run_dir: Path = Path(), language: Language = "en"
) -> tuple[str, bool]:
    """What the command `explain` prints about logs, and whether they show a fault.

    `run_dir`: where a name that is no path is looked up. Raises ConfigError where there is nothing to read.
    """
    found = diagnose_files(paths, run_dir=run_dir, language=language)
    text = json.dumps([asdict(diagnosis) for diagnosis in found]) if as_json else format_report(found, language)
    return text, not all(diagnosis.harmless for diagnosis in found)


def diagnose_files(paths: Sequence[Path], *, run_dir: Path = Path(), language: Language = "en") -> list[Diagnosis]:
    """The faults that these logs show, the root cause first, harmless ones last. Raises ConfigError."""
    search = Search(language)
    try:
        for file in find_files(paths, run_dir=run_dir):
            search.read(file.lines(), file=file.name, rank=file.rank, host=file.host, failed=bool(file.ends))
    except OSError as error:
        got = f"{error.filename}: {error.strerror}"
        raise ConfigError(f"explain needs a file or folder that it can read, got {got}.") from None
    return search.result()


def advice(text: str) -> str:
    """One line about a traceback if it shows a known fault, otherwise ""."""
    known = [diagnosis for diagnosis in diagnose(text.splitlines()) if diagnosis.name and not diagnosis.harmless]
    return f"this is: {known[0].title}. {known[0].why} {known[0].remedy}" if known else ""
