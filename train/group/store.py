"""The store in which the ranks meet: rank 0 serves it on the master's port, the others are its clients."""

import errno
import os
import socket
from datetime import timedelta

# torch exports it under a condition that mypy does not follow
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from train.errors import JoinError, LaunchError
from train.group.network import port_holder


def open_port(port: int) -> socket.socket | None:
    """Listen on all addresses, or None while another process has the port. Raises LaunchError where nobody may open it."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if family == socket.AF_INET6:
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    try:
        listener.bind(("", port))
        listener.listen(4096)
        return listener
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            return None
        raise LaunchError(f"MASTER_PORT={port} can't be opened: {error.strerror}. Choose one from 1024 to 32767.") from None


def port_in_use(port: int, host: str) -> JoinError:
    """The error that says who has the port, where the system tells us."""
    holder = port_holder(port)
    return JoinError(
        f"MASTER_PORT={port} is in use on {host}{f' by {holder}' if holder else ''}: another job, one that has not ended, or "
        "a second process with RANK=0. End it, or set another MASTER_PORT on all ranks.",
        stage="port",
    )


def serve_store(listener: socket.socket, *, timeout_s: float) -> TCPStore:
    port = listener.getsockname()[1]
    return TCPStore(
        "127.0.0.1", port, None, True, timedelta(seconds=timeout_s), wait_for_workers=False,
        master_listen_fd=listener.detach(), use_libuv=_use_libuv(),
    )


def connect_store(host: str, port: int, *, timeout_s: float) -> TCPStore:
    """Raises RuntimeError where what answers is no store. Waits without end for what accepts and never answers."""
    left = timedelta(seconds=timeout_s)
    return TCPStore(host, port, None, False, left, wait_for_workers=False, use_libuv=_use_libuv())


def _use_libuv() -> bool:
    """torch's own variable, for builds without it (Windows)."""
    return os.environ.get("USE_LIBUV", "1") == "1"
