"""What must be the same on all nodes of a job: version, script, arguments, settings. No torch here.

Different code or settings give wrong numbers, not errors: an all-reduce of different sizes returned garbage on one rank
without a word. Nodes that differ are all refused as long as there was no membership. Later such a newcomer is turned
away alone. Arguments count where all nodes began with the same.
"""

import itertools
import re
import shlex

from rankup.agent.protocol import ARGUMENTS, Member
from rankup.env.rank_env import ranges

SECRET = re.compile(r"(?i)([^\s=]*(?:key|token|secret|password)[^\s=]*[ =])('[^']*'|\S+)")  # and its value


def differences(members: list[Member]) -> str:
    """What differs between those that are to begin a job, one line each; "" where all say the same."""
    found = []
    for name in sorted({name for member in members for name in member.settings} - {ARGUMENTS}):
        holders: dict[str, list[Member]] = {}
        for member in members:
            holders.setdefault(member.settings.get(name, "nothing"), []).append(member)
        if len(holders) > 1:
            got = " and ".join(f"{value} on {_who(who)}" for value, who in list(holders.items())[:4])
            found.append(f"{name} must be the same on all ranks, got {got}.")
    return "\n".join([*found[:8], "Start all ranks with the same program and settings."]) if found else ""


def unlike(member: Member, model: Member, *, arguments: bool) -> str:
    """How a newcomer differs from a member of the job, in one line; "" where it may belong to it. `arguments`: whether
    they count."""
    theirs, ours = member.settings, model.settings
    if theirs == ours:  # of all members, whenever one comes
        return ""
    names = [name for name in sorted({*theirs, *ours} - {ARGUMENTS}) if theirs.get(name) != ours.get(name)]
    found = []
    if arguments and theirs.get(ARGUMENTS) != ours.get(ARGUMENTS):
        found = [describe_arguments(*(shlex.split(each.get(ARGUMENTS, "")) for each in (theirs, ours)))]
    rows = [(name, ours.get(name, "absent"), theirs.get(name, "nothing")) for name in names[:4]]
    found += ["{} must be {}, got {}".format(*(_printable(text) for text in row)) for row in rows]
    text = f"{member.who} differs from the running job, with {model.who}: {'; '.join(found)}. "
    way_out = "Start it with the same program, arguments and settings, or another job at another port."
    return text + way_out if found else ""


def describe_arguments(theirs: list[str], ours: list[str]) -> str:
    """What differs between two command lines: all between the words that they begin and end with."""
    one, other = [*theirs], [*ours]
    while one and other and one[-1] == other[-1]:
        del one[-1], other[-1]
    while one and other and one[0] == other[0] and not (one[0][:1] == "-" and one[1:2] != other[1:2]):
        del one[0], other[0]  # the name of a value stays
    texts = [SECRET.sub(r"\1***", shlex.join(words)) for words in (one, other)]
    alike = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(*texts, strict=False)))
    got, must = (_printable(text[max(0, alike - 100):]) or "nothing" for text in texts)
    return f"arguments must be {must}, got {got}"


def _printable(text: str) -> str:
    """Of what another node has sent: it may hold anything, and as much as it likes."""
    return text[:200].encode("unicode_escape").decode()


def _who(members: list[Member]) -> str:
    ranks = [rank for member in members for rank in member.ranks]
    hosts = ", ".join(sorted({member.host for member in members})[:4])
    return f"rank{'s' if len(ranks) > 1 else ''} {ranges(ranks)} ({hosts})"
