"""How processes start and end, and which limits a container or batch job sets. No torch here.

A process of ours ends by `os._exit`, never by returning from its main module. At the interpreter's own end Python waits
for threads inside torch, for the workers of a stuck disk and for gloo's teardown, and any of them may wait for a dead
rank. `main` ends by `finish`; what cannot wait (a deadline, a lost peer) ends by `leave`.
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
import runpy
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn, TypeVar

from rankup.errors import FAULT, FINISHED, reason
from rankup.timing import LAST_WORD_S

ROOT = Path("/")
T = TypeVar("T")

# Other processes ------------------------------------------------------------------------------------------------------


def state_of(pid: int) -> str:
    """Its state, such as T; "" for a process that is gone."""
    return "".join(_stat_of(pid)[:1])


def start_of(pid: int) -> str:
    """When it was started, in the kernel's ticks, which no later process with that number has; "" once it has ended."""
    fields = _stat_of(pid)
    return "" if not fields or fields[0] in "ZX" else fields[19]


def began(pid: int) -> float:
    """When it was started, in seconds of `time.time()`, to a hundredth of a second."""
    # psutil adds the same number to the time of the boot, which the kernel tells in whole seconds
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + int(start_of(pid)) / os.sysconf("SC_CLK_TCK")


def _stat_of(pid: int) -> list[str]:
    """The fields of /proc/PID/stat behind the name."""
    return read(f"/proc/{pid}/stat").rpartition(")")[2].split()


def has_handler(pid: int, number: int) -> bool:
    """Whether it has a handler for that signal."""
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)", read(f"/proc/{pid}/status"), re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when `parent` ends: the ranks of a launcher that was killed would train on, and
    hold their GPUs (pytorch 5736). A fork does not inherit it."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it ended before the line above
        os._exit(128 + signal.SIGKILL)


def send_signal(pid: int, number: int) -> None:
    """To the process alone, which is not reaped yet; SIGTERM in place of a SIGUSR1 that it has no handler for."""
    if number == signal.SIGUSR1 and not has_handler(pid, number):
        number = signal.SIGTERM
    with contextlib.suppress(ProcessLookupError, PermissionError):  # it may have changed its user
        os.kill(pid, number)


def kill_session(pid: int) -> None:
    """Kill the process, and those of the session that it leads."""
    for kill in (os.killpg, os.kill):  # it leads no group yet in its first instant
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def end_of(pid: int) -> int:
    """The exit code of a child that has ended, as a shell counts it. What its session has left is killed first, as
    the number may be another process's afterwards: DataLoader workers would keep their memory, and their GPU."""
    kill_session(pid)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return code if code >= 0 else 128 - code


def reap_orphans() -> None:
    """Take the ends of orphans, which a container's first process inherits, and of own children that have ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass


# The end of this process ----------------------------------------------------------------------------------------------


def finish(code: int) -> NoReturn:
    """End this process with `code` once all that it printed is written, however slow its reader is (`less`)."""
    _flush()
    os._exit(code)


def leave(code: int, last_word: Callable[[], int | None] = lambda: None, *, timeout_s: float = 0.0) -> NoReturn:
    """End this process, from any thread, with `code` or the one that `last_word` returns. That and the flushing of what
    was printed get `timeout_s` seconds: a full pipe, a stuck disk or a store must not keep a process that has to go."""
    def speak() -> int:
        changed = last_word()
        _flush()
        return code if changed is None else changed

    try:
        if timeout_s > 0 and (said := within(timeout_s, speak)) is not None:
            code = said
    finally:
        os._exit(code)  # even where no thread can be started any more


def _flush() -> None:
    # `logs.guard` has put its own in the place of the last two
    for stream in filter(None, (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)):
        with contextlib.suppress(OSError, ValueError):  # its reader has gone
            stream.flush()


def in_background(work: Callable[[], T]) -> "concurrent.futures.Future[T]":
    """What `work` returns or raises, in a thread of its own: nobody has to wait for it, not even this process's end.
    For calls that nothing can interrupt: a resolver, a disk, or a store whose process is stopped."""
    done: concurrent.futures.Future[T] = concurrent.futures.Future()
    done.set_running_or_notify_cancel()  # who waits may give up, and the thread goes on

    def run() -> None:
        try:
            done.set_result(work())
        except Exception as error:
            done.set_exception(error)

    threading.Thread(target=run, name="background", daemon=True).start()
    return done


def within(timeout_s: float, work: Callable[[], T]) -> T | None:
    """What `work` returns, or None if it takes longer than `timeout_s` or raises."""
    with contextlib.suppress(Exception):
        return in_background(work).result(timeout_s)
    return None


def set_hard_deadline(timeout_s: float) -> None:
    """Have the kernel end this process in `timeout_s` seconds with 142, after a dump of all stacks: the last resort for
    a hang that holds the interpreter's lock. Another call moves it, infinity takes it back. There is none where the
    user's code has taken SIGALRM."""
    if signal.getsignal(signal.SIGALRM) == signal.SIG_DFL:
        # To stderr by its number: the user's code may have put another object in its place
        faulthandler.register(signal.SIGALRM, 2, chain=True)
        # Again later: a second signal ends a dump to a pipe that nobody reads
        after_s = 0.0 if timeout_s == math.inf else max(0.1, timeout_s)
        signal.setitimer(signal.ITIMER_REAL, after_s, LAST_WORD_S)


# A forked rank --------------------------------------------------------------------------------------------------------


