"""Connectivity: which interface each rank uses, and whether the ranks reach each other's ports.

All have reached the master's one port by now. gloo and nccl connect the ranks to each other over any high port. Where
a firewall or a wrong interface is between them, gloo gives up on one side and keeps the other waiting five times as
long as its timeout says. So the ranks try it first, and all of them say which of them could not reach which.
"""

import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]

from rankup.env.addresses import is_loopback
from rankup.errors import FINISHED, JOIN_FAILED, USER_MISTAKE, JoinError, LaunchError, UserError
from train.group import keys, network
from train.group.members import Meeting, Member, Paths
from train.group.peer_watch import PeerWatch
from train.group.store import wait_for
from train.process.log import Log

# A packet that a firewall drops is sent again after one and after three seconds.
TRY_S = 4.0
AT_LEAST_S, AT_MOST_S = 6.0, 15.0  # all were alive a moment ago, and the time to join may be all but used up
EACH_S = 0.1  # more for each rank, since all of them ask one store
VERDICT_S = 2.0  # how much longer the others wait for rank 0's conclusion
HINT = (
    "gloo and nccl use any high port between the nodes: open them all, or narrow net.ipv4.ip_local_port_range on every "
    "node and open that range; or name another interface in GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME."
)
PROBLEMS = {"refused": "was refused by", "silent": "got no answer from", "route": "has no route to"}


def check_connectivity(meeting: Meeting, rank: int, *, peer_watch: PeerWatch, log: Log) -> None:
    """Choose the interface, try the route to the next rank, and begin to watch that rank over it.

    The ring 0 -> 1 -> ... -> 0 crosses every border between nodes in both directions, at the price of one connection a
    rank. Raises, on all ranks alike, JoinError naming the ranks that do not reach each other, or UserError where an
    interface is wrong.
    """
    members, store = meeting.members, meeting.store
    now_s = time.monotonic()
    until_s = min(max(meeting.deadline_s, now_s + AT_LEAST_S), now_s + AT_MOST_S + len(members) * EACH_S)
    listener, address = _listen(members[rank], meeting.paths, log)
    if listener is not None:
        peer_watch.be_watched(listener)
    store.set(keys.listener(rank), json.dumps(address))
    report = {"code": address.get("code", FINISHED), "text": address.get("text", "")}
    peer = (rank + 1) % len(members)
    theirs = _read(store, keys.listener(peer), until_s)
    if not report["code"] and theirs is not None and "ip" in theirs:
        report = _try_route(members[rank], members[peer], theirs, peer_watch)
    store.set(keys.report(rank), json.dumps(report))
    if rank == 0:
        reports = _read_all(store, [keys.report(each) for each in range(len(members))], until_s)
        store.set(keys.ROUTES, json.dumps(_judge(members, reports)))
    verdict = _read(store, keys.ROUTES, until_s + VERDICT_S + len(members) * EACH_S / 10)
    if verdict is None:
        raise JoinError(f"rank 0 on {members[0].place} fell silent just after all ranks had joined.")
    if verdict["code"]:
        kind = UserError if verdict["code"] == USER_MISTAKE else JoinError
        raise kind(verdict["text"], printed_elsewhere=not meeting.prints_for_host)


def _read(store: Store, key: str, until_s: float) -> dict[str, Any] | None:
    """The JSON at `key` once somebody has set it, or None at the deadline."""
    return _read_all(store, [key], until_s)[0]


def _read_all(store: Store, names: list[str], until_s: float) -> list[dict[str, Any] | None]:
    """The JSON at each of those keys once all are set; at the deadline None for each that is not."""
    if wait_for(store, names, max(0.001, until_s - time.monotonic())):
        return [json.loads(text) for text in store.multi_get(names)]  # one request for all of them
    return [json.loads(store.get(name)) if store.check([name]) else None for name in names]


