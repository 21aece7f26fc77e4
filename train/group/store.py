"""The store in which the ranks meet: rank 0 serves it on the master's port, the others are its clients."""

import errno
import os
import socket
import time
from datetime import timedelta

# torch exports it under a condition that mypy does not follow
from torch.distributed import DistStoreError, Store, TCPStore  # type: ignore[attr-defined]

from rankup.errors import JoinError, LaunchError
from train.group.network import (
    Connection,
    explain_connection,
    is_own_address,
    no_name_lookups,
    port_holder,
    try_connect,
)
from train.group.waiting import Wait

PORT_PATIENCE_S = 5.0  # the process of the last attempt may still be on its way out
# torch tries a connection that was refused again only after half a second and more. The store was there a moment ago:
# if it has gone meanwhile, its successor may come much sooner, and we look for that ourselves.
CONNECT_S = 5.0


def serve(wait: Wait) -> TCPStore:
    """Open the master's port and start the store. Raises JoinError, naming who holds the port, or LaunchError."""
    host, port = wait.launch.master_addr, wait.launch.master_port
    until_s = min(wait.deadline_s, time.monotonic() + PORT_PATIENCE_S)
    # With all ranks on this machine, nobody else needs to reach the store, which believes whoever does
    launch = wait.launch
    alone = host == "127.0.0.1" and launch.local_world_size == launch.world_size
    while (listener := open_port(port, host if alone else "")) is None:
        if time.monotonic() > until_s:
            raise port_in_use(port, wait.log.host)
        wait.pause()
    wait.stuck_in = f'the name "{host}" gets no answer from the resolver'
    if not is_own_address(host):
        wait.log.warning(
            f"MASTER_ADDR={host} is no address of this machine ({wait.log.host}), where rank 0 runs and listens. Right "
            "behind a Service or NAT, a mistake elsewhere."
        )
    return serve_store(listener, wait)


def connect(wait: Wait) -> tuple[TCPStore, Connection]:
    """A client of the master's store, and the route there. Raises JoinError.

    Name, port and store may all come up after us (a Service in Kubernetes, a container that is started later): each is
    tried again until the deadline, and the message names the last problem.
    """
    host, port = wait.launch.master_addr, wait.launch.master_port
    refused = ""
    while True:
        wait.stuck_in, wait.stage = f'the name "{host}" gets no answer from the resolver', ""
        tried = try_connect(host, port, timeout_s=2.0)
        if tried.problem is None:
            wait.stage = "store"
            wait.stuck_in = wait.problem = (
                f"something accepts connections at {wait.address} but does not answer as a rendezvous store: another "
                "service holds the port, the machine is the wrong one, or the process of rank 0 is stopped"
            )
            try:
                # By the address: the name need not be looked up again
                client = connect_store(tried.master_ip, port, timeout_s=min(CONNECT_S, wait.left_s))
                client.set_timeout(timedelta(seconds=wait.left_s))
                wait.stage = ""
                return client, tried
            except RuntimeError:
                pass  # the problem is said already
        else:
            now = explain_connection(tried, host, port)
            # When rank 0 gives up, its container goes, and with it the name or the address: the refusal was the cause
            refused = now if tried.problem == "refused" else refused
            wait.problem = f"{refused}. By now {now}" if refused and refused != now else now
        if wait.over:
            raise wait.failure(wait.problem)
        wait.pause()


def open_port(port: int, ip: str = "") -> socket.socket | None:
    """Listen on `ip`, an IPv4 address, or on all addresses; None while another process has the port.

    Raises LaunchError where nobody may have it.
    """
    dual = not ip and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    try:
        # It sets SO_REUSEADDR: an earlier attempt that closed its connections first leaves the port in TIME_WAIT for a
        # minute. The backlog is for a large job, whose ranks all come at once
        return socket.create_server((ip, port), family=family, backlog=4096, dualstack_ipv6=dual)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return None
        why = os.strerror(error.errno or 0)
        raise LaunchError(f"MASTER_PORT={port} can't be opened: {why}. Choose one from 1024 to 32767.") from None


def port_in_use(port: int, host: str) -> JoinError:
    """The error that says who has the port, where the system tells us."""
    holder = port_holder(port)
    return JoinError(
        f"MASTER_PORT={port} is in use on {host}{f' by {holder}' if holder else ''}: another job, one that has not "
        "ended, or a second process with RANK=0. End it, or set another MASTER_PORT on all ranks.",
        stage="port",
    )


def serve_store(listener: socket.socket, wait: Wait) -> TCPStore:
    """A store on a port that is open already: torch opens one itself, but its message does not say who holds it."""
    # Some ranks may be waiting for the server already, whose thread looks up a name for each of them
    wait.no_lookups.enter_context(no_name_lookups())
    return start_store(listener, timeout_s=wait.timeout_s)


def start_store(listener: socket.socket, *, timeout_s: float) -> TCPStore:
    """The store itself, which takes the socket over. `timeout_s`: of its own requests."""
    port = listener.getsockname()[1]
    return TCPStore(
        "127.0.0.1", port, None, True, timedelta(seconds=timeout_s), wait_for_workers=False,
        master_listen_fd=listener.detach(), use_libuv=_use_libuv(),
    )


def connect_store(ip: str, port: int, *, timeout_s: float) -> TCPStore:
    """Raises RuntimeError where what answers is no store. Waits without end for what accepts and never answers."""
    left = timedelta(seconds=timeout_s)
    with no_name_lookups():
        return TCPStore(ip, port, None, False, left, wait_for_workers=False, use_libuv=_use_libuv())


def second_connection(client: Store) -> Store:
    """Another client of the same store. One connection serves one thread at a time, and a waiting thread holds it."""
    with no_name_lookups():
        return client.clone()


def wait_for(store: Store, names: list[str], timeout_s: float) -> bool:
    """Wait until somebody has set all those keys; False where that took longer than `timeout_s`.

    Holds this connection meanwhile, for other threads too. Raises RuntimeError where the store's process ends.
    """
    try:
        store.wait(names, timedelta(seconds=timeout_s))
    except DistStoreError:
        return False
    return True


def _use_libuv() -> bool:
    """torch's own variable, for builds without it."""
    return os.environ.get("USE_LIBUV", "1") == "1"
