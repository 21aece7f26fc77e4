"""`stacks RUN`: where each rank of a run is now, which ranks are somewhere else than the others, and all their stacks.

It asks the processes of this machine. One that is asked may hang, be stopped, or be another one that has got the
number: each is asked in a way that can do no harm, for a bounded time, and one that does not answer is described from
outside. Ranks of other machines are asked by a signal to any agent of the job; their answers are read here where the
machines share a disk. No torch here.
"""

import contextlib
import json
import os
import re
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from rankup.agent.logs import STACKS, host_name
from rankup.agent.processes import has_handler, start_of, state_of
from rankup.env.rank_env import ranges
from rankup.errors import UserError
from rankup.group.stop import compare, moment, place, stack_of
from rankup.timing import ANSWER_STACKS_S, ANSWER_TICK_S

# By the letters that /proc has
STATES = {
    "T": "it is stopped (SIGSTOP)", "D": "it waits for a disk or a driver", "R": "it computes, or waits for a CPU",
    "S": "it waits",
}
LINE = re.compile(r"^# (\{.*\})\n", re.MULTILINE)
HEAD = re.compile(r'^# (\{.*"pid".*\})\n', re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Writer:
    """The rank whose stacks are in a file, and how to ask it: see `announce_stacks`."""

    rank: int
    world_size: int
    host: str
    pid: int
    started: str
    thread: int
    main: str
    signals: list[int]

    @property
    def alive(self) -> bool:
        """Whether that process runs on this machine: its number may be another's by now, or of another container."""
        return bool(self.started) and self.started == start_of(self.pid)


@dataclass(frozen=True)
class Answer:
    """The newest dump of one rank. `text`: all threads, empty where it has written none. `problem`: or why not."""

    writer: Writer
    path: Path
    text: str = ""
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
        return f"{place(stack_of(self.text, self.writer.main) or []) or 'no Python code'}{self.moment}"


def report(run_dir: Path, *, full: bool = False) -> str:
    """What `stacks` prints. `full`: the stacks of all threads too.

    Raises UserError where no rank has ever said that it can be asked.
    """
    answers = ask(run_dir)
    if not answers:
        raise UserError(
            f"RUN must be a run whose ranks can be asked, got no {STACKS}/rank-N.txt in {run_dir}: none has started."
        )
    lines = places(answer for answer in answers if answer.fresh)
    lines += compare({answer.writer.rank: _gone(answer) for answer in answers if not answer.fresh})
    size = answers[0].writer.world_size
    if missing := set(range(size)) - {answer.writer.rank for answer in answers}:
        who = f"rank{'s' if len(missing) > 1 else ''} {ranges(missing)} of {size}"
        lines.append(
            f"{who}: no file here. It has not started, or its machine shares no disk with this one: ask there."
        )
    with_stacks = [answer for answer in answers if answer.text]
    if with_stacks:
        lines += ["", *([] if full else [f"All threads: --full, or the files in {run_dir / STACKS}."])]
    for answer in with_stacks if full else ():
        lines.append(f"rank {answer.writer.rank} on {answer.writer.host}:\n{answer.text}")
    return "\n".join(lines)


def _gone(answer: Answer) -> str:
    """What to say of a rank that was not asked."""
    host = answer.writer.host
    what = f"ended, on {host}" if host == host_name() else f"on {host}: ask there, or kill -USR2 any agent of the job"
    when = f" at {answer.time} ({answer.why})" if answer.time else ""
    return what + (f"; last stacks{when}: {answer.place}" if answer.text else "; no stacks were written")


def places(answers: Iterable[Answer]) -> list[str]:
    """Where the ranks are, a line for each place."""
    return compare({answer.writer.rank: answer.place for answer in answers})


def where(run_dir: Path, ranks: Collection[int]) -> list[str]:
    """Ask these ranks of this machine, and say where they are, a line for each place."""
    return places(answer for answer in ask(run_dir, ranks=ranks) if answer.writer.rank in ranks)


def ask(run_dir: Path, *, ranks: Collection[int] | None = None) -> list[Answer]:
    """Have the ranks of this run that live on this machine write their stacks, and return what all have written.

    `ranks`: only these. Takes ANSWER_STACKS_S at most, beside what the disk takes.
    """
    answers = {answer.path: answer for answer in written(run_dir)}
    sizes = {
        path: path.stat().st_size for path, answer in answers.items()
        if answer.writer.alive and (ranks is None or answer.writer.rank in ranks)
    }
    for number, patience_s in enumerate(ANSWER_STACKS_S):
        for path in sizes:
            _signal(answers[path].writer, number)
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
        time.sleep(ANSWER_TICK_S)
        for path, size in list(sizes.items()):
            answer = read(path, after=size)
            if answer is None or not answer.text:
                continue
            # faulthandler's handler writes word by word: it is over once nothing has come since the last look
            if before.get(path) == answer.text:
                del sizes[path]
                yield replace(answer, fresh=True)
            before[path] = answer.text


def _signal(writer: Writer, number: int) -> None:
    """Send its signal of that number, if the process has a handler: without one it would end.

    To a thread that waits for signals, not to the process as a whole: its main thread would take it, and that takes
    none while it waits for a dead disk.
    """
    # It has just ended, or is another user's: it does not answer
    with contextlib.suppress(OSError, IndexError):
        if has_handler(writer.pid, writer.signals[number]) and writer.alive:
            os.kill(writer.thread, writer.signals[number])


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


# Files ---------------------------------------------------------------------------------------------------------------


def written(run_dir: Path) -> list[Answer]:
    """The newest dump of each rank of the newest attempt. Asks nobody."""
    found = [answer for path in (run_dir / STACKS).glob("rank-*.txt") if (answer := read(path))]
    # An attempt with more ranks has left files that nobody writes any more
    newest = max(found, key=lambda answer: answer.path.stat().st_mtime, default=None)
    size = newest.writer.world_size if newest else 0
    found = [answer for answer in found if answer.writer.rank < size]
    return sorted(found, key=lambda answer: answer.writer.rank)


def read(path: Path, *, after: int = 0) -> Answer | None:
    """The newest whole dump in a file of stacks; only what stands behind its first `after` bytes. None for another
    file."""
    try:
        data = path.read_bytes()
        writer = Writer(**json.loads(HEAD.findall(data.decode(errors="replace"))[-1]))
        of_this_process = HEAD.split(data[after:].decode(errors="replace"))[-1]
        *_, said, text = ["{}", *LINE.split(of_this_process)]  # the handler in C writes no such line
        facts = json.loads(said)
    except (OSError, LookupError, ValueError, TypeError):
        return None
    if stack_of(text, writer.main) is None:  # it ends with the main thread
        return Answer(writer, path)
    return Answer(
        writer, path, text=text, time=facts.get("time", ""), why=facts.get("why", ""),
        moment=moment(facts.get("phase", ""), facts.get("step", 0)),
    )