def _listen(me: Member, paths: Paths, log: Log) -> tuple[socket.socket | None, dict[str, Any]]:
    """Listen as gloo will: on the interface's own address, on a port the system picks. Also returns what to publish."""
    try:
        interface, ip = choose_interface(me, paths, log)
        listener = socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET, socket.SOCK_STREAM)
        listener.bind((ip, 0))
        listener.listen()
    except UserError as error:
        return None, {"code": error.code, "text": str(error)}
    except OSError as error:
        text = f"rank {me.rank} on {log.host} can't listen on {ip} ({error.strerror}). {HINT}"
        return None, {"code": JOIN_FAILED, "text": text}
    return listener, {"ip": ip, "port": listener.getsockname()[1], "interface": interface, "host": log.host}


def _try_route(me: Member, peer: Member, address: Mapping[str, Any], peer_watch: PeerWatch) -> dict[str, Any]:
    tried = network.try_connect(address["ip"], address["port"], timeout_s=TRY_S)
    if tried.problem is None:
        peer_watch.start()
        return {"code": FINISHED, "text": ""}
    what = PROBLEMS.get(tried.problem, f"failed ({tried.detail}) to connect to")
    text = (
        f"rank {me.rank} on {me.host} {what} rank {peer.rank} on {peer.host} at {address['ip']}:{address['port']} "
        f"(interface {address['interface'] or 'of its host name'} there)"
    )
    return {"code": JOIN_FAILED, "text": text}


def _judge(members: Sequence[Member], reports: Sequence[Mapping[str, Any] | None]) -> dict[str, Any]:
    """Rank 0's conclusion: a mistake counts before a closed route, and that before a rank that reported nothing."""
    mistakes = [r["text"] for r in reports if r and r["code"] == USER_MISTAKE]
    closed = [r["text"] for r in reports if r and r["code"] == JOIN_FAILED]
    silent = [f"rank {rank} on {members[rank].place}" for rank, report in enumerate(reports) if report is None]
    if mistakes:
        return {"code": USER_MISTAKE, "text": "\n".join(dict.fromkeys(mistakes))}
    if closed:
        first = "; ".join(closed[:4]) + (f"; and {len(closed) - 4} more" if len(closed) > 4 else "")
        return {"code": JOIN_FAILED, "text": f"all ranks reached the master, but not each other: {first}. {HINT}"}
    if silent:
        return {"code": JOIN_FAILED, "text": f"{', '.join(silent[:8])} fell silent just after all ranks had joined."}
    return {"code": FINISHED, "text": ""}


def choose_interface(me: Member, paths: Paths, log: Log) -> tuple[str, str]:
    """Have gloo, nccl and tensorpipe use the interface that routes to the others, unless the user named one.

    By default gloo takes the address that the host's own name resolves to: 127.0.1.1 on a Debian machine, where no
    other node can reach it. Returns the interface ("" if gloo goes by the host name) and the address gloo will take.
    Raises LaunchError where the user's choice has no address here.
    """
    named = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if named and not network.address_of(named):
        usable = ", ".join(name for name in network.interfaces() if network.address_of(name))
        problem = "that has an address" if named in network.interfaces() else "that exists"
        raise LaunchError(
            f"GLOO_SOCKET_IFNAME must name an interface {problem} on {log.host}, got {named}. There are: {usable}. "
            "Unset, the one that routes to the master is taken."
        )
    own = _own_address(me, paths)
    routed = network.interface_of(own) or ""
    # To nccl a bare eth1 means every interface whose name begins so, eth10 too
    for name, value in (
        ("GLOO_SOCKET_IFNAME", routed), ("NCCL_SOCKET_IFNAME", f"={routed}"), ("TP_SOCKET_IFNAME", routed),
    ):
        if routed and not os.environ.get(name):
            os.environ[name] = value
    chosen = named or routed
    address = network.address_of(chosen) if chosen else network.address_of_host_name()
    log.debug(f"interface {chosen or '(by host name)'}, address {address}; the route to the master starts at {own}")
    return chosen, address


def _own_address(me: Member, paths: Paths) -> str:
    """This rank's address as the others see it."""
    if me.local_ip and not is_loopback(me.local_ip):
        return me.local_ip
    # A rank beside the master's store sees a loopback address: take the one others reached, or the one towards them
    for ip in paths.master_ips:
        # Behind a Service the address that answered is the Service's, and no interface of this machine has it
        if network.interface_of(ip):
            return ip
    return network.local_ip_towards(paths.far_ip) if paths.far_ip else "127.0.0.1"
