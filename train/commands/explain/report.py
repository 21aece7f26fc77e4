"""What was found in logs, for people. No torch here."""

from collections.abc import Sequence
from datetime import datetime

from train.commands.explain.diagnosis import Diagnosis
from train.commands.explain.faults import WAITED
from train.process.placement import ranges

MAX_OTHERS = 8


def format_report(diagnoses: list[Diagnosis]) -> str:
    """The root cause with its reason and remedy, then everything else in a line each."""
    wrong = [diagnosis for diagnosis in diagnoses if not diagnosis.harmless]
    harmless = [diagnosis for diagnosis in diagnoses if diagnosis.harmless]
    lines = [] if wrong else ["nothing wrong was found in these lines."]
    if wrong:
        root = wrong[0]
        groups = _groups(wrong)
        lines += [f"{root.title}{_where(groups[0])} ({_place(root)})"]
        lines += _when(groups[0])
        lines += [f"  seen  {root.seen}"]
        lines += [f"        {line}" for line in root.traceback]
        lines += [f"  why   {root.why}", f"  fix   {root.remedy}"]
        lines += _unsure(wrong)
        lines += _listed("also seen:", [group for group in groups[1:] if group[0].order < WAITED])
        lines += _listed("what others suffered from it:", [group for group in groups[1:] if group[0].order >= WAITED])
    lines += [f"harmless: {d.title} ({_place(d)}{_times([d])}): {d.why}" for d in harmless[:5]]
    return "\n".join(lines)


def _groups(diagnoses: list[Diagnosis]) -> list[list[Diagnosis]]:
    """Those that say the same of several ranks, together."""
    groups: dict[tuple[str, str], list[Diagnosis]] = {}
    for diagnosis in diagnoses:
        groups.setdefault((diagnosis.title, diagnosis.name or diagnosis.seen), []).append(diagnosis)
    return list(groups.values())


def _listed(title: str, groups: list[list[Diagnosis]]) -> list[str]:
    def one(group: list[Diagnosis]) -> str:
        first = group[0]
        say = first.remedy if first.name else first.seen
        return f"  {first.title}{_where(group)} ({_place(first)}{_times(group)}): {say}"

    more = [f"  and {len(groups) - MAX_OTHERS} more"] if len(groups) > MAX_OTHERS else []
    return [title, *map(one, groups[:MAX_OTHERS]), *more] if groups else []


def _when(group: list[Diagnosis]) -> list[str]:
    root = group[0]
    if root.time is None:
        return []
    when = f"{datetime.fromtimestamp(root.time):%Y-%m-%d %H:%M:%S}"
    who = _where([root]).removeprefix(", ")
    return [f"  first {who}, {when}"] if len(group) > 1 and who else [f"  when  {when}"]


def _unsure(wrong: list[Diagnosis]) -> list[str]:
    """A note where the order of the files alone made the first one the first."""
    rivals = [d for d in wrong if d.order == wrong[0].order]
    if len({d.file for d in rivals}) > 1 and any(d.time is None for d in rivals):
        return ["  note  these logs do not have times in all lines: another of the causes below may have come first."]
    return []


def _where(diagnoses: list[Diagnosis]) -> str:
    """Such as ", rank 1 on node1", for all ranks that have the fault. What the title says is not repeated."""
    ranks = {d.rank for d in diagnoses if d.rank is not None and f"rank {d.rank}" not in d.title}
    hosts = sorted({d.host for d in diagnoses if d.host and f"on {d.host}" not in d.title})
    who = f"rank{'s' if len(ranks) > 1 else ''} {ranges(ranks)}" if ranks else ""
    where = f"on {_names(hosts)}" if hosts else ""
    return f", {' '.join(filter(None, [who, where]))}" if who or where else ""


def _names(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")


def _place(diagnosis: Diagnosis) -> str:
    return f"{diagnosis.file} line {diagnosis.line}".strip()


def _times(group: list[Diagnosis]) -> str:
    times = sum(diagnosis.times for diagnosis in group)
    return f", {times} times" if times > 1 else ""
