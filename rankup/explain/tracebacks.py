"""Read a traceback line by line: whose it is, and which line of the user's code it names last."""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from rankup.explain.logs import LINE, MAX_SEEN, who_in

LAST_LINES = 6  # quote this many lines of a traceback, and the exception itself
RELAY_WORDS = ("(RANK ", "-- Process ", "ip=")


@dataclass(slots=True)
class Traceback:
    """The last traceback of one source of lines."""

    inside: bool = False  # the next lines belong to it, up to its exception
    ignored: bool = False  # it does not end the process
    about: dict[str, Any] = field(default_factory=dict)  # the rank or host that raised it, if another process prints it
    at: str = ""  # the last place in the user's code, such as "train.py:40"
    libraries: set[str] = field(default_factory=set)  # which were called from there
    _announced: tuple[int, dict[str, Any]] = (0, {})  # the number of a line that says whose traceback follows
    _indent: int = 0  # spaces before each of its lines
    _upwards: bool = False  # it begins with the last call, as faulthandler writes it
    _all: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))
    _own: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))  # lines about files of the user

    @property
    def shown(self) -> tuple[str, ...]:
        """The lines to quote: those about the user's files, because those about libraries tell less."""
        return tuple(self._own or self._all)

    def dedent(self, text: str) -> str:
        """Return a line without the spaces that stand before each line of this traceback."""
        return text[self._indent :] if self.inside and not text[: self._indent].strip() else text

    def announce(self, text: str, number: int) -> None:
        """Note a line that may say whose traceback this or the next one is."""
        if not text.endswith(":") and not any(word in text for word in RELAY_WORDS):
            return  # the pattern is slow, and this is nearly every line
        if found := LINE["relay"].match(text):
            self._announced = (number, who_in(found.groupdict()))
            self.about = self._announced[1] if self.inside else self.about

    def begin(self, text: str, number: int) -> bool:
        """Note the first line of a traceback. Return whether the last exception only relays this one."""
        relayed, (announced, who) = bool(self.about), self._announced
        self.inside, self.at, self.about = True, "", who if number - announced <= 2 else {}
        self._upwards = text.startswith("Current thread")
        self._indent = len(text) - len(text.lstrip())
        for kept in (self._all, self._own, self.libraries):
            kept.clear()
        return bool(self.about) and not relayed

    def add(self, text: str) -> None:
        """Note a line inside the traceback."""
        text = text[:MAX_SEEN]
        if found := LINE["frame"].match(text):
            file, number = (value for value in found.groups() if value)
            if foreign := LINE["foreign"].search(file):
                self.libraries.add(foreign["library"] or "")
            elif not (self._upwards and self.at):
                self.at = f"{file.rpartition('/')[2]}:{number}"
                self.libraries.clear()
                self._own.append(text)
        elif not text.strip(" ^~"):  # marks below source code, or the end of faulthandler's traceback
            self.inside = not self._upwards
            return
        elif self._own and self._all[-1] == self._own[-1]:  # the source code of such a line
            self._own.append(text)
        self._all.append(text)
