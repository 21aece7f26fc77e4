"""Moving the ranks' store off the master's port, which a script that the ranks start needs for a store of its own.

The ranks have met in a store on that port, which has shown that the address and the port are right. They go on watching
each other while the script runs, so they need a store as long as it runs: the second one, on a port that the system
picks. Rank 0 ends the first store only when all ranks have left it, and no rank starts its script before that: the
script's rank 1 would otherwise find our store in place of its own rank 0's.

Under torchrun nobody moves: the agent keeps its store, and the script uses that one too, at its first start.
"""

import json
import time
from datetime import timedelta

from torch.distributed import Store  # type: ignore[attr-defined]

from rankup.env.rank_env import RankEnv, ranges
from rankup.errors import JoinError, LaunchError, UserError
from train.group import keys
from train.group.connectivity import HINT, choose_interface
from train.group.members import Meeting, Members
from train.group.store import connect_store, open_port, second_connection, start_store, wait_for
from train.process.log import Log

MOVE_S = 10.0  # all ranks were alive a moment ago, and nothing is looked up: it takes milliseconds
EACH_S = 0.05  # more for each rank, since all of them connect to one process
LATER_S = 3.0  # how much longer the others wait for rank 0's word than it waits for them
PORT_PATIENCE_S = 5.0  # how long the end of a store may take to show


def leave_port(meeting: Meeting, launch: RankEnv, *, log: Log) -> None:
    """Put a store on another port into `meeting`, and return once the master's port is free. All ranks call this.

    Raises JoinError, on all ranks, where a rank does not reach the new port.
    """
    timeout_s = max(MOVE_S + launch.world_size * EACH_S, meeting.deadline_s - time.monotonic())
    (_host if launch.rank == 0 else _guest)(meeting, launch, timeout_s, log)


def _host(meeting: Meeting, launch: RankEnv, timeout_s: float, log: Log) -> None:
    try:
        ip = choose_interface(meeting.members[0], meeting.paths, log)[1]
    except UserError as error:
        meeting.store.set(keys.MOVED, json.dumps({"problem": str(error)}))
        time.sleep(LATER_S)  # the others read it in this process
        raise
    # With all ranks on this machine, nobody else needs to reach the store, which believes whoever does
    listener = open_port(0, ip if ip == "127.0.0.1" else "")
    assert listener is not None, "the system has picked the port"
    port = listener.getsockname()[1]
    new = start_store(listener, timeout_s=timeout_s)
    new.multi_set(  # type: ignore[attr-defined]
        [keys.member(member.rank) for member in meeting.members], [member.to_json() for member in meeting.members]
    )
    meeting.store.set(keys.MOVED, json.dumps({"ip": ip, "port": port}))
    others = range(1, launch.world_size)
    problem = ""
    if not wait_for(new, [keys.arrived(rank) for rank in others], timeout_s):
        late = [rank for rank in others if not new.check([keys.arrived(rank)])]
        hosts = ", ".join(sorted({meeting.members[rank].host for rank in late})[:8])
        problem = (
            f"rank{'s' if len(late) > 1 else ''} {ranges(late)} (on {hosts}) reached MASTER_PORT={launch.master_port} "
            f"on {log.host}, but not {ip}:{port} there. {HINT}"
        )
    _use(meeting, new)  # the first store ends here: nobody refers to it any more
    until_s = time.monotonic() + PORT_PATIENCE_S
    while not problem and not _is_free(launch.master_port):
        if time.monotonic() > until_s:
            problem = f"MASTER_PORT={launch.master_port} on {log.host} was taken by another process meanwhile."
        time.sleep(0.01)
    new.set(keys.FREE, problem)
    if problem:
        time.sleep(LATER_S)  # the others read it in this process
        raise JoinError(problem)


def _guest(meeting: Meeting, launch: RankEnv, timeout_s: float, log: Log) -> None:
    meeting.store.set_timeout(timedelta(seconds=timeout_s))
    place = json.loads(meeting.store.get(keys.MOVED))
    if "problem" in place:
        raise UserError(place["problem"], printed_elsewhere=True)
    where = f"{place['ip']}:{place['port']}"
    try:
        new = connect_store(place["ip"], place["port"], timeout_s=timeout_s)
        new.set_timeout(timedelta(seconds=timeout_s))
    except RuntimeError as error:
        log.debug(f"{type(error).__name__}: {error}")
        raise JoinError(
            f"rank {launch.rank} on {log.host} reached rank 0 at {launch.master_addr}:{launch.master_port}, but not at "
            f"{where}. {HINT}"
        ) from None
    _use(meeting, new)
    meeting.members = Members(meeting.beat_store, launch.world_size, myself=launch.rank)
    new.set(keys.arrived(launch.rank), "")
    if not wait_for(new, [keys.FREE], timeout_s + LATER_S):
        raise JoinError(f"rank 0 on {meeting.members[0].place} fell silent just after all ranks had joined.")
    if problem := new.get(keys.FREE).decode():
        raise JoinError(problem, printed_elsewhere=not meeting.prints_for_host)


def _use(meeting: Meeting, new: Store) -> None:
    """From here on `meeting` refers to `new` alone. A store, and a connection to one, ends with the last reference."""
    meeting.store, meeting.beat_store = new, second_connection(new)


def _is_free(port: int) -> bool:
    """Whether a script could listen on this port now."""
    try:
        listener = open_port(port)
    except LaunchError:
        return False
    if listener is None:
        return False
    listener.close()
    return True
