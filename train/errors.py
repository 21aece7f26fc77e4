"""What can end a run, and the exit code of each. No torch here: the launcher and `--help` import this.

Below 128 nothing is gained by trying again, from 128 on it is; Kubeflow's ExitCode policy has the same rule.
"""

FINISHED = 0
FAULT = 1
USER_MISTAKE = 2
STOPPED = 143
JOIN_FAILED = 170
PEER_LOST = 171


class UserError(ValueError):
    """The user's mistake: printed as one line without a traceback, exit code 2."""

    code = USER_MISTAKE
    echo = False  # rank 0 raises the same: this rank keeps it in its log


class ConfigError(UserError):
    """A setting is unknown, out of range, of the wrong type, or contradicts another."""


class LaunchError(UserError):
    """The environment describes no launch that could work."""


class DataError(UserError):
    """A data file is missing, corrupt or not what it claims to be. The message names the file."""


class JoinError(RuntimeError):
    """The group did not come together within its deadline, exit code 170."""

    code = JOIN_FAILED


class PeerLost(RuntimeError):
    """Another rank died or a deadline passed, exit code 171, or the code that the lost rank told."""

    code = PEER_LOST
    echo = False
    suspect: int | None = None


class Stopped(Exception):
    """Stopped on request with a checkpoint; the same command goes on from it, exit code 143."""

    code = STOPPED
