"""How processes start and end, and which limits a container or batch job sets. This file does not import torch.

Our processes end with `os._exit`, and never return from their main module. Python's own exit would wait for threads in
torch, for threads on a stuck disk and for gloo's teardown, each of which may wait for a dead rank. The main program
calls `finish`. Code that can't wait (after a deadline, after a peer loss) calls `leave`.
"""

import atexit
import builtins
import concurrent.futures
import contextlib
import ctypes
import faulthandler
import gc
import importlib.machinery
import io
import math
import os
import re
import resource
import runpy
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn, TypeVar

from rankup.errors import FAULT, FINISHED, UserError, reason
from rankup.timing import LAST_ACT_S, LAST_MESSAGE_S

ROOT = Path("/")
T = TypeVar("T")

# Other processes ------------------------------------------------------------------------------------------------------


def state_of(pid: int) -> str:
    """Return the kernel's letter for a process's state, such as T; "" if the process is gone."""
    return "".join(_stat_of(pid)[:1])


def start_of(pid: int) -> str:
    """Return when a process started, in kernel ticks, or "" if it has ended. A later process with its id differs."""
    fields = _stat_of(pid)
    return "" if not fields or fields[0] in "ZX" else fields[19]


def began(pid: int) -> float:
    """Return when a process started, as `time.time()`, to a hundredth of a second."""
    # psutil is less exact: it adds the same ticks to a boot time in whole seconds
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + int(start_of(pid)) / os.sysconf("SC_CLK_TCK")


