"""The command `stacks` shows where each rank of a run is now, which ranks differ from the others, and all stacks.

It asks the processes of this machine for a bounded time, and describes from outside a process that does not answer. If
the machines share a disk, it also reads what the ranks of other machines have written there. It does not import torch.
"""

import contextlib
import json
import os
import re
import time
from dataclasses import dataclass, replace
from pathlib import Path

from rankup.agent.logs import STACKS, host_name
from rankup.agent.processes import has_handler, start_of, state_of
from rankup.env.rank_env import ranges
from rankup.errors import UserError
from rankup.group.stop import compare, in_phase, location_in
from rankup.places.files import open_regular
from rankup.timing import ANSWER_STACKS_S, ANSWER_TICK_S

# The process states by their letters in /proc
STATES = {
    "T": "it is stopped (SIGSTOP)", "D": "it waits for a disk or a driver", "R": "it computes, or waits for a CPU",
    "S": "it waits", "": "it has just ended",
}
LINE = re.compile(r"^# (\{.*\})\n", re.MULTILINE)
HEAD = re.compile(r'^# (\{.*"pid".*\})\n', re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The newest stack dump of one rank, and how to ask the rank for another one, see `announce_stacks`.

    `text`: the stacks of all threads, "" if there are none. `problem`: why not. `fresh`: the rank was asked just now.
    """

    path: Path
    rank: int
    world_size: int
    host: str
    pid: int
    started: str
    thread: int
    main: str
    signals: list[int]
    text: str = ""
    time: str = ""
    why: str = ""
    phase: str = ""
    step: int = 0
    problem: str = ""
    fresh: bool = False

    @property
    def alive(self) -> bool:
        """Whether the process runs on this machine. Its pid may have been reused, or belong to another container."""
        return bool(self.started) and self.started == start_of(self.pid)

    @property
    def place(self) -> str:
        """Where the main thread is, in a few words, or why that is not known."""
        if self.problem or not self.text:
            return self.problem or "has written no stacks"
        where = location_in(self.text, self.main) or "no Python code"
        return where + in_phase(self.phase, self.step)  # " of step 413"


def report(run_dir: Path, *, full: bool = False) -> str:
    """Return what `stacks` prints. Raises UserError if no rank of the run has ever announced that it can be asked."""
    answers = ask(run_dir)
    if not answers:
        raise UserError(
            f"RUN must be a run whose ranks can be asked, got no {STACKS}/rank-N.txt in {run_dir}. No rank has started."
        )
    lines = compare({answer.rank: answer.place for answer in answers if answer.fresh})
    lines += compare({answer.rank: _gone(answer) for answer in answers if not answer.fresh})
    size = answers[0].world_size
    if missing := set(range(size)) - {answer.rank for answer in answers}:
        who = f"rank{'s' if len(missing) > 1 else ''} {ranges(missing)} of {size}"
        lines.append(
            f"{who}: no file here. It has not started, or its machine shares no disk with this one: ask there."
        )
    with_stacks = [answer for answer in answers if answer.text]
    if full:
        lines += ["", *(f"rank {answer.rank} on {answer.host}:\n{answer.text}" for answer in with_stacks)]
    elif with_stacks:
        lines += ["", f"All threads: --full, or the files in {run_dir / STACKS}."]
    return "\n".join(lines)


def _gone(answer: Answer) -> str:
    """Describe a rank that was not asked."""
    here = answer.host == host_name()
    what = f"ended, on {answer.host}" if here else f"on {answer.host}: ask there"
    when = f" at {answer.time} ({answer.why})" if answer.time else ""
    return what + (f"; last stacks{when}: {answer.place}" if answer.text else "; no stacks were written")


def ask(run_dir: Path) -> list[Answer]:
    """Make the run's ranks on this machine write their stacks, and return what all ranks have written. This takes at
    most the sum of ANSWER_STACKS_S, and the time of the disk."""
    answers = {answer.rank: answer for answer in written(run_dir)}
    waiting = {rank: answer for rank, answer in answers.items() if answer.alive}
    sizes = {rank: asked.path.stat().st_size for rank, asked in waiting.items()}
    for number, patience_s in enumerate(ANSWER_STACKS_S):
        for asked in waiting.values():
            _signal(asked, number)
        until_s, before = time.monotonic() + patience_s, dict[int, Answer | None]()
        while waiting and time.monotonic() < until_s:
            time.sleep(ANSWER_TICK_S)
            for rank, asked in [*waiting.items()]:
                answer = read(asked.path, after=sizes[rank])
                # faulthandler writes word by word, so the dump is complete if nothing was added since the last look
                if answer is not None and answer.text and answer == before.get(rank):
                    answers[rank] = replace(answer, fresh=True)
                    del waiting[rank]
                before[rank] = answer
    for rank, asked in waiting.items():
        state = state_of(asked.pid)
        why = STATES.get(state, f"it is in state {state}")
        answers[rank] = replace(asked, text="", problem=f"does not answer: {why}", fresh=True)
    return list(answers.values())


def _signal(asked: Answer, number: int) -> None:
    """Send signal `number` of `asked.signals`, if the process has a handler for it. Without one the process would end.

    The signal goes to a thread that waits for signals. If it went to the process, the main thread would take it, which
    takes no signal while it waits for a dead disk.
    """
    # A process that has just ended or is another user's does not answer
    with contextlib.suppress(OSError, IndexError):
        if has_handler(asked.pid, asked.signals[number]) and asked.alive:
            os.kill(asked.thread, asked.signals[number])


# Files ---------------------------------------------------------------------------------------------------------------


def written(run_dir: Path) -> list[Answer]:
    """Return the newest dump of each rank of the newest attempt, without asking the ranks."""
    found = [answer for path in (run_dir / STACKS).glob("rank-*.txt") if (answer := read(path))]
    # An earlier attempt with more ranks may have left files
    newest = max(found, key=lambda answer: answer.path.stat().st_mtime, default=None)
    found = [answer for answer in found if newest and answer.rank < newest.world_size]
    return sorted(found, key=lambda answer: answer.rank)


def read(path: Path, *, after: int = 0) -> Answer | None:
    """Return the newest whole dump after the first `after` bytes of a file of stacks. Return None for another file."""
    try:
        with open_regular(path) as file:
            data = file.read()
        writers = [Answer(path=path, **json.loads(head)) for head in HEAD.findall(data.decode(errors="replace"))]
        # Take the living process: an attempt that was refused because another one is alive has added its line too
        answer = next((writer for writer in reversed(writers) if writer.alive), writers[-1])
        of_this_process = HEAD.split(data[after:].decode(errors="replace"))[-1]
        *_, said, text = ["{}", *LINE.split(of_this_process)]  # faulthandler's handler in C writes no such line
        # A whole dump ends with the main thread
        return replace(answer, text=text, **json.loads(said)) if location_in(text, answer.main) is not None else answer
    except (OSError, LookupError, ValueError, TypeError):
        return None
