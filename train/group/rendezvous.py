"""Meeting: who is there, who is missing, and why, all within one deadline of our own.

torch's own text is the same for a wrong address, a closed port and a peer that never started, it waits up to five
times as long on one side, and a foreign service on the port makes its client wait without end. So every rank first
introduces itself to rank 0 in a store: rank 0 (`host`) keeps the roster, judges it, and says to all others (`guest`)
what it found. The keys, and why there are generations, are in `keys`. What a rank sends and reads does not depend on
how many ranks there are.
"""

import concurrent.futures
import threading
from collections.abc import Mapping

from rankup.env.rank_env import RankEnv
from train.group.guest import Guest
from train.group.host import Host
from train.group.joiner import Joiner
from train.group.members import Meeting
from train.group.network import allow_connections
from train.group.waiting import Wait
from train.process.log import Log

STUCK_S = 5.0  # so long after the deadline a call into the network, which nothing can interrupt, is given up
CONNECTIONS = 5  # of each rank: to the store, for the beats, to wait for losses and for stops, and to its neighbour


def meet(launch: RankEnv, *, fingerprint: Mapping[str, str], attempt: str, timeout_s: float, log: Log) -> Meeting:
    """Meet the other ranks, or say who and what is missing.

    `fingerprint`: what must be the same on all ranks, by name. Raises JoinError (code 170) once `timeout_s` has passed
    or rank 0 found the roster impossible, UserError where ranks differ in code or settings, LaunchError where the port
    can't be used. Works in a thread, since no call may hold us longer: a resolver without an answer, or a store whose
    process is stopped, blocks without end.
    """
    wait = Wait(launch, timeout_s=timeout_s, log=log)
    if launch.rank == 0:
        log.info(f"waiting for {launch.world_size} ranks at {wait.address}")
    allow_connections(CONNECTIONS * launch.world_size)
    joiner: Joiner = (Host if launch.rank == 0 else Guest)(wait, dict(fingerprint), attempt)
    outcome: concurrent.futures.Future[Meeting] = concurrent.futures.Future()

    def run() -> None:
        try:
            outcome.set_result(joiner.join())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name="join", daemon=True).start()
    if not concurrent.futures.wait([outcome], timeout=timeout_s + STUCK_S).done:
        raise wait.failure(wait.stuck_in)
    return outcome.result()
