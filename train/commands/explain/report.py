"""What was found in logs, for people, in their language. No torch here."""

from dataclasses import dataclass
from datetime import datetime

from rankup.env.rank_env import ranges
from train.commands.explain.diagnosis import Diagnosis
from train.commands.explain.faults import WAITED, Language, table

MAX_OTHERS = 8


def format_report(diagnoses: list[Diagnosis], language: Language = "en") -> str:
    """The root cause with its reason and remedy, then everything else in a line each."""
    return _Report(table(language)["sentences"]).format(diagnoses)


@dataclass(frozen=True, slots=True)
class _Report:
    say: dict[str, str]

    def format(self, diagnoses: list[Diagnosis]) -> str:
        say = self.say
        wrong = [diagnosis for diagnosis in diagnoses if not diagnosis.harmless]
        harmless = [diagnosis for diagnosis in diagnoses if diagnosis.harmless]
        lines = [] if wrong else [say["nothing_wrong"]]
        if wrong:
            root = wrong[0]
            groups = _groups(wrong)
            lines += [say["root"].format(title=root.title, who=self._behind(groups[0]), place=self._place(root))]
            if root.time is not None:
                who = self._who([root])
                form = say["first"] if len(groups[0]) > 1 and who else say["time"]
                lines += [form.format(who=who, time=f"{datetime.fromtimestamp(root.time):%Y-%m-%d %H:%M:%S}")]
            first, *more = [*root.traceback, root.seen]
            lines += [say["seen"].format(text=first), *(say["traceback"].format(text=line) for line in more)]
            lines += [say["why"].format(text=root.why), say["remedy"].format(text=root.remedy)]
            rivals = [diagnosis for diagnosis in wrong if diagnosis.order == root.order]
            if len({d.file for d in rivals}) > 1 and any(d.time is None for d in rivals):
                lines += [say["unsure"]]  # the order of the files alone made the first one the first
            lines += self._listed(say["also_seen"], [group for group in groups[1:] if group[0].order < WAITED])
            lines += self._listed(say["suffered"], [group for group in groups[1:] if group[0].order >= WAITED])
        lines += [
            say["harmless"].format(title=d.title, place=self._place(d), times=self._times([d]), why=d.why)
            for d in harmless[:5]
        ]
        return "\n".join(lines)

    def _listed(self, title: str, groups: list[list[Diagnosis]]) -> list[str]:
        def one(group: list[Diagnosis]) -> str:
            first = group[0]
            return self.say["item"].format(
                title=first.title, who=self._behind(group), place=self._place(first), times=self._times(group),
                text=first.remedy if first.name else first.seen,
            )

        more = [self.say["more"].format(count=len(groups) - MAX_OTHERS)] if len(groups) > MAX_OTHERS else []
        return [title, *map(one, groups[:MAX_OTHERS]), *more] if groups else []

    def _behind(self, diagnoses: list[Diagnosis]) -> str:
        who = self._who(diagnoses)
        return self.say["behind"].format(who=who) if who else ""

    def _who(self, diagnoses: list[Diagnosis]) -> str:
        """Such as "rank 1 on node1", for all ranks that have the fault. What the title says is not repeated."""
        say = self.say
        ranks = {d.rank for d in diagnoses if d.rank is not None and f"rank {d.rank}" not in d.title}
        hosts = sorted({d.host for d in diagnoses if d.host and say["names_host"].format(host=d.host) not in d.title})
        one, several = (say["rank_on_host"], say["ranks_on_host"]) if hosts else (say["rank"], say["ranks"])
        form = (several if len(ranks) > 1 else one) if ranks else say["host"] if hosts else ""
        names = say["comma"].join(hosts[:8]) + (say["and_so_on"] if len(hosts) > 8 else "")
        return form.format(ranks=say["comma"].join(ranges(ranks).split(", ")), hosts=names)

    def _place(self, diagnosis: Diagnosis) -> str:
        return " ".join(filter(None, (diagnosis.file, self.say["place"].format(line=diagnosis.line))))

    def _times(self, group: list[Diagnosis]) -> str:
        times = sum(diagnosis.times for diagnosis in group)
        return self.say["times"].format(count=times) if times > 1 else ""


def _groups(diagnoses: list[Diagnosis]) -> list[list[Diagnosis]]:
    """Those that say the same of several ranks, together."""
    groups: dict[tuple[str, str], list[Diagnosis]] = {}
    for diagnosis in diagnoses:
        groups.setdefault((diagnosis.title, diagnosis.name or diagnosis.seen), []).append(diagnosis)
    return list(groups.values())
