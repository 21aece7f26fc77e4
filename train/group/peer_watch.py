"""Notices at once that another rank's process has ended: the kernel closes the connections of a process as it ends.

The ranks form a ring: each holds one connection open, to the next rank, and reports that rank in the store when the
connection ends. One process in a group of any size notices, and the store tells the others, so that the cost for each
rank stays one connection. Before this, survivors compared beats for seconds, and NCCL does not notice at all.

The listening side never accepts: the kernel completes the connections in the listener's queue by itself and resets
them when this process ends. So no byte is read from whoever connects, and a stranger can do no more than fill the queue
before the right rank is in it, which fails the attempt and does nothing worse.

What it does not notice: a process that is stopped (SIGSTOP) and a machine that loses its power keep their connections.
The beats of `watchdog` find them.
"""

import contextlib
import json
import os
import socket
import threading
import time
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]

from rankup.errors import PEER_LOST
from train.group import keys
from train.process.log import Log
from train.process.status import GONE, End

CONNECT_S = 4.0  # a packet that a firewall drops is sent again after one and after three seconds
# The kernel answers for a process at once, however busy the machine is. Where a container was killed nothing answers.
CHECK_S = 0.3
# A connection that held for longer and then ends may have been cut by a firewall that ends idle ones: the process is
# alive if it can be reached again.
YOUNG_S = 1.0
KEEP_ALIVE_S = 60  # such firewalls wait for minutes at least
ENDED = "its process has ended"


class PeerWatch:
    """This rank's part of the ring: the connection to the next rank, and the listener for the previous one."""

    def __init__(self, store: Store, rank: int, world_size: int, *, log: Log) -> None:
        """`store` may be used by other threads too, but none of them may hold it for long."""
        self.store, self.rank, self.world_size, self.log = store, rank, world_size, log
        self._sockets: list[socket.socket] = []  # kept until the end of this process
        # DataLoader workers are forked, and a connection ends only when its last holder has closed it
        os.register_at_fork(after_in_child=self._close)

    def be_watched(self, listener: socket.socket) -> None:
        """Keep `listener`, whose address is at `keys.listener(rank)`, for the previous rank to watch."""
        self._sockets.append(listener)

    def start(self) -> None:
        """Watch the next rank, whose `keys.listener` is set, in a thread."""
        threading.Thread(target=self._watch, name="peer-watch", daemon=True).start()

    def _close(self) -> None:
        for sock in self._sockets:
            sock.close()

    def _address(self, rank: int) -> dict[str, Any]:
        address: dict[str, Any] = json.loads(self.store.get(keys.listener(rank)))
        return address

    def _connect(self, rank: int, timeout_s: float) -> socket.socket:
        address = self._address(rank)
        connection = socket.create_connection((address["ip"], address["port"]), timeout_s)
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_KEEPIDLE"):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEP_ALIVE_S)
        self._sockets.append(connection)
        return connection

    def _watch(self) -> None:
        rank = self.rank
        try:
            # Beyond a rank that is gone: the ranks after it may be gone too, and nobody else watches them then
            while (rank := (rank + 1) % self.world_size) != self.rank and self.store.check([keys.listener(rank)]):
                self._wait_for_end(rank)
                report_gone(self.store, rank, self._address(rank)["host"], ENDED)
        except (OSError, LookupError) as error:
            # The route to it is lost, which may pass, and the beats say whether it is alive. Or it could not listen
            self.log.debug(f"no longer watching rank {rank}: {type(error).__name__}: {error}")
        except RuntimeError:
            pass  # torch's own error: rank 0 took the store with it, and everybody notices that

    def _wait_for_end(self, rank: int) -> None:
        """Return once that rank's process has ended. Raises OSError where the connection does not say that any more."""
        try:
            connection = self._connect(rank, CONNECT_S)
        except ConnectionRefusedError:  # it was reached a moment ago
            return
        while True:
            since_s = time.monotonic()
            with contextlib.suppress(ConnectionResetError):
                while connection.recv(4096):
                    pass  # our ranks send nothing
            try:
                connection = self._connect(rank, CHECK_S)
            except OSError:
                return
            if time.monotonic() - since_s < YOUNG_S:
                return  # something between the ranks answers for it, and cuts the connection again at once


def report_gone(store: Store, rank: int, host: str, why: str) -> None:
    """Report the end of a rank whose process can't do that any more, and wake the others; nothing where it has
    reported its end itself. Raises RuntimeError where the store is gone too."""
    end = End(rank, host, GONE, PEER_LOST, why, 0).to_json()
    # One operation of the store: the last word of that rank may be on its way still
    if store.compare_set(keys.end(rank), "", end).decode() == end:
        store.append(keys.CAUSES, f"{rank}\n")  # type: ignore[attr-defined]
        store.add(keys.DECIDED, 1)
        store.compare_set(keys.FAILED, "", end)
