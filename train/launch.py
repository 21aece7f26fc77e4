"""Several processes on this node, and on others beside it, through torch's own launcher API.

What torchrun does not do: keep the ranks' exit codes (it turns each into 1), leave a job alone that stopped on request,
and restart only what trying again can help.
"""

import os
import random
import signal
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from train.errors import FAULT, FINISHED, PEER_LOST, STOPPED
from train.log import Log
from train.status import new_attempt, read_json
from train.stop import StopRequest

POLL_S = 0.05
# How long the ranks that lost a peer may take to say whom they lost, before they are ended.
SETTLE_S = 10.0
# Outside the range that Linux hands out for outgoing connections, one of which might hold the port at the wrong moment.
FREE_PORTS = range(20000, 30000)


@dataclass(frozen=True, slots=True)
class Nodes:
    """Where this node stands: `nproc` processes on each of `num_nodes`."""

    nproc: int
    num_nodes: int
    node_rank: int
    master_addr: str
    master_port: int


def launch(
    arguments: list[str], nodes: Nodes, *, max_restarts: int, run_dir: Path, stop: StopRequest, log: Log
) -> int:
    """Start the ranks of this node with `arguments` for `train.main`, and return the code of the first that failed.

    Restarts them all where the code says that it may help (128 and above, but not 143: stopped on request), at most
    `max_restarts` times: each rank fails fast when a peer is lost, all join anew and resume.
    """
    for restart in range(max_restarts + 1):
        attempt = new_attempt()
        port = nodes.master_port or free_port()
        codes, first = _attempt(arguments, nodes, port, attempt, restart, stop, log)
        code = verdict(codes, first)
        if code == FINISHED and nodes.node_rank == 0:
            code = _confirmed(run_dir, attempt, log)
        if code < 128 or code == STOPPED or stop.asked:
            break
        if restart == max_restarts:
            log.warn(f"gave up after {max_restarts} restarts, code {code}")
            break
        log.say(f"{_ended(codes)}; starting again ({restart + 1} of {max_restarts})")
    return code


def _attempt(
    arguments: list[str], nodes: Nodes, port: int, attempt: str, restart: int, stop: StopRequest, log: Log
) -> tuple[dict[int, int], int | None]:
    """Start, supervise, end. Returns the exit code of each local rank, and the local rank that failed first."""
    # Later than the first line of output: it costs the launcher what importing torch costs a rank
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, start_processes

    main_file = str(Path(__file__).with_name("main.py"))
    local_ranks = range(nodes.nproc)
    stop.defer()  # it is passed on to the ranks from here on
    context = start_processes(
        name="rankup",
        entrypoint=sys.executable,
        args={i: (main_file, *arguments) for i in local_ranks},
        envs={i: _environment(nodes, i, port, attempt, restart) for i in local_ranks},
        logs_specs=DefaultLogsSpecs(),
    )
    stop.install_handlers()  # start_processes put its own in their place
    try:
        return _supervise(context, stop, log)
    finally:
        context.close(signal.SIGKILL, timeout=5)


def _environment(nodes: Nodes, local_rank: int, port: int, attempt: str, restart: int) -> dict[str, str]:
    return {
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


def _supervise(context: Any, stop: StopRequest, log: Log) -> tuple[dict[int, int], int | None]:
    processes = {rank: handler.proc for rank, handler in context.subprocess_handlers.items()}
    codes: dict[int, int] = {}
    first: int | None = None
    failed_s = 0.0
    forwarded = False
    while len(codes) < len(processes):
        for rank, process in processes.items():
            if rank not in codes and (code := process.poll()) is not None:
                codes[rank] = code if code >= 0 else 128 - code  # a signal's number as a shell counts it
                if codes[rank] != 0 and first is None:
                    first, failed_s = rank, time.monotonic()
        if stop.asked and not forwarded:
            forwarded = True
            log.say(f"{stop.signal_name}: passed on to {len(processes) - len(codes)} ranks, which save and leave")
            for rank, process in processes.items():
                if rank not in codes:
                    process.send_signal(getattr(signal, stop.signal_name))
        if first is not None and not stop.asked and time.monotonic() - failed_s > SETTLE_S:
            # A stopped process ends of SIGKILL alone
            for rank, process in processes.items():
                if rank not in codes:
                    log.warn(f"local rank {rank} did not end within {SETTLE_S:g} s after local rank {first}: killed")
                    process.kill()
        time.sleep(POLL_S)
    return codes, first


def verdict(codes: dict[int, int], first: int | None) -> int:
    """The code of the job: a mistake or a fault of any rank before all, since the others only lost that rank; else the
    code of the rank that failed first, if it is more than the loss of a peer; else that."""
    bad = [code for code in codes.values() if code != 0]
    if first is None or not bad:
        return FINISHED
    permanent = [code for code in bad if code < 128]
    causes = [code for code in bad if code not in (PEER_LOST, STOPPED)]
    if permanent:
        return max(permanent)
    return codes[first] if codes[first] in causes or not causes else causes[0]


def _ended(codes: dict[int, int]) -> str:
    return "ranks ended with " + ", ".join(f"{code} (local rank {rank})" for rank, code in sorted(codes.items()))


def _confirmed(run_dir: Path, attempt: str, log: Log) -> int:
    """Success is what this attempt wrote down, not what an earlier one left."""
    status = read_json(run_dir / "status.json") or {}
    if status.get("attempt") == attempt and status.get("state") == "finished":
        return FINISHED
    log.warn(f"all ranks ended with 0, but {run_dir}/status.json does not say that attempt {attempt} finished")
    return FAULT


def free_port() -> int:
    """A port of this machine that nobody listens on now."""
    for port in random.Random().sample(FREE_PORTS, 100):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise OSError("no free port from 20000 to 29999")
