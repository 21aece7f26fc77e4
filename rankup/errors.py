"""The errors that can end a run, their exit codes, and which of several codes is the cause.

Restart only after codes of 128 and above; Kubeflow's ExitCode policy has the same rule. This file imports only the
standard library.
"""

import contextlib
import errno
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

FINISHED = 0
FAULT = 1
USER_MISTAKE = 2
STOPPED = 143
JOIN_FAILED = 170
PEER_LOST = 171
LEFT_OUT = 172  # the job left this node out: its ranks failed again and again, or another node could not reach it


class ExpectedError(Exception):
    """An end that rankup prints without a traceback."""

    code = FAULT

    def __init__(self, text: str, *, printed_elsewhere: bool = False) -> None:
        """`printed_elsewhere`: another rank prints the same text, so this rank only writes it to its log file."""
        super().__init__(text)
        self.printed_elsewhere = printed_elsewhere

    def _render_traceback_(self) -> list[str]:
        """Return what IPython shows below a cell that raises this error."""
        return [str(self)]


class UserError(ExpectedError, ValueError):
    """A mistake of the user, which is printed as one line without a traceback. Exit code 2."""

    code = USER_MISTAKE


class JoinError(ExpectedError, RuntimeError):
    """The ranks did not come together within their deadline. Exit code 170."""

    code = JOIN_FAILED


class PeerLost(ExpectedError, RuntimeError):
    """Another rank died or a deadline passed. Exit code 171, or the code that the lost rank reported."""

    def __init__(
        self, text: str, *, code: int = PEER_LOST, suspect: int | None = None, nobody_died: bool = False,
        printed_elsewhere: bool = False,
    ) -> None:
        """`suspect`: the lost rank, if known. `nobody_died`: all ranks are alive, but one of them is late."""
        super().__init__(text, printed_elsewhere=printed_elsewhere)
        self.code, self.suspect, self.nobody_died = code, suspect, nobody_died


class Stopped(ExpectedError):
    """The run was stopped on request and kept its state, from which the same command resumes. Exit code 143."""

    code = STOPPED


class Finished(Stopped):
    """The run had finished before this start, and nothing is left to do. Exit code 0."""

    code = FINISHED


def root_cause(codes: Sequence[int]) -> int:
    """Return the exit code among several that says why a job ended; 0 if all are 0.

    `codes`: exit codes of processes or nodes, 0 to 255, in the order in which these ended, if it is known. Of two codes
    that are equally likely causes, the earlier one wins.
    """
    failed = [code for code in codes if code != FINISHED]
    # A code below 128 is a mistake or fault that a restart would repeat; the other ranks only lost the rank that had it
    for code in failed:
        if code < 128:
            return code
    # These three explain little, so any other code (137, 139, ...) is the cause. Of the three, STOPPED wins: a rank
    # that was stopped alone did not wait for the others, which then lost it or could not join.
    weak = [PEER_LOST, JOIN_FAILED, STOPPED]
    return max(failed, key=lambda code: weak.index(code) if code in weak else len(weak), default=FINISHED)


def worth_restarting(code: int) -> bool:
    """Return whether a restart may help. It does not after a mistake, a fault, a finished run, or a request to stop."""
    return code >= 128 and code != STOPPED


def exit_code(error: BaseException) -> int:
    """Return the exit code of a process that ends with `error`.

    Only our own exceptions carry an exit code: a foreign `.code` (an HTTPError's 404) means something else. SystemExit
    before the end of a run is a failure, even with code 0.
    """
    if isinstance(error, ExpectedError):
        return error.code
    if isinstance(error, SystemExit) and isinstance(error.code, int) and 0 < error.code < 256:
        return error.code
    return FAULT


def reason(error: BaseException) -> str:
    """Return the text of `error` as one line, with its type in front unless it is an ExpectedError."""
    text = " ".join(str(error).split())
    return text if isinstance(error, ExpectedError) else f"{type(error).__name__}: {text}"


def not_installed(what: str, *packages: str) -> UserError:
    """Return the error for packages that `what` needs and that are missing, by the names of their modules."""
    names = [{"yaml": "pyyaml", "PIL": "pillow"}.get(name, name) for name in packages]
    return UserError(f"{what}: needs {', '.join(names)}, not installed: pip install {' '.join(names)}")


def need(what: str, *packages: str) -> None:
    """Raise UserError unless these packages are installed. This imports none of them."""
    if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
        raise not_installed(what, *missing)


@contextlib.contextmanager
def disk_errors(what: str, directory: Path, check: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Within the block, turn an OSError into a UserError that says that `directory` can't be written to. `what`: what
    fails. `check`: raises PeerLost if another owner has taken the directory over, who removes our files."""
    try:
        yield
    except OSError as error:
        check()
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        problem = "has no space left" if full else f"must be writable, got {error.strerror or error}"
        raise UserError(
            f"{what}: {directory if full else _in_the_way(error, directory)} {problem}. The files there are untouched: "
            "free space or allow writing, and run the same command again."
        ) from None


def _in_the_way(error: OSError, directory: Path) -> Path:
    """Return the path that the user may know and that `error` is about: of a hidden file, its folder or its target."""
    for name in (error.filename2, error.filename):
        with contextlib.suppress(TypeError, ValueError):  # no name, or a path elsewhere
            if not any(part.startswith(".") for part in Path(name).relative_to(directory).parts):
                return Path(name)
    return directory
