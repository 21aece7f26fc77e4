"""What must be the same on all nodes of a job: version, script, arguments, settings. No torch here.

Different code or settings give wrong numbers, not errors: an all-reduce of different sizes returned garbage on one rank
without a word. Nodes that differ are all refused as long as there was no membership. Later such a newcomer is turned
away alone.
"""

import itertools
import re
import shlex
from collections.abc import Iterable, Mapping

from rankup.agent.protocol import Member
from rankup.env.rank_env import ranges

SECRET = re.compile(r"(?i)([^\s=]*(?:key|token|secret|password)[^\s=]*[ =])('[^']*'|\S+)")  # and its value


class Sameness:
    """What the members say of their scripts and settings, and which of it is the job's.

    `known`: there was a membership, so that whoever differs from it is no part of this job.
    `arguments`: a digest of the script's, where all nodes have the same, else "".
    """

    def __init__(self, who: str) -> None:
        """`who`: somebody of the job, for messages."""
        self.arguments = ""
        self._digest, self._like = "", who
        self._settings: dict[str, Mapping[str, str]] = {}  # by digest
        self._words = dict[str, list[str]]()  # the arguments, by digest

    @property
    def known(self) -> bool:
        return self._digest != ""

    def learn(self, member: Member, settings: Mapping[str, object]) -> None:
        """What a newcomer says of itself. Raises ValueError for arguments that no shell would print."""
        texts = {str(name): str(text) for name, text in settings.items()}
        self._words.setdefault(member.arguments, shlex.split(texts.pop("arguments", "")))
        self._settings.setdefault(member.digest, texts)

    def adopt(self, member: Member) -> None:
        """This member was in a membership."""
        self._digest, self._like = member.digest, member.who

    def of_all(self, members: Iterable[Member]) -> None:
        """The first membership will be of these."""
        arguments = {member.arguments for member in members}
        self.arguments = arguments.pop() if len(arguments) == 1 else ""

    def unlike(self, member: Member) -> str:
        """How a member differs from the job; "" where it may belong to it."""
        if not self._digest or (member.digest == self._digest and self.arguments in ("", member.arguments)):
            return ""
        arguments = ""
        if self.arguments not in ("", member.arguments):
            arguments = describe_arguments(self._words[member.arguments], self._words.get(self.arguments, []))
        theirs, ours = self._settings[member.digest], self._settings[self._digest]
        return _unlike(f"{member.who} differs from the running job, with {self._like}", theirs, ours, arguments)

    def differences(self, members: list[Member]) -> str:
        """What differs between these members, one line each; "" where all say the same."""
        same = len({member.digest for member in members}) <= 1
        return "" if same else describe_differences(members, self._settings)


def describe_differences(members: list[Member], settings: Mapping[str, Mapping[str, str]]) -> str:
    """One line for each difference. `settings`: what must be the same, by the digest of it."""
    found = []
    for name in sorted({name for known in settings.values() for name in known}):
        holders: dict[str, list[Member]] = {}
        for member in members:
            holders.setdefault(settings[member.digest].get(name, "nothing"), []).append(member)
        if len(holders) > 1:
            got = " and ".join(f"{value} on {_who(who)}" for value, who in list(holders.items())[:4])
            found.append(f"{name} must be the same on all ranks, got {got}.")
    return "\n".join([*found[:8], "Start all ranks with the same program and settings."])


def _unlike(who: str, theirs: Mapping[str, str], ours: Mapping[str, str], arguments: str) -> str:
    """How a newcomer differs from the job that runs, in one line. `theirs`, `ours`: what must be the same, by name.
    `arguments`: what `describe_arguments` says, "" where they are the same."""
    names = [name for name in sorted({*theirs, *ours}) if theirs.get(name) != ours.get(name)]
    found = [arguments] if arguments else []
    rows = [(name, ours.get(name, "absent"), theirs.get(name, "nothing")) for name in names[:4]]
    found += ["{} must be {}, got {}".format(*(_printable(text) for text in row)) for row in rows]
    return (
        f"{who}: {'; '.join(found)}. Start it with the same program, arguments and settings, or another job at "
        "another port."
    )


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
