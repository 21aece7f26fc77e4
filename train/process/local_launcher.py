"""`launch`: several processes on this node, and on others beside it. No torch here.

What torchrun does not do: keep the ranks' exit codes (it turns each into 1), leave a job alone that stopped on request,
and restart only where trying again can help.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from train.config import check_world_size
from train.config.options import OPTIONS, LaunchOptions
from train.config.schema import fields_of
from train.errors import FAULT, FINISHED, PEER_LOST, root_cause, worth_restarting
from train.process import init_method, spawn
from train.process.addresses import PORT_OF_LAUNCH, free_port
from train.process.context import Context
from train.process.limits import oom_kills
from train.process.log import Log
from train.process.status import attempt_of, new_attempt, read_json
from train.process.stop import StopRequest

POLL_S = 0.05
# The ranks of a job end together. After the first has ended, with whatever code, the rest have this long to find out
# and report whom they lost, or to finish. One that was stopped (SIGSTOP, a frozen disk) ends in no other way.
SETTLE_S = 15.0


def launch(context: Context, options: LaunchOptions) -> int:
    """Start the ranks of this node, and return the code of the one that caused the end.

    Restarts them all where the code says that it may help (see `errors.worth_restarting`), at most `max_restarts`
    times: each rank leaves at once when a peer is lost, all join anew and resume. Raises ConfigError and LaunchError.
    """
    log, stop = context.log, context.stop
    if options.command == "train":
        check_world_size(context.config, options.nproc * options.nnodes)
    else:
        context = context.in_folder(options.command)
    # `launch` understands the URL for its ranks: they get what it stands for
    met = init_method.parse_url(options.init_method) if options.init_method else {}
    passed_on = [name for name in fields_of(OPTIONS[options.command]) if name != "init_method"]
    arguments = [options.command, *context.request.words(options=passed_on)]
    job = new_attempt()
    for restart in range(options.max_restarts + 1):
        attempt = attempt_of(job, restart)
        # Several nodes must agree on one. On a single node each attempt takes another: the last may still hold its own
        port = options.master_port or (PORT_OF_LAUNCH if options.nnodes > 1 else free_port())
        meeting = {"MASTER_ADDR": options.master_addr or "127.0.0.1", "MASTER_PORT": str(port), **met}
        killed_before = oom_kills()
        environments = _environments(options, meeting, attempt, restart)
        codes = _attempt(options.launcher, arguments, environments, stop, log)
        code = root_cause(list(codes.values()), stopped=stop.requested)
        if code == FINISHED and options.node_rank == 0:
            code = _confirmed(context.run_dir, attempt, log)
        if not worth_restarting(code):
            break
        if restart == options.max_restarts:
            gave_up = f"gave up after {options.max_restarts} restarts, exit code {code}"
            log.warning(f"{_ended(codes, killed_before)}; {gave_up}")
            break
        log.info(f"{_ended(codes, killed_before)}; starting again ({restart + 1} of {options.max_restarts})")
    return code


def _attempt(
    launcher: str, arguments: list[str], environments: dict[int, dict[str, str]], stop: StopRequest, log: Log
) -> dict[int, int]:
    """Start, supervise, end. Returns the exit code of each local rank, the first that ended first."""
    stop.finish_step_first()  # a signal is passed on to the ranks from here on
    processes: dict[int, Any] = (spawn.start if launcher == "spawn" else _start)(arguments, environments)
    try:
        return _supervise(dict(processes), stop, log)
    finally:
        for process in processes.values():
            process.kill()


class _Rank(subprocess.Popen[bytes]):
    """One rank, and the session that it leads."""

    def kill(self) -> None:
        """End the process and those that it started: DataLoader workers would keep its memory, and its GPU."""
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(self.pid, signal.SIGKILL)
            self.wait(5)  # not without a bound: one that waits for a dead disk ends when the disk answers


def _start(arguments: list[str], environments: dict[int, dict[str, str]]) -> dict[int, _Rank]:
    # In a session of its own: a Ctrl-C at the terminal goes to the launcher alone, which passes it on once
    command = [sys.executable, spawn.MAIN, *arguments]
    return {
        local_rank: _Rank(command, env={**os.environ, **environment}, start_new_session=True)
        for local_rank, environment in environments.items()
    }


def _environments(
    options: LaunchOptions, meeting: dict[str, str], attempt: str, restart: int
) -> dict[int, dict[str, str]]:
    """What each local rank finds in its environment beside that of the launcher. `meeting`: where the ranks meet."""
    return {
        local_rank: {
            **meeting,
            "RANK": str(options.node_rank * options.nproc + local_rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(options.nnodes * options.nproc),
            "LOCAL_WORLD_SIZE": str(options.nproc),
            "GROUP_RANK": str(options.node_rank),
            "GROUP_WORLD_SIZE": str(options.nnodes),
            "RANKUP_LAUNCH": "1",
            "RANKUP_ATTEMPT": attempt,
            "RANKUP_RESTART": str(restart),
            "RANKUP_PARENT": str(os.getpid()),
        }
        for local_rank in range(options.nproc)
    }


def _supervise(running: dict[int, Any], stop: StopRequest, log: Log) -> dict[int, int]:
    """Wait until all ranks have ended; kill those that are late. `running`: the process of each local rank.

    Returns the exit code of each local rank, in the order in which they ended.
    """
    codes: dict[int, int] = {}
    settled_s, forwarded = float("inf"), False
    while running:
        for rank, process in list(running.items()):
            returncode = process.poll()
            if returncode is not None:
                # As a shell counts it: 128 and the signal's number where a signal ended it
                codes[rank] = returncode if returncode >= 0 else 128 - returncode
                del running[rank]
                settled_s = min(settled_s, time.monotonic() + SETTLE_S)
        if stop.requested and not forwarded:
            forwarded = True
            log.info(f"{stop.signal_name}: passed on to {len(running)} ranks, which save and leave")
            for process in running.values():
                # Whatever the signal was: a Python that has only just started leaves of this one without a traceback
                process.send_signal(signal.SIGTERM)
        if time.monotonic() > settled_s:
            for rank, process in running.items():
                log.warning(f"local rank {rank} did not end within {SETTLE_S:g} s after the others: killed")
                process.kill()
                codes[rank] = PEER_LOST
            running.clear()
        time.sleep(POLL_S)
    return codes


def _ended(codes: dict[int, int], killed_before: int | None) -> str:
    text = "ranks ended with " + ", ".join(f"{code} (local rank {rank})" for rank, code in sorted(codes.items()))
    if 128 + 9 not in codes.values():
        return text
    now = oom_kills()
    if now is None or killed_before is None:
        cause = "if nobody sent it, the memory was not enough, or the limit of the container or job"
    elif (count := now - killed_before) > 0:
        cause = f"{count} out-of-memory kill{'s were' if count > 1 else ' was'} counted in this container or job "
        cause += "meanwhile: give it more memory, or lower --num-workers or --batch-size"
    else:
        cause = "no out-of-memory kill was counted in this container or job: somebody sent it, or the machine itself "
        cause += "ran out"
    return f"{text} (137 is SIGKILL: {cause})"


def _confirmed(run_dir: Path, attempt: str, log: Log) -> int:
    """Success is what this attempt wrote down, not what an earlier one left."""
    status = read_json(run_dir / "status.json") or {}
    if status.get("attempt") == attempt and status.get("state") == "finished":
        return FINISHED
    log.warning(f"all ranks ended with 0, but {run_dir}/status.json does not say that attempt {attempt} finished")
    return FAULT
