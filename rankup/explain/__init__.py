"""Explain the logs of a failed job: which rank failed first, why, what to do, and what this did to other ranks.

The logs may come from torchrun, a scheduler, containers or `rankup launch`. No torch here.
"""

from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path

from rankup.env.rank_env import ranges
from rankup.errors import UserError
from rankup.explain.diagnosis import Diagnosis, Search, diagnose
from rankup.explain.faults import WAITED
from rankup.explain.logs import find_logs

MAX_OTHERS = 8
NOTHING = """\
nothing wrong was found: the run has finished, or these lines do not say what happened.
A process that is killed from outside says nothing: look at its exit code, and
at what the launcher, the scheduler or the kernel (dmesg) said."""


def diagnose_files(paths: Sequence[Path], *, run_dir: Path = Path()) -> list[Diagnosis]:
    """Return the faults that these logs show, the root cause first, harmless ones last.

    `run_dir`: the folder of the runs that `paths` may name. Raises UserError if there is nothing to read.
    """
    try:
        return Search(find_logs(paths, run_dir=run_dir)).result()
    except OSError as error:
        got = f"{error.filename}: {error.strerror}"
        raise UserError(f"explain needs a file or folder that it can read, got {got}.") from None


def advice(text: str) -> str:
    """Return one line about a traceback if it shows a known fault, otherwise ""."""
    known = [each for each in diagnose(text.splitlines()) if each.name and not each.harmless]
    return f"this is: {known[0].title}. {known[0].why} {known[0].remedy}" if known else ""


# The report -----------------------------------------------------------------------------------------------------------


def format_report(diagnoses: list[Diagnosis]) -> str:
    """Return a text with the root cause, its reason and its remedy, and one line for each other finding."""
    groups: dict[tuple[str, str], list[Diagnosis]] = {}  # the same finding about several ranks is one group
    for each in diagnoses:
        if not each.harmless:
            groups.setdefault((each.title, each.name or each.seen), []).append(each)
    lines = [*_about_cause(*groups.values())] if groups else [NOTHING]
    lines += [f"harmless: {each.title} ({each.place}): {each.why}" for each in diagnoses if each.harmless][:5]
    return "\n".join(lines)


def _about_cause(first: list[Diagnosis], *others: list[Diagnosis]) -> Iterator[str]:
    root = first[0]
    yield f"{_title(first)} ({root.place})"
    if root.time is not None:
        first_of = f"first {_who([root])}," if len(first) > 1 and _who([root]) else "when "
        yield f"  {first_of} {datetime.fromtimestamp(root.time):%Y-%m-%d %H:%M:%S}"
    for label, text in zip(["seen", *[""] * len(root.traceback)], [*root.traceback, root.seen], strict=True):
        yield f"  {label:4}  {text}"
    if root.at:
        yield f"  at    {root.at}"
    yield from (f"  why   {root.why}", f"  fix   {root.remedy}")
    rivals = [each for group in (first, *others) for each in group if each.order == root.order]
    if len({each.file for each in rivals}) > 1 and any(each.time is None for each in rivals):
        # Without times, the root cause is first only because its file came first
        yield "  note  these logs do not have times in all lines: another of the causes below may have come first."
    yield from _listed("also seen:", [group for group in others if group[0].order < WAITED])
    yield from _listed("what others suffered from it:", [group for group in others if group[0].order >= WAITED])


def _listed(title: str, groups: list[list[Diagnosis]]) -> Iterator[str]:
    if groups:
        yield title
    for group in groups[:MAX_OTHERS]:
        yield f"  {_title(group)} ({group[0].place}): {group[0].remedy if group[0].name else group[0].seen}"
    if len(groups) > MAX_OTHERS:
        yield f"  and {len(groups) - MAX_OTHERS} more"


def _title(group: list[Diagnosis]) -> str:
    return ", ".join(filter(None, (group[0].title, _who(group))))


def _who(group: list[Diagnosis]) -> str:
    """Return such as "rank 1 on node1", for all ranks that have the fault. Do not repeat what the title says."""
    ranks = {each.rank for each in group if each.rank is not None and f"rank {each.rank}" not in each.title}
    hosts = sorted({each.host for each in group if each.host and f"on {each.host}" not in each.title})
    parts = [f"rank{'s' if len(ranks) > 1 else ''} {ranges(ranks)}"] if ranks else []
    parts += [f"on {', '.join(hosts[:8])}{', ...' if len(hosts) > 8 else ''}"] if hosts else []
    return " ".join(parts)
