"""`stacks RUN`: where each rank of a run is now, which ranks are somewhere else than the others, and all their stacks.

It asks the processes of this machine, and through a file those of other machines that share the disk.
"""

import time
from dataclasses import replace
from pathlib import Path

from rankup.agent.logs import host_name
from rankup.env.rank_env import ranges
from rankup.errors import UserError
from rankup.observe.logs import find_logs
from train.config.options import StacksOptions
from train.process.context import Context, runs_folder
from train.process.stack_requests import POLITE_S, Answer, ask, places, read, written
from train.process.stacks import FOLDER, LOOK_S, REQUEST

# Ranks elsewhere look every LOOK_S, a network disk shows a new file later, and they write within POLITE_S
ELSEWHERE_S = LOOK_S + 3.0 + POLITE_S


def stacks(context: Context, given: StacksOptions) -> str:
    """What to print. Raises UserError where no rank has ever said that it can be asked."""
    run_dir = find_logs(runs_folder(context.config), given.run).parent
    before = written(run_dir)
    if not before:
        raise UserError(
            f"RUN must be a run whose ranks can be asked, got no {FOLDER}/rank-N.txt in {run_dir}: none has started."
        )
    elsewhere = [answer.path for answer in before if answer.writer.host != host_name()]
    since = _request(run_dir) if elsewhere else 0.0
    answers = ask(run_dir)
    if elsewhere:
        answers = _await_others(answers, elsewhere, since)
    lines = [*_report(answers), ""]
    if given.full:
        for answer in answers:
            lines.append(f"rank {answer.writer.rank} on {answer.writer.host}:\n{answer.text}")
            for number, text in answer.workers:
                lines.append(f"rank {answer.writer.rank} worker {number}:\n{text}")
    else:
        lines += [f"All threads: --full, or the files in {run_dir / FOLDER}."]
    return "\n".join(lines)


def _request(run_dir: Path) -> float:
    """Ask the ranks that see this folder. Returns when, by the clock of the disk, which is the others' too."""
    request = run_dir / FOLDER / REQUEST
    request.touch()
    return request.stat().st_mtime


def _await_others(answers: list[Answer], elsewhere: list[Path], since: float) -> list[Answer]:
    """`answers` with what the ranks of other machines have written `since`. Waits for them for ELSEWHERE_S at most."""
    until_s = time.monotonic() + ELSEWHERE_S
    while not all(path.stat().st_mtime >= since for path in elsewhere) and time.monotonic() < until_s:
        time.sleep(LOOK_S / 4)
    time.sleep(LOOK_S / 4)  # one that is being written now
    news = [
        replace(found, fresh=path.stat().st_mtime >= since) for path in elsewhere if (found := read(path)) is not None
    ]
    return sorted([answer for answer in answers if answer.path not in elsewhere] + news, key=lambda a: a.writer.rank)


def _report(answers: list[Answer]) -> list[str]:
    """The places, those of this moment first, and who has said nothing."""
    now, before = [a for a in answers if a.fresh], [a for a in answers if not a.fresh]
    lines = places(now)
    lines += [f"rank {answer.writer.rank} {_gone(answer)}" for answer in before]
    size = answers[0].writer.world_size
    if missing := set(range(size)) - {answer.writer.rank for answer in answers}:
        who = f"rank{'s' if len(missing) > 1 else ''} {ranges(missing)} of {size}"
        lines.append(
            f"{who}: no file here. It has not started, or its machine shares no disk with this one: ask there."
        )
    return lines


def _gone(answer: Answer) -> str:
    """What to say of a rank that was not asked, or whose machine has not answered."""
    here = answer.writer.host == host_name()
    what = "does not run any more" if here else "has not answered, or does not run any more"
    when = f", at {answer.time} ({answer.why})" if answer.time else ""
    last = f"; last stacks{when}: {answer.place}" if answer.text else ""
    return f"on {answer.writer.host} {what}{last}"
