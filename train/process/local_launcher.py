"""Several processes on this node, and on others beside it, through torch's own launcher API.

What torchrun does not do: keep the ranks' exit codes (it turns each into 1), leave a job alone that stopped on request,
and restart only what trying again can help.
"""

import os
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from train.errors import FAULT, FINISHED, PEER_LOST, root_cause, worth_restarting
from train.process import spawn
from train.process.addresses import free_port
from train.process.limits import oom_kills
from train.process.log import Log
from train.process.status import attempt_of, new_attempt, read_json
from train.process.stop import StopRequest

POLL_S = 0.05
# The ranks of a job end together. After the first has ended, whatever with, the rest have this long: to find and tell whom
# they lost, or that they finished. One that was stopped (SIGSTOP, a frozen disk) ends only so.
SETTLE_S = 15.0


@dataclass(frozen=True, slots=True)
class Nodes:
    """Where this node stands: `nproc` processes on each of `num_nodes`."""

    nproc: int
    num_nodes: int
    node_rank: int
    master_addr: str
    master_port: int
    file: str = ""  # where the ranks meet instead
    spawn: bool = False  # start them through torch.multiprocessing


def launch(
    arguments: list[str], nodes: Nodes, *, max_restarts: int, run_dir: Path, stop: StopRequest, log: Log
) -> int:
    """Start the ranks of this node with `arguments` for `train.main`, and return the code of the first that failed.

    Restarts them all where the code says that it may help (128 and above, but not 143: stopped on request), at most
    `max_restarts` times: each rank fails fast when a peer is lost, all join anew and resume.
    """
    job = new_attempt()
    for restart in range(max_restarts + 1):
        attempt = attempt_of(job, restart)
        port = nodes.master_port or free_port()
        killed_before = oom_kills()
        codes = _attempt(arguments, nodes, port, attempt, restart, stop, log)
        code = root_cause(list(codes.values()), stopped=stop.requested)
        if code == FINISHED and nodes.node_rank == 0:
            code = _confirmed(run_dir, attempt, log)
        if not worth_restarting(code):
            break
        if restart == max_restarts:
            log.warning(f"{_ended(codes, killed_before)}; gave up after {max_restarts} restarts, exit code {code}")
            break
        log.info(f"{_ended(codes, killed_before)}; starting again ({restart + 1} of {max_restarts})")
    return code


def _attempt(
    arguments: list[str], nodes: Nodes, port: int, attempt: str, restart: int, stop: StopRequest, log: Log
) -> dict[int, int]:
    """Start, supervise, end. Returns the exit code of each local rank, the first that ended first."""
    environments = {i: _environment(nodes, i, port, attempt, restart) for i in range(nodes.nproc)}
    stop.finish_step_first()  # it is passed on to the ranks from here on
    if nodes.spawn:
        spawned = spawn.start(arguments, environments)
        try:
            return _supervise(dict(spawned), stop, log)
        finally:
            for process in spawned.values():
                process.kill()
    # Later than the first line of output: it costs the launcher what importing torch costs a rank
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, start_processes

    main_file = str(Path(__file__).parents[1] / "main.py")
    with tempfile.TemporaryDirectory(prefix="rankup-") as scratch:  # torch leaves one behind for each attempt
        # By default torch puts handlers of its own in the place of ours, and ends the job when a terminal closes, nohup or
        # not. It has to have one signal: this one nobody sends.
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGUSR2"
        context: Any = start_processes(
            name="rankup",
            entrypoint=sys.executable,
            args={i: (main_file, *arguments) for i in environments},
            envs=environments,
            logs_specs=DefaultLogsSpecs(log_dir=scratch),
        )
        stop.install_handlers()  # a torch that does not know the variable
        try:
            return _supervise({i: handler.proc for i, handler in context.subprocess_handlers.items()}, stop, log)
        finally:
            context.close(signal.SIGKILL, timeout=5)


def _environment(nodes: Nodes, local_rank: int, port: int, attempt: str, restart: int) -> dict[str, str]:
    meeting = {"RANKUP_FILE": nodes.file} if nodes.file else {}
    return {
        **meeting,
        "RANK": str(nodes.node_rank * nodes.nproc + local_rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(nodes.num_nodes * nodes.nproc),
        "LOCAL_WORLD_SIZE": str(nodes.nproc),
        "GROUP_RANK": str(nodes.node_rank),
        "GROUP_WORLD_SIZE": str(nodes.num_nodes),
        "MASTER_ADDR": nodes.master_addr,
        "MASTER_PORT": str(port),
        "RANKUP_LAUNCH": "1",
        "RANKUP_ATTEMPT": attempt,
        "RANKUP_RESTART": str(restart),
        "RANKUP_PARENT": str(os.getpid()),
    }


def _supervise(running: dict[int, Any], stop: StopRequest, log: Log) -> dict[int, int]:
    """Wait until all ranks have ended; kill those that are late. `running`: a Popen or the like for each local rank.

    Returns the exit code of each local rank, in the order in which they ended.
    """
    codes: dict[int, int] = {}
    settled_s, forwarded = float("inf"), False
    while running:
        for rank in [rank for rank, process in running.items() if process.poll() is not None]:
            codes[rank] = exit_code(running.pop(rank).returncode)
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


def exit_code(returncode: int) -> int:
    """A process's end as a shell counts it: 128 and the signal's number where one ended it."""
    return returncode if returncode >= 0 else 128 - returncode


def _ended(codes: dict[int, int], killed_before: int | None) -> str:
    text = "ranks ended with " + ", ".join(f"{code} (local rank {rank})" for rank, code in sorted(codes.items()))
    if 128 + 9 not in codes.values():
        return text
    now = oom_kills()
    if now is None or killed_before is None:
        return f"{text} (137 is SIGKILL: if nobody sent it, the memory was not enough, or the limit of the container or job)"
    if (count := now - killed_before) > 0:
        return (
            f"{text} (137 is SIGKILL: {count} out-of-memory kill{'s were' if count > 1 else ' was'} counted in this container "
            "or job meanwhile: give it more memory, or lower --num-workers or --batch-size)"
        )
    return (
        f"{text} (137 is SIGKILL: no out-of-memory kill was counted in this container or job: somebody sent it, or the "
        "machine itself ran out)"
    )


def _confirmed(run_dir: Path, attempt: str, log: Log) -> int:
    """Success is what this attempt wrote down, not what an earlier one left."""
    status = read_json(run_dir / "status.json") or {}
    if status.get("attempt") == attempt and status.get("state") == "finished":
        return FINISHED
    log.warning(f"all ranks ended with 0, but {run_dir}/status.json does not say that attempt {attempt} finished")
    return FAULT