def _stat_of(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the name."""
    return read(f"/proc/{pid}/stat").rpartition(")")[2].split()


def has_handler(pid: int, number: int) -> bool:
    """Return whether a process has a handler for signal `number`."""
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)", read(f"/proc/{pid}/status"), re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when `parent` ends. Otherwise the ranks of a killed launcher would keep
    training and hold their GPUs (pytorch 5736). Forked children do not inherit this."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # the parent ended before the line above
        os._exit(128 + signal.SIGKILL)


def die_with_heir(heir: int, *, parent: int) -> None:
    """Act as `die_with_parent(heir)` once this process's `parent` has ended, so that `heir`, a subreaper, inherits it.
    Do not wait for that, because the end of a large process takes a while: the kernel tells it by SIGURG."""
    def inherited(*_: object) -> None:
        signal.signal(signal.SIGURG, signal.SIG_DFL)  # which ignores the signal
        die_with_parent(heir)

    signal.signal(signal.SIGURG, inherited)
    ctypes.CDLL(None).prctl(1, signal.SIGURG, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the line above
        inherited()


def send_signal(pid: int, number: int) -> None:
    """Send a signal to a process that is not reaped yet."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # the process may have changed its user
        os.kill(pid, number)


def kill_session(pid: int) -> None:
    """Kill a process and the process group that it leads."""
    for kill in (os.killpg, os.kill):  # a process that was just forked does not lead a group yet
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def has_ended(pid: int) -> bool:
    """Return whether a child has ended; False for a process that this one has yet to inherit."""
    with contextlib.suppress(ChildProcessError):
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    return False


def end_of(pid: int) -> int:
    """Return the exit code of a child that has ended, as a shell reports it. Before that, kill the rest of its process
    group, such as DataLoader workers, which would hold memory and a GPU. After waitpid the id may be reused."""
    kill_session(pid)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return code if code >= 0 else 128 - code


def become_subreaper() -> None:
    """From now on, let this process inherit the orphans of its descendants, as a container's first process does."""
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


def reap_orphans(*, but: Callable[[], Collection[int]] = tuple) -> None:
    """Reap inherited children that have ended, except those that `but` returns after a child has ended. Leave children
    of this process's own session to the code that has started them."""
    with contextlib.suppress(ChildProcessError, ProcessLookupError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            if ended.si_pid in but() or os.getsid(ended.si_pid) == os.getsid(0):
                break  # another signal comes for it, and then for what this leaves
            os.waitpid(ended.si_pid, 0)


# Open files ----------------------------------------------------------------------------------------------------------

OPEN_FILES = 16384  # enough for the connections of a leader and the tensors of DataLoader workers


def allow_open_files(least: int, *, what: str) -> None:
    """Raise this process's soft limit of open files, often 1,024, as far as the hard limit allows, up to OPEN_FILES or
    `least`. Children inherit it. Raises UserError if the hard limit is below `least`, which `what` needs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # the kernel has no "unlimited" here
    if least > hard:
        raise UserError(
            f"ulimit -n must be at least {least} for {what}, got {hard} on {os.uname().nodename}. Raise the hard limit "
            "(LimitNOFILE in systemd, ulimits in compose)."
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, max(least, OPEN_FILES))), hard))


# The end of this process ----------------------------------------------------------------------------------------------

_LAST_ACTS = list[Callable[[int], object]]()


def before_end(act: Callable[[int], object]) -> None:
    """Call `act` with the exit code before `finish` or `leave` ends this process. A forked child does not call it."""
    this = os.getpid()
    _LAST_ACTS[:] = [lambda code: act(code) if os.getpid() == this else None]


def act_before_end(code: int) -> None:
    """Do now what `before_end` was told, once and for LAST_ACT_S at most."""
    while _LAST_ACTS:
        within(LAST_ACT_S, partial(_LAST_ACTS.pop(), code))


def finish(code: int) -> NoReturn:
    """Write everything that was printed, however slow the reader is (`less`), then end this process with `code`."""
    act_before_end(code)
    _flush()
    os._exit(code)


def leave(code: int, before_exit: Callable[[], int | None] = lambda: None, *, timeout_s: float = 0.0) -> NoReturn:
    """End this process, from any thread, with `code`, or with the code that `before_exit` returns. `timeout_s` limits
    `before_exit` and the flush of printed lines: a full pipe, a stuck disk or a store must not delay the end."""
    def speak() -> int:
        changed = before_exit()
        _flush()
        return code if changed is None else changed

    try:
        if timeout_s > 0 and (said := within(timeout_s, speak)) is not None:
            code = said
        act_before_end(code)
    finally:
        os._exit(code)  # even if no thread can be started any more


def _flush() -> None:
    # `logs.guard` may have replaced the first two
    for stream in filter(None, (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)):
        with contextlib.suppress(OSError, ValueError):  # the reader is gone
            stream.flush()


def in_background(work: Callable[[], T]) -> "concurrent.futures.Future[T]":
    """Call `work` in a thread of its own, and return its future. Nothing waits for the thread, not even the end of this
    process. Use this for calls that can't be interrupted: to a resolver, a disk, or a store that may be stopped."""
    done: concurrent.futures.Future[T] = concurrent.futures.Future()
    done.set_running_or_notify_cancel()  # a caller that gives up can't cancel the thread

    def run() -> None:
        try:
            done.set_result(work())
        except Exception as error:
            done.set_exception(error)

    try:
        threading.Thread(target=run, name="background", daemon=True).start()
    except RuntimeError:  # no more threads are allowed (ulimit -u, pids.max): waiting is better than ending
        run()
    return done


def within(timeout_s: float, work: Callable[[], T]) -> T | None:
    """Return what `work` returns, or None if it raises or takes longer than `timeout_s`."""
    with contextlib.suppress(Exception):
        return in_background(work).result(timeout_s)
    return None


def set_hard_deadline(timeout_s: float) -> None:
    """Make the kernel end this process in `timeout_s` seconds with code 142, after a dump of all stacks. This is the
    last resort for a hang that holds the GIL. Another call moves the deadline; infinity removes it. If the user's code
    handles SIGALRM, this does nothing."""
    if signal.getsignal(signal.SIGALRM) == signal.SIG_DFL:
        # By descriptor, because the user's code may have replaced sys.stderr
        faulthandler.register(signal.SIGALRM, 2, chain=True)
        # The timer fires again LAST_MESSAGE_S later: a second signal ends a dump to a pipe that nobody reads
        after_s = 0.0 if timeout_s == math.inf else max(0.1, timeout_s)
        signal.setitimer(signal.ITIMER_REAL, after_s, LAST_MESSAGE_S)


# A forked rank --------------------------------------------------------------------------------------------------------


def be_python(argv: list[str], tell: Callable[[int, str], None] = lambda code, why: None) -> NoReturn:
    """Act as `python ARGV` does, where ARGV begins with a script, or with "-m" and a module. At the end `tell` gets the
    exit code and the error, or "", unless the script ends this process itself, as an open job does."""
    program = argv[0]
    sys.orig_argv = [sys.executable, *argv]
    sys.argv = argv[1:] if program == "-m" else argv
    # A new `__main__`: spawned workers and pickles look there for what the script has defined
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __annotations__={})
    code: Any = FINISHED
    why, pid = "", os.getpid()
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())  # the fork server has blocked some
        if not sys.flags.safe_path:
            sys.path.insert(0, os.getcwd() if program == "-m" else os.path.dirname(os.path.realpath(program)))
        if program == "-m":
            runpy._run_module_as_main(argv[1])  # type: ignore[attr-defined]
        else:
            file = os.path.abspath(program)
            loader = importlib.machinery.SourceFileLoader("__main__", file)
            main.__dict__.update(__file__=file, __cached__=None, __loader__=loader)
            with io.open_code(file) as opened:
                text = opened.read()
            exec(compile(text, file, "exec", dont_inherit=True), main.__dict__)
    except SystemExit as error:
        code = FINISHED if error.code is None else error.code
        if code:
            sys.last_value = error  # as Python does for any other error: an open job reads it when this process ends
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code, why = FAULT, reason(error)
    except BaseException as error:
        code, why = _show(error), reason(error)
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are not daemons
    atexit._run_exitfuncs()
    if os.getpid() == pid:  # not in a process that the script has forked
        tell(code, why)
    _end(code)


