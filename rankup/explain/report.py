"""What was found in logs, for people."""

from collections.abc import Iterator
from datetime import datetime

from rankup.env.rank_env import ranges
from rankup.explain.diagnosis import Diagnosis
from rankup.explain.faults import WAITED

MAX_OTHERS = 8


def format_report(diagnoses: list[Diagnosis]) -> str:
    """The root cause with its reason and remedy, then everything else in a line each."""
    return "\n".join(_lines(diagnoses))


def _lines(diagnoses: list[Diagnosis]) -> Iterator[str]:
    groups: dict[tuple[str, str], list[Diagnosis]] = {}  # those that say the same of several ranks, together
    for each in diagnoses:
        if not each.harmless:
            groups.setdefault((each.title, each.name or each.seen), []).append(each)
    if not groups:
        yield "nothing wrong was found in these lines."
        yield "A process that is killed from outside says nothing: look at its exit code, and"
        yield "at what the launcher, the scheduler or the kernel (dmesg) said."
    else:
        first, *others = groups.values()
        root = first[0]
        yield f"{_title(first)} ({_place(root)})"
        if root.time is not None:
            first_of = f"first {_who([root])}," if len(first) > 1 and _who([root]) else "when "
            yield f"  {first_of} {datetime.fromtimestamp(root.time):%Y-%m-%d %H:%M:%S}"
        for label, text in zip(["seen", *[""] * len(root.traceback)], [*root.traceback, root.seen], strict=True):
            yield f"  {label:4}  {text}"
        yield from (f"  why   {root.why}", f"  fix   {root.remedy}")
        rivals = [each for group in groups.values() for each in group if each.order == root.order]
        if len({each.file for each in rivals}) > 1 and any(each.time is None for each in rivals):
            # The order of the files alone made the first one the first
            yield "  note  these logs do not have times in all lines: another of the causes below may have come first."
        yield from _listed("also seen:", [group for group in others if group[0].order < WAITED])
        yield from _listed("what others suffered from it:", [group for group in others if group[0].order >= WAITED])
    for each in [each for each in diagnoses if each.harmless][:5]:
        yield f"harmless: {each.title} ({_place(each)}{_times([each])}): {each.why}"


def _listed(title: str, groups: list[list[Diagnosis]]) -> Iterator[str]:
    if groups:
        yield title
    for group in groups[:MAX_OTHERS]:
        first = group[0]
        yield f"  {_title(group)} ({_place(first)}{_times(group)}): {first.remedy if first.name else first.seen}"
    if len(groups) > MAX_OTHERS:
        yield f"  and {len(groups) - MAX_OTHERS} more"


def _title(group: list[Diagnosis]) -> str:
    return ", ".join(filter(None, (group[0].title, _who(group))))


def _who(group: list[Diagnosis]) -> str:
    """Such as "rank 1 on node1", for all ranks that have the fault. What the title says is not repeated."""
    ranks = {each.rank for each in group if each.rank is not None and f"rank {each.rank}" not in each.title}
    hosts = sorted({each.host for each in group if each.host and f"on {each.host}" not in each.title})
    parts = [f"rank{'s' if len(ranks) > 1 else ''} {ranges(ranks)}"] if ranks else []
    parts += [f"on {', '.join(hosts[:8])}{', ...' if len(hosts) > 8 else ''}"] if hosts else []
    return " ".join(parts)


def _place(diagnosis: Diagnosis) -> str:
    return f"{diagnosis.file} line {diagnosis.line}".lstrip()


def _times(group: list[Diagnosis]) -> str:
    times = sum(each.times for each in group)
    return f", {times} times" if times > 1 else ""
