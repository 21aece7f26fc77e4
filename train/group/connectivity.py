"""The ways between ranks: which interface each of them uses, and whether they reach each other's ports.

All have reached the master's one port by now. gloo and nccl connect the ranks to each other over any high port, and where
a firewall or a wrong interface is between them, gloo gives up on one side and keeps the other waiting five times as
long as it was told. So the ranks try it first, and all of them say which of them could not reach which.
"""

import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from train.errors import FINISHED, JOIN_FAILED, USER_MISTAKE, JoinError, LaunchError, UserError
from train.group.members import Member
from train.group.network import (
    address_of,
    address_of_host_name,
    interface_of,
    interfaces,
    local_ip_towards,
    try_connect,
)
from train.group.rendezvous import Meeting
from train.process.addresses import is_loopback
from train.process.log import Log

POLL_S = 0.02
# A packet that a firewall drops is sent again after one and after three seconds.
TRY_S = 4.0
AT_LEAST_S, AT_MOST_S = 6.0, 15.0  # all were alive a moment ago, and the time to join may be all but used up
EACH_S = 0.1  # and for each rank: all of them ask one store
HEARD_S = 2.0  # how much longer the others wait for what rank 0 says
HINT = (
    "gloo and nccl use any high port between the nodes: open them all, or narrow net.ipv4.ip_local_port_range on every node "
    "and open that range; or name another interface in GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME."
)
PROBLEMS = {
    "refused": "was refused by",
    "silent": "got no answer from",
    "route": "has no route to",
}


def check_connectivity(meeting: Meeting, rank: int, *, log: Log) -> None:
    """Choose the interface, and try the way to the next rank: around the ring that crosses every border between nodes in
    both directions, with one connection a rank.

    Raises, on all ranks alike, JoinError naming who could not reach whom, or LaunchError where an interface is wrong.
    """
    members = meeting.members
    now_s = time.monotonic()
    until_s = min(max(meeting.deadline_s, now_s + AT_LEAST_S), now_s + AT_MOST_S + len(members) * EACH_S)
    waiting = _Waiting(meeting, until_s)
    listener, door = _open_door(members, rank, log)
    try:
        meeting.store.set(f"door/{rank}", json.dumps(door))
        report = {"code": door.get("code", FINISHED), "text": door.get("text", "")}
        peer = (rank + 1) % len(members)
        theirs = waiting.get(f"door/{peer}")
        if not report["code"] and theirs is not None and "ip" in theirs:
            report = _try_way(members[rank], members[peer], theirs)
        meeting.store.set(f"report/{rank}", json.dumps(report))
        if rank == 0:
            reports = {member.rank: waiting.get(f"report/{member.rank}") for member in members}
            meeting.store.set("ways", json.dumps(_judge(members, reports)))
        waiting.until_s += HEARD_S + len(members) * EACH_S / 10
        verdict = waiting.get("ways")
    finally:
        if listener is not None:
            listener.close()
    if verdict is None:
        raise JoinError(f"rank 0 on {members[0].place} fell silent just after all ranks had joined.")
    if verdict["code"]:
        kind = UserError if verdict["code"] == USER_MISTAKE else JoinError
        raise kind(verdict["text"], printed_elsewhere=not members[rank].prints_for_host(members))


class _Waiting:
    """Looks for a key until the deadline."""

    def __init__(self, meeting: Meeting, until_s: float) -> None:
        self.store, self.until_s = meeting.store, until_s
        self.poll_s = POLL_S * max(1.0, len(meeting.members) / 64)

    def get(self, key: str) -> dict[str, Any] | None:
        while not self.store.check([key]):
            if time.monotonic() > self.until_s:
                return None
            time.sleep(self.poll_s)
        told: dict[str, Any] = json.loads(self.store.get(key))
        return told