def _show(error: BaseException) -> int:
    """Print the traceback of the script without our own frames. Returns the exit code."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals in (globals(), vars(runpy)):
        trace = trace.tb_next
    sys.excepthook(type(error), error.with_traceback(trace), trace)
    return 128 + signal.SIGINT if type(error) is KeyboardInterrupt else FAULT


def _end(code: int) -> NoReturn:
    """End as Python does, but free no objects. Freeing writes to memory that is shared with the fork server, and so
    copies it, which takes 20 times as long as the rest."""
    # Python would close files that the script left open. Objects of the server are frozen, so `gc` does not list them
    for file in [*gc.get_objects(), sys.stdout, sys.stderr]:
        if issubclass(type(file), (io.TextIOBase, io.BufferedWriter, io.BufferedRandom)):
            with contextlib.suppress(Exception):
                file.flush()
    ctypes.CDLL(None).fflush(None)
    os._exit(code)


# Limits from control groups (v1 and v2); os.cpu_count() and psutil see the whole machine -----------------------------
# `root`: the root of the file system, which tests replace


def cpu_quota(root: Path = ROOT) -> float:
    """Return how many CPUs this process may use (1.5 is possible): the least of its affinity and its groups' quotas."""
    found = [float(len(os.sched_getaffinity(0)))]
    for group in _groups("cpu", root):
        v1 = [read(group / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
        quota, period = read(group / "cpu.max").split() or v1
        if quota.isdigit():  # "max" in v2 and -1 in v1 are no limit
            found.append(int(quota) / int(period))
    return min(found)


def memory_available() -> int:
    """Return how many bytes this process can allocate without swapping, given the machine and its container or job."""
    import psutil  # imported late: it takes 20 ms

    return min([psutil.virtual_memory().available, *(left for _, left in memory(ROOT))])


def memory(root: Path) -> Iterator[tuple[int, int]]:
    """Yield the limit of each control group that has one, and how much of it is left, in bytes. Cached files that were
    not used lately count as free, as in Kubernetes' "working set". Otherwise a data set that was read once would fill
    any limit."""
    for group in _groups("memory", root):
        limit = (read(group / "memory.max") or read(group / "memory.limit_in_bytes")).strip()
        if limit.isdigit() and int(limit) < 2**60:  # without a limit, v1 writes 2**63 minus a page
            cached = re.findall(r"^(?:total_)?inactive_file (\d+)$", read(group / "memory.stat"), re.MULTILINE)
            used = int(read(group / "memory.current") or read(group / "memory.usage_in_bytes") or 0)
            yield int(limit), max(0, int(limit) - used + int(cached[-1] if cached else 0))


def oom_kills(root: Path = ROOT) -> int:
    """Return how many processes of this container or job the kernel has killed for lack of memory; 0 if unknown."""
    names = ("memory.events", "memory.oom_control")
    counted = (read(group / name) for group in _groups("memory", root) for name in names)
    found = re.search(r"^oom_kill (\d+)$", next(filter(None, counted), ""), re.MULTILINE)
    return int(found[1]) if found else 0


def explain_sigkill(before: int) -> str:
    """Return a likely cause of a SIGKILL. `before`: what `oom_kills` returned when the process was started."""
    if kills := oom_kills() - before:
        where, more = "in this container or job meanwhile", "lower --num-workers or --batch-size"
        return f"out-of-memory kills {where}: {kills}. Give it more memory, or {more}"
    return "somebody sent it, or memory ran out. Give the machine, container or job more, or lower the batch size"


def _groups(controller: str, root: Path) -> Iterator[Path]:
    """Yield the folders where this process's own group may be, then those of its parents. In a container, the path may
    be the host's, and not exist. The mount point, which is the last parent, is then the container's own group."""
    for line in read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):  # v2 names no controllers
            own = PurePosixPath(path.strip("/"))
            yield from (root / "sys/fs/cgroup" / (controllers and controller) / group for group in (own, *own.parents))


def read(path: str | Path) -> str:
    """Return a file's text, or "" if unreadable. Replace invalid UTF-8: the kernel may cut a name anywhere."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


@contextlib.contextmanager
def no_name_lookups() -> Iterator[None]:
    """Within the block, only /etc/hosts answers name lookups, in all threads of this process.

    torch looks up the names of both ends of each store connection, only to print them. With a resolver that takes 5 s
    to reject an address, 16 ranks took minutes to meet. torch has no setting for that, but glibc lets a program replace
    the `hosts` line of nsswitch.conf."""
    configure = ctypes.CDLL(None).__nss_configure_lookup
    configure(b"hosts", b"files")
    try:
        yield
    finally:
        found = re.search(r"^\s*hosts\s*:([^#\n]*)", read("/etc/nsswitch.conf"), re.MULTILINE)
        configure(b"hosts", (found[1].strip() if found else "files dns").encode())  # glibc's default
