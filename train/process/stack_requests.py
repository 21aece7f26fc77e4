"""Asking the ranks of a run for their stacks, and reading what they have written. No torch here.

A process that is asked may hang, be stopped, or be another one that has got the number: each is asked in a way that
can do no harm, for a bounded time, and one that does not answer is described from outside.
"""

import contextlib
import json
import os
import re
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from train.process.places import Stack, compare, moment, place, stacks_in
from train.process.proc import has_handler, start_of, state_of
from train.process.stacks import FOLDER, Writer

# A thread of Python needs its turn on a busy machine. After that the other signal is tried, see `stacks`.
POLITE_S = 2.0
ANSWER_S = 3.0
TICK_S = 0.05
# By the letters that /proc has
STATES = {
    "T": "it is stopped (SIGSTOP)", "D": "it waits for a disk or a driver", "R": "it computes, or waits for a CPU",
    "S": "it waits",
}
LINE = re.compile(r"^# (\{.*\})\n", re.MULTILINE)
HEAD = re.compile(r'^# (\{.*"pid".*\})\n', re.MULTILINE)


@dataclass(frozen=True)
class Answer:
    """The newest dump of one rank. `text`: all threads, empty where it has written none. `problem`: or why not.

    `workers`: number and text of each of its DataLoaders'. Two have one number while it evaluates.
    """

    writer: Writer
    path: Path
    text: str = ""
    workers: tuple[tuple[int, str], ...] = ()
    time: str = ""
    why: str = ""
    moment: str = ""  # " of step 413"
    problem: str = ""
    fresh: bool = False  # it was asked just now

    @property
    def place(self) -> str:
        """Where the main thread is, in a few words, or why that is not known."""
        if self.problem or not self.text:
            return self.problem or "has written no stacks"
        return f"{place(_main_stack(self.text, self.writer.main) or []) or 'no Python code'}{self.moment}"


def read(path: Path, *, after: int = 0) -> Answer | None:
    """The newest dump in a file of `stacks`; only what stands behind its first `after` bytes. None for another file."""
    try:
        data = path.read_bytes()
        writer = Writer(**json.loads(HEAD.findall(data.decode(errors="replace"))[-1]))
        of_this_process = HEAD.split(data[after:].decode(errors="replace"))[-1]
        return _newest(Answer(writer, path), of_this_process)
    except (OSError, LookupError, ValueError, TypeError):
        return None


def _newest(answer: Answer, text: str) -> Answer:
    """The last whole dump of `text`: one ends with the main thread, and its workers follow."""
    workers: list[tuple[int, str]] = []
    # Pairs from the end on: what a line says, and what stands behind it. The handler in C writes no such line
    pieces = ["{}", *LINE.split(text)]
    for said, behind in zip(pieces[-2::-2], pieces[::-2], strict=True):
        facts = json.loads(said)
        if "worker" in facts:
            workers.insert(0, (facts["worker"], behind))
            continue
        if _main_stack(behind, answer.writer.main) is None:
            break
        return replace(
            answer, text=behind, workers=tuple(workers), time=facts.get("time", ""), why=facts.get("why", ""),
            moment=moment(facts.get("phase", ""), facts.get("step", 0)),
        )
    return answer


def _main_stack(text: str, main: str) -> Stack | None:
    """The stack of that thread, None where it is not there. faulthandler writes the main thread last."""
    threads = list(stacks_in(text))
    return next((stack for ident, stack in reversed(threads) if main in ("", ident)), None)


def written(run_dir: Path) -> list[Answer]:
    """The newest dump of each rank of the newest attempt. Asks nobody."""
    found = [answer for path in (run_dir / FOLDER).glob("rank-*.txt") if (answer := read(path))]
    # An attempt with more ranks has left files that nobody writes any more
    newest = max(found, key=lambda answer: answer.path.stat().st_mtime, default=None)
    size = newest.writer.world_size if newest else 0
    found = [answer for answer in found if answer.writer.rank < size]
    return sorted(found, key=lambda answer: answer.writer.rank)


def ask(run_dir: Path, *, ranks: Collection[int] | None = None) -> list[Answer]:
    """Have the ranks of this run that live on this machine write their stacks, and return what all have written.

    `ranks`: only these. Takes POLITE_S + ANSWER_S at most, beside what the disk takes.
    """
    answers = {answer.path: answer for answer in written(run_dir)}
    sizes = {}
    for path, answer in answers.items():
        if alive(answer.writer) and (ranks is None or answer.writer.rank in ranks):
            sizes[path] = path.stat().st_size
    for try_number, patience_s in enumerate([POLITE_S, ANSWER_S]):
        for path in sizes:
            _signal(answers[path].writer, try_number)
        for answer in _await(sizes, patience_s):
            answers[answer.path] = answer
    for path in sizes:
        problem = f"does not answer: {_from_outside(answers[path].writer)}"
        answers[path] = replace(answers[path], text="", problem=problem, fresh=True)
    return list(answers.values())


def _await(sizes: dict[Path, int], patience_s: float) -> Iterator[Answer]:
    """The dumps that stand behind that many bytes of each file, which leaves `sizes` then."""
    before: dict[Path, str] = {}
    until_s = time.monotonic() + patience_s
    while sizes and time.monotonic() < until_s:
        time.sleep(TICK_S)
        for path, size in list(sizes.items()):
            answer = read(path, after=size)
            if answer is None or not answer.text:
                continue
            # faulthandler's handler writes word by word: it is over once nothing has come since the last look
            if before.get(path) == answer.text:
                del sizes[path]
                yield replace(answer, fresh=True)
            before[path] = answer.text


def alive(writer: Writer) -> bool:
    """Whether that process runs on this machine: its number may be another's by now, or of another container."""
    return bool(writer.started) and writer.started == start_of(writer.pid)


def _signal(writer: Writer, try_number: int) -> None:
    """Send the signal of that try, if there is one, and if the process has a handler: without one it would end.

    To a thread that waits for signals, not to the process as a whole: its main thread would take it, and that takes
    none while it waits for a dead disk.
    """
    if try_number >= len(writer.signals):
        return
    number = writer.signals[try_number]
    # It has just ended, or is another user's: it does not answer
    with contextlib.suppress(OSError):
        if has_handler(writer.pid, number) and alive(writer):
            os.kill(writer.thread, number)


def _from_outside(writer: Writer) -> str:
    """What the kernel says of a process that does not answer."""
    folder, where = Path(f"/proc/{writer.pid}"), ""
    try:
        state, owner = state_of(writer.pid), folder.stat().st_uid
    except OSError:
        return "it has just ended"
    if os.geteuid() not in (0, owner):
        return "it belongs to another user"
    with contextlib.suppress(OSError):
        where = (folder / "wchan").read_text().strip("0")
    return STATES.get(state, f"it is in state {state}") + (f" ({where})" if where else "")


def places(answers: list[Answer]) -> list[str]:
    """Where the ranks are, a line for each place, and then what their workers do, if anything."""
    lines = compare({answer.writer.rank: answer.place for answer in answers})
    for answer in answers:
        for number, text in answer.workers:
            where = place(_main_stack(text, "") or [])
            if where != "idle":
                lines.append(f"rank {answer.writer.rank} worker {number}: {where or 'does not answer'}")
    return lines
