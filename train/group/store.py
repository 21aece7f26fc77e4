"""torch's store, which serves the set-up of the process group."""

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

# torch exports it under a condition that mypy does not follow
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from rankup.agent.network import open_port
from train.group.network import no_name_lookups


@contextlib.contextmanager
def start_store(ip: str, *, timeout_s: float) -> Iterator[TCPStore]:
    """On a port that the system picks; `ip`: "" for all addresses. It goes on when the block ends, which must not be
    before all clients have come: until then this process looks up no names. `timeout_s`: of its own requests."""
    listener = open_port(ip, 0)
    port = listener.getsockname()[1]
    with no_name_lookups():
        yield _store("127.0.0.1", port, timeout_s, is_master=True, master_listen_fd=listener.detach())


def connect_store(ip: str, port: int, *, timeout_s: float) -> TCPStore:
    """Raises RuntimeError where what answers is no store. Waits without end for what accepts and never answers."""
    with no_name_lookups():
        return _store(ip, port, timeout_s)


def _store(ip: str, port: int, timeout_s: float, **more: Any) -> TCPStore:
    use_libuv = os.environ.get("USE_LIBUV", "1") == "1"  # torch's own variable, for builds without it
    timeout = timedelta(seconds=timeout_s)
    return TCPStore(ip, port, timeout=timeout, wait_for_workers=False, use_libuv=use_libuv, **more)