def be_python(argv: list[str], tell: Callable[[int, str], None] = lambda code, why: None) -> NoReturn:
    """Be `python ARGV`: a script, or "-m" and a module. `tell`: gets the code and the error that it has failed with,
    unless it has ended this process itself, as an open job does."""
    program = argv[0]
    sys.orig_argv = [sys.executable, *argv]
    sys.argv = argv[1:] if program == "-m" else argv
    # A new module of this name: spawned workers and pickles look there for what the script has defined
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
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code, why, sys.last_value = FAULT, reason(error), error  # the latter as of any other error
    except BaseException as error:
        code, why = _show(error), reason(error)
    threading._shutdown()  # type: ignore[attr-defined]  # waits for all that are no daemons
    atexit._run_exitfuncs()
    if why and os.getpid() == pid:  # the script may have forked
        tell(code, why)
    _end(code)


def _show(error: BaseException) -> int:
    """Print what ended the script, without the frames above it. Returns the exit code."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals in (globals(), vars(runpy)):
        trace = trace.tb_next
    sys.excepthook(type(error), error.with_traceback(trace), trace)
    return 128 + signal.SIGINT if type(error) is KeyboardInterrupt else FAULT


def _end(code: int) -> NoReturn:
    """End as Python ends, but free no objects: to write to, and so copy, the memory that is shared takes 20 times as
    long as all the rest."""
    # What the script left open would be closed with its variables. Those of the server are frozen, so not among these
    for file in [*gc.get_objects(), sys.stdout, sys.stderr]:
        if issubclass(type(file), (io.TextIOBase, io.BufferedWriter, io.BufferedRandom)):
            with contextlib.suppress(Exception):
                file.flush()
    ctypes.CDLL(None).fflush(None)
    os._exit(code)


# What is granted: control groups (v1 and v2) say it; os.cpu_count() and psutil see the whole machine ------------------
# `root` takes the place of the file system's root


def cpu_quota(root: Path = ROOT) -> float:
    """CPUs granted to this process (1.5 is possible): the least of its groups' quotas and its affinity."""
    found = [float(len(os.sched_getaffinity(0)))]
    for group in _groups("cpu", root):
        v1 = [read(group / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
        quota, period = read(group / "cpu.max").split() or v1
        if quota.isdigit():  # "max" in v2 and -1 in v1 are no limit
            found.append(int(quota) / int(period))
    return min(found)


def memory_available() -> int:
    """Bytes that this process can take without swapping, of the machine and of its container or job."""
    import psutil  # 20 ms that others do without

    return min([psutil.virtual_memory().available, *(left for _, left in memory(ROOT))])


def memory(root: Path) -> Iterator[tuple[int, int]]:
    """The limit in bytes of each group that has one, and how many are left. Files that were not touched of late count
    as free, as in Kubernetes' "working set": a data set that was read once would fill any limit."""
    for group in _groups("memory", root):
        limit = (read(group / "memory.max") or read(group / "memory.limit_in_bytes")).strip()
        if limit.isdigit() and int(limit) < 2**60:  # v1 writes 2**63 less a page where there is no limit
            cached = re.findall(r"^(?:total_)?inactive_file (\d+)$", read(group / "memory.stat"), re.MULTILINE)
            used = int(read(group / "memory.current") or read(group / "memory.usage_in_bytes") or 0)
            yield int(limit), max(0, int(limit) - used + int(cached[-1] if cached else 0))


def oom_kills(root: Path = ROOT) -> int:
    """How many processes of this container or job the kernel has killed for memory so far; 0 where it does not say."""
    names = ("memory.events", "memory.oom_control")
    counted = (read(group / name) for group in _groups("memory", root) for name in names)
    found = re.search(r"^oom_kill (\d+)$", next(filter(None, counted), ""), re.MULTILINE)
    return int(found[1]) if found else 0


def explain_sigkill(before: int) -> str:
    """Who may have sent it. `before`: what `oom_kills` returned when the process was started."""
    if kills := oom_kills() - before:
        where, more = "in this container or job meanwhile", "lower --num-workers or --batch-size"
        return f"out-of-memory kills {where}: {kills}. Give it more memory, or {more}"
    return "if nobody sent it, the memory was not enough, or the limit of the container or job"


def _groups(controller: str, root: Path) -> Iterator[Path]:
    """Where this process's own group and each of its parents may lie, the own first. Inside a container the path may be
    the host's, and does not exist: the mount point is then the container's own group."""
    for line in read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):  # v2 names none
            own = PurePosixPath(path.strip("/"))
            yield from (root / "sys/fs/cgroup" / (controllers and controller) / group for group in (own, *own.parents))


def read(path: str | Path) -> str:
    """The file's text, "" where it cannot be read. The kernel cuts a process's name, also within a character."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


@contextlib.contextmanager
def no_name_lookups() -> Iterator[None]:
    """Within the block no resolver is asked for names, in all threads of this process: /etc/hosts alone answers.

    torch asks for the name of both ends of each connection of a store, only to print it. With a resolver that takes 5 s
    to say that it does not know the address, 16 ranks took minutes to meet. torch has no setting for that, but glibc
    lets a program replace the line of nsswitch.conf.
    """
    configure = ctypes.CDLL(None).__nss_configure_lookup
    configure(b"hosts", b"files")
    try:
        yield
    finally:
        found = re.search(r"^\s*hosts\s*:([^#\n]*)", read("/etc/nsswitch.conf"), re.MULTILINE)
        configure(b"hosts", (found[1].strip() if found else "files dns").encode())  # the latter is glibc's own choice
