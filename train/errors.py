"""What can end a run, and the exit code of each. No torch here: the launcher and `--help` import this.

Below 128 nothing is gained by trying again, from 128 on it is; Kubeflow's ExitCode policy has the same rule.
"""

import contextlib
import errno
import shutil
from pathlib import Path

FINISHED = 0
FAULT = 1
USER_MISTAKE = 2
STOPPED = 143
JOIN_FAILED = 170
PEER_LOST = 171


class UserError(ValueError):
    """The user's mistake: printed as one line without a traceback, exit code 2."""

    code = USER_MISTAKE

    def __init__(self, text: str, *, printed_elsewhere: bool = False) -> None:
        """`printed_elsewhere`: another rank prints the same text, this one only writes it to its log."""
        super().__init__(text)
        self.printed_elsewhere = printed_elsewhere


class ConfigError(UserError):
    """A setting is unknown, out of range, of the wrong type, or contradicts another."""


class LaunchError(UserError):
    """The environment describes no launch that could work."""


class DataError(UserError):
    """A data file is missing, corrupt or not what it claims to be. The message names the file."""


class JoinError(RuntimeError):
    """The group did not come together within its deadline, exit code 170."""

    code = JOIN_FAILED

    def __init__(self, text: str, *, printed_elsewhere: bool = False) -> None:
        """`printed_elsewhere`: another rank prints the same text, this one only writes it to its log."""
        super().__init__(text)
        self.printed_elsewhere = printed_elsewhere


class PeerLost(RuntimeError):
    """Another rank died or a deadline passed: exit code 171, or the code that the lost rank reported."""

    def __init__(
        self, text: str, *, code: int = PEER_LOST, suspect: int | None = None, nobody_died: bool = False,
        printed_elsewhere: bool = False,
    ) -> None:
        """`suspect`: the rank that was lost. `nobody_died`: all ranks are alive, one of them is late."""
        super().__init__(text)
        self.code, self.suspect, self.nobody_died = code, suspect, nobody_died
        self.printed_elsewhere = printed_elsewhere


class Stopped(Exception):
    """Stopped on request with a checkpoint; the same command goes on from it, exit code 143."""

    code = STOPPED


OURS = (UserError, JoinError, PeerLost, Stopped)  # their text says it all: no traceback


def exit_code(error: BaseException) -> int:
    """The code that a process ends with for an error. Only our own say one: a foreign `.code` (an HTTPError's 404) means
    something else, and to leave by SystemExit before the end is a failure, whatever its code."""
    if isinstance(error, OURS):
        return error.code
    if isinstance(error, SystemExit) and isinstance(error.code, int) and 0 < error.code < 256:
        return error.code
    return FAULT


def reason(error: BaseException) -> str:
    """Why, in one line."""
    text = " ".join(str(error).split())
    return text if isinstance(error, OURS) else f"{type(error).__name__}: {text}"


def disk_error(what: str, directory: Path, error: OSError) -> UserError:
    """A directory of the run that can't be written to any more, as the user has to hear it."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        problem = "has no space left"
        with contextlib.suppress(OSError):
            problem += f", {shutil.disk_usage(directory).free / 2**20:.0f} MiB free"
    else:
        problem = f"can't be written ({error.strerror})"
    return UserError(
        f"{what}: {directory} {problem}. The checkpoints there are untouched; mend it and run the same command again."
    )