def _open_door(members: Sequence[Member], rank: int, log: Log) -> tuple[socket.socket | None, dict[str, Any]]:
    """Listen as gloo will: on the interface's own address, on a port that the system picks."""
    try:
        interface, ip = choose_interface(members, rank, log)
        listener = socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET, socket.SOCK_STREAM)
        listener.bind((ip, 0))
        listener.listen()
    except UserError as error:
        return None, {"code": error.code, "text": str(error)}
    except OSError as error:
        return None, {"code": JOIN_FAILED, "text": f"rank {rank} on {log.host} can't listen on {ip} ({error.strerror}). {HINT}"}
    return listener, {"ip": ip, "port": listener.getsockname()[1], "interface": interface}


def _try_way(me: Member, peer: Member, door: Mapping[str, Any]) -> dict[str, Any]:
    tried = try_connect(door["ip"], door["port"], timeout_s=TRY_S)
    if tried.problem is None:
        return {"code": FINISHED, "text": ""}
    what = PROBLEMS.get(tried.problem, f"failed ({tried.detail}) to connect to")
    text = (
        f"rank {me.rank} on {me.host} {what} rank {peer.rank} on {peer.host} at {door['ip']}:{door['port']} "
        f"(interface {door['interface'] or 'of its host name'} there)"
    )
    return {"code": JOIN_FAILED, "text": text}


def _judge(members: Sequence[Member], reports: Mapping[int, Mapping[str, Any] | None]) -> dict[str, Any]:
    """Rank 0's conclusion: a mistake before a way that is closed, before a rank that told nothing."""
    mistakes = [r["text"] for r in reports.values() if r and r["code"] == USER_MISTAKE]
    closed = [r["text"] for r in reports.values() if r and r["code"] == JOIN_FAILED]
    silent = [f"rank {rank} on {members[rank].place}" for rank, report in reports.items() if report is None]
    if mistakes:
        return {"code": USER_MISTAKE, "text": "\n".join(dict.fromkeys(mistakes))}
    if closed:
        told = "; ".join(closed[:4]) + (f"; and {len(closed) - 4} more" if len(closed) > 4 else "")
        return {"code": JOIN_FAILED, "text": f"all ranks reached the master, but not each other: {told}. {HINT}"}
    if silent:
        return {"code": JOIN_FAILED, "text": f"{', '.join(silent[:8])} fell silent just after all ranks had joined."}
    return {"code": FINISHED, "text": ""}


def choose_interface(members: Sequence[Member], rank: int, log: Log) -> tuple[str, str]:
    """Have gloo, nccl and tensorpipe use the interface that routes to the others, unless the user named one.

    gloo takes the address that the host's own name resolves to: 127.0.1.1 on a Debian machine, which breaks one side
    and keeps the other waiting five times as long as it was told. Returns the interface ("" if it goes by the host
    name) and the address gloo will take. Raises LaunchError where the user's choice has no address here.
    """
    named = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if named and not address_of(named):
        problem = "that has an address" if named in interfaces() else "that exists"
        raise LaunchError(
            f"GLOO_SOCKET_IFNAME must name an interface {problem} on {log.host}, got {named}. There are: "
            f"{', '.join(name for name in interfaces() if address_of(name))}. Unset, the one that routes to the master is taken."
        )
    own = _own_address(members, rank)
    routed = interface_of(own) or ""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        if routed and not os.environ.get(name):
            os.environ[name] = routed
    chosen = named or routed
    address = address_of(chosen) if chosen else address_of_host_name()
    log.debug(f"interface {chosen or '(by host name)'}, address {address}; the way to the master starts at {own}")
    return chosen, address


def _own_address(members: Sequence[Member], rank: int) -> str:
    """This rank's address as the others see it."""
    own = members[rank].local_ip
    if own and not is_loopback(own):
        return own
    # A rank beside the master's store sees a loopback address: take the one others reached it at, or route to one of them
    others = [member for member in members if member.rank != rank]
    reached = [m.master_ip for m in others if m.master_ip and not is_loopback(m.master_ip) and interface_of(m.master_ip)]
    far = [m.local_ip for m in others if m.local_ip and not is_loopback(m.local_ip)]
    return reached[0] if reached else (local_ip_towards(far[0]) if far else "127.0.0.1")
