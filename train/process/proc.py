"""What Linux says of a process in /proc. No torch here.

A name is cut after 15 bytes, also in the middle of a character, and may be another user's: bytes that are no text must
not matter.
"""

import re
from pathlib import Path


def stat_of(pid: int) -> list[str]:
    """The fields of /proc/PID/stat behind the name; empty for a process that is gone, and where there is no /proc."""
    return _read(pid, "stat").rpartition(")")[2].split()


def state_of(pid: int) -> str:
    """Its state, such as T; empty for one that is gone."""
    return "".join(stat_of(pid)[:1])


def parent_of(pid: int) -> int:
    """The process that started it, or has inherited it; 0 for one that is gone."""
    return int("".join(stat_of(pid)[1:2]) or 0)


def start_of(pid: int) -> str:
    """When it was started, in the kernel's ticks: with it a number that was given to another process shows.

    "" for a process that is gone or has only its end left, and where there is no /proc.
    """
    fields = stat_of(pid)
    return "" if not fields or fields[0] in "ZX" else fields[19]


def has_handler(pid: int, number: int) -> bool | None:
    """Whether it has a handler for that signal; None where nobody knows."""
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)", _read(pid, "status"), re.MULTILINE)
    return bool(int(caught[1], 16) >> (number - 1) & 1) if caught else None


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
