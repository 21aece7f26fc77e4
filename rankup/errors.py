"""What can end a run, the exit code of each end, and which code of several is the cause.

Restart only after codes of 128 and above; Kubeflow's ExitCode policy has the same rule. This file imports only the
standard library.
"""

import contextlib
import errno
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

FINISHED = 0
FAULT = 1
USER_MISTAKE = 2
STOPPED = 143
JOIN_FAILED = 170
PEER_LOST = 171
LEFT_OUT = 172  # of a node on which ranks failed again and again, or that another one does not reach


class ExpectedError(Exception):
    """An end that rankup prints without a traceback."""

    code = FAULT

    def __init__(self, text: str, *, printed_elsewhere: bool = False) -> None:
        """`printed_elsewhere`: another rank prints the same text, this one only writes it to its log."""
        super().__init__(text)
        self.printed_elsewhere = printed_elsewhere


class UserError(ExpectedError, ValueError):
    """The user's mistake: printed as one line without a traceback, exit code 2."""

    code = USER_MISTAKE


class JoinError(ExpectedError, RuntimeError):
    """The group did not come together within its deadline, exit code 170."""

    code = JOIN_FAILED


class PeerLost(ExpectedError, RuntimeError):
    """Another rank died or a deadline passed: exit code 171, or the code that the lost rank reported."""

    def __init__(
        self, text: str, *, code: int = PEER_LOST, suspect: int | None = None, nobody_died: bool = False,
        printed_elsewhere: bool = False,
    ) -> None:
        """`suspect`: the rank that was lost. `nobody_died`: all ranks are alive, one of them is late."""
        super().__init__(text, printed_elsewhere=printed_elsewhere)
        self.code, self.suspect, self.nobody_died = code, suspect, nobody_died


class Stopped(ExpectedError):
    """Stopped on request with a checkpoint; the same command goes on from it, exit code 143."""

    code = STOPPED


def root_cause(codes: Sequence[int]) -> int:
    """The one exit code of several that says why a job ended; 0 where all are 0.

    `codes`: of processes or of nodes, 0 to 255, the first that ended first where that is known: of two codes that count
    the same the earlier wins.
    """
    failed = [code for code in codes if code != FINISHED]
    # Every other rank only lost the one that made a mistake, and a restart would repeat it
    for code in failed:
        if code < 128:
            return code
    # These explain little, so any other code (137, 139, ...) is the cause. A rank that was stopped alone did not wait
    # for the others, which then lost it or could not join.
    weak = [PEER_LOST, JOIN_FAILED, STOPPED]
    return max(failed, key=lambda code: weak.index(code) if code in weak else len(weak), default=FINISHED)


def worth_restarting(code: int) -> bool:
    """Whether a restart may help: not after a mistake, a fault, a finished run, or a request to stop."""
    return code >= 128 and code != STOPPED


def exit_code(error: BaseException) -> int:
    """The code that a process ends with after `error`.

    Only our own exceptions name one: the `.code` of a foreign one (an HTTPError's 404) means something else. SystemExit
    before the end is a failure, even with code 0.
    """
    if isinstance(error, ExpectedError):
        return error.code
    if isinstance(error, SystemExit) and isinstance(error.code, int) and 0 < error.code < 256:
        return error.code
    return FAULT


def reason(error: BaseException) -> str:
    """The text of `error` as one line; for a foreign exception its type stands before it."""
    text = " ".join(str(error).split())
    return text if isinstance(error, ExpectedError) else f"{type(error).__name__}: {text}"


@contextlib.contextmanager
def disk_errors(what: str, directory: Path, check: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Within the block an OSError is the user's: the directory can't be written to. `what` failed, in a few words.
    `check`: raises PeerLost where the directory has a next owner, who removes our files."""
    try:
        yield
    except OSError as error:
        check()
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        problem = "has no space left" if full else f"must be writable, got {error.strerror or error}"
        raise UserError(
            f"{what}: {directory} {problem}. The files there are untouched: make room or let it be written, "
            "and run the same command again."
        ) from None
