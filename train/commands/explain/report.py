"""What was found in logs, for people, in their language. No torch here."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from train.commands.explain.diagnosis import Diagnosis
from train.commands.explain.faults import WAITED
from train.commands.explain.language import SENTENCES, Language, Sentences
from train.process.placement import ranges

MAX_OTHERS = 8


def format_report(diagnoses: list[Diagnosis], language: Language = "en") -> str:
    """The root cause with its reason and remedy, then everything else in a line each."""
    return _Report(SENTENCES[language]).format(diagnoses)


@dataclass(frozen=True, slots=True)
class _Report:
    say: Sentences

    def format(self, diagnoses: list[Diagnosis]) -> str:
        say = self.say
        wrong = [diagnosis for diagnosis in diagnoses if not diagnosis.harmless]
        harmless = [diagnosis for diagnosis in diagnoses if diagnosis.harmless]
        lines = [] if wrong else [say.nothing_wrong]
        if wrong:
            root = wrong[0]
            groups = _groups(wrong)
            lines += [say.root.format(title=root.title, who=self._behind(groups[0]), place=self._place(root))]
            lines += self._when(groups[0])
            lines += [say.seen.format(text=root.seen)]
            lines += [say.traceback.format(text=line) for line in root.traceback]
            lines += [say.why.format(text=root.why), say.remedy.format(text=root.remedy)]
            lines += self._unsure(wrong)
            lines += self._listed(say.also_seen, [group for group in groups[1:] if group[0].order < WAITED])
            lines += self._listed(say.suffered, [group for group in groups[1:] if group[0].order >= WAITED])
        lines += [
            say.harmless.format(title=d.title, place=self._place(d), times=self._times([d]), why=d.why)
            for d in harmless[:5]
        ]
        return "\n".join(lines)

    def _listed(self, title: str, groups: list[list[Diagnosis]]) -> list[str]:
        def one(group: list[Diagnosis]) -> str:
            first = group[0]
            return self.say.item.format(
                title=first.title, who=self._behind(group), place=self._place(first), times=self._times(group),
                text=first.remedy if first.name else first.seen,
            )

        more = [self.say.more.format(count=len(groups) - MAX_OTHERS)] if len(groups) > MAX_OTHERS else []
        return [title, *map(one, groups[:MAX_OTHERS]), *more] if groups else []

    def _when(self, group: list[Diagnosis]) -> list[str]:
        root = group[0]
        if root.time is None:
            return []
        when = f"{datetime.fromtimestamp(root.time):%Y-%m-%d %H:%M:%S}"
        who = self._who([root])
        form = self.say.first if len(group) > 1 and who else self.say.time
        return [form.format(who=who, time=when)]

    def _unsure(self, wrong: list[Diagnosis]) -> list[str]:
        """A note where the order of the files alone made the first one the first."""
        rivals = [d for d in wrong if d.order == wrong[0].order]
        unsure = len({d.file for d in rivals}) > 1 and any(d.time is None for d in rivals)
        return [self.say.unsure] if unsure else []

    def _behind(self, diagnoses: list[Diagnosis]) -> str:
        who = self._who(diagnoses)
        return self.say.behind.format(who=who) if who else ""

    def _who(self, diagnoses: list[Diagnosis]) -> str:
        """Such as "rank 1 on node1", for all ranks that have the fault. What the title says is not repeated."""
        say = self.say
        ranks = {d.rank for d in diagnoses if d.rank is not None and f"rank {d.rank}" not in d.title}
        hosts = sorted({d.host for d in diagnoses if d.host and say.names_host.format(host=d.host) not in d.title})
        one, several = (say.rank_on_host, say.ranks_on_host) if hosts else (say.rank, say.ranks)
        form = (several if len(ranks) > 1 else one) if ranks else say.host if hosts else ""
        return form.format(ranks=say.comma.join(ranges(ranks).split(", ")), hosts=self._names(hosts))

    def _names(self, names: Sequence[str]) -> str:
        return self.say.comma.join(names[:8]) + (self.say.and_so_on if len(names) > 8 else "")

    def _place(self, diagnosis: Diagnosis) -> str:
        return f"{diagnosis.file} {self.say.place.format(line=diagnosis.line)}".strip()

    def _times(self, group: list[Diagnosis]) -> str:
        times = sum(diagnosis.times for diagnosis in group)
        return self.say.times.format(count=times) if times > 1 else ""


def _groups(diagnoses: list[Diagnosis]) -> list[list[Diagnosis]]:
    """Those that say the same of several ranks, together."""
    groups: dict[tuple[str, str], list[Diagnosis]] = {}
    for diagnosis in diagnoses:
        groups.setdefault((diagnosis.title, diagnosis.name or diagnosis.seen), []).append(diagnosis)
    return list(groups.values())
