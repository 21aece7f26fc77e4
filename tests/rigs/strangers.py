"""A port scanner: strangers who talk to every port on which the processes of a job listen, on loopback only.

They connect and say nothing, reset the connection, speak other protocols, send garbage, and begin to speak the
protocols of torch's store and of gloo."""

import contextlib
import ipaddress
import os
import pickle
import random
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import psutil

PAUSE_S = 0.02  # between two searches for ports
CONNECT_S = 0.5
MAX_HELD = 40  # open connections at most: a job has 1,024 descriptors, and its agent is on the same machine


class Evil:
    """Unpickling this object makes a folder, which proves that a stranger's data was executed."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.proof),)


def client_hello() -> bytes:
    """Return the first message of a TLS client: a record of version 3.1 that holds a hello with one cipher."""
    hello = b"\x03\x03" + bytes(range(32)) + b"\x00" + b"\x00\x02\x13\x01" + b"\x01\x00" + b"\x00\x00"
    handshake = b"\x01" + len(hello).to_bytes(3, "big") + hello
    return b"\x16\x03\x01" + len(handshake).to_bytes(2, "big") + handshake


def messages(proof: Path, dice: random.Random) -> dict[str, bytes]:
    """Return the strangers' messages, by name."""
    evil = [pickle.dumps(Evil(proof), protocol=protocol) for protocol in (0, 2, 4)]
    known = struct.pack("<BI", 0, 0x3C85F7CE)  # a client's first question to a store: its magic number
    key = struct.pack("<Q", 6) + b"strange"[:6]
    said = {
        "nothing": b"",
        "http": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        "tls": client_hello(),
        "ssh": b"SSH-2.0-OpenSSH_9.6\r\n",
        "zeros": bytes(4096),
        "json": b'{"rank": 0, "code": 0, "text": ""}\n' * 20,
        "store: unknown question": known + b"\xee" + dice.randbytes(40),
        "store: set": known + b"\x01" + key + struct.pack("<Q", 4) + b"evil",
        "store: set, cut short": known + b"\x01" + key + struct.pack("<Q", 4),
        "store: a key of 2^62 bytes": known + b"\x01" + struct.pack("<Q", 2**62) + b"x" * 100,
        "store: a value of 2^40 bytes": known + b"\x01" + key + struct.pack("<Q", 2**40) + b"x" * 100,
        "store: get, wait": known + b"\x03" + key + b"\x06" + struct.pack("<Q", 1) + key,
    }
    said |= {f"pickle {number}": data for number, data in enumerate(evil)}
    said |= {f"pickle {number}, its length": struct.pack("<Q", len(data)) + data for number, data in enumerate(evil)}
    said |= {f"random {size}": dice.randbytes(size) for size in (8, 64, 5000)}
    # A gloo connection begins with a number, which is small for gloo's own connections. Messages follow: number of
    # bytes, kind, slot, offset, length, remote offset
    for number in range(4):
        first = struct.pack("<q", number)
        said[f"gloo: connection {number}"] = first
        said[f"gloo: connection {number}, zeros"] = first + bytes(480)
        said[f"gloo: connection {number}, garbage"] = first + dice.randbytes(480)
        for kind in (0, 1, 2, 3, 77):
            message = struct.pack("<6Q", 48 + 64, kind, dice.randrange(4), 0, 64, 0) + dice.randbytes(64)
            said[f"gloo: connection {number}, message of kind {kind}"] = first + message
    return said


def listening(pids: list[int]) -> set[tuple[str, int]]:
    """Return the addresses and ports on which these processes and their children listen."""
    found = set()
    for pid in pids:
        with contextlib.suppress(psutil.Error, OSError):
            root = psutil.Process(pid)
            for process in (root, *root.children(recursive=True)):
                with contextlib.suppress(psutil.Error, OSError):
                    for each in process.net_connections("tcp"):
                        if each.status == psutil.CONN_LISTEN:
                            found.add((each.laddr.ip, each.laddr.port))
    return found


class Strangers:
    """A thread that scans until the block is left. `heard`: how many connections each port accepted. `open_to_all`: the
    addresses of listeners that other machines can reach."""

    def __init__(self, pids: Callable[[], list[int]], proof: Path, *, seed: int, only: str = "") -> None:
        """`only`: send only messages whose names begin with this."""
        self._dice = random.Random(seed)
        said = messages(proof, self._dice)
        self._said = {name: data for name, data in said.items() if name.startswith(only)}
        self._pids, self._held = pids, list[socket.socket]()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._scan, name="strangers", daemon=True)
        self.heard: Counter[int] = Counter()
        self.open_to_all: set[tuple[str, int]] = set()
        self.log: list[tuple[float, int, str]] = []  # (seconds, port, message)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(60)
        for each in self._held:
            each.close()

    def _scan(self) -> None:
        began_s = time.monotonic()
        turn = self._endless()
        while not self._over.wait(PAUSE_S):
            for ip, port in sorted(listening(self._pids())):
                name = next(turn)
                if not ipaddress.ip_address(ip).is_loopback:
                    self.open_to_all.add((ip, port))
                self.log.append((round(time.monotonic() - began_s, 2), port, name))
                # A listener on all addresses is reached by loopback. Any other address is this machine's own, too
                if self._talk("127.0.0.1" if ip in ("0.0.0.0", "::") else ip, port, self._said[name]):
                    self.heard[port] += 1

    def _endless(self) -> Iterator[str]:
        while True:
            yield from self._dice.sample([*self._said], len(self._said))

    def _talk(self, ip: str, port: int, message: bytes) -> bool:
        try:
            connection = socket.create_connection((ip, port), timeout=CONNECT_S)
        except OSError:
            return False
        how = self._dice.choice(("close", "reset", "half", "hold"))
        try:
            if how == "reset":
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.sendall(message)
            if how == "half":
                connection.shutdown(socket.SHUT_WR)
        except OSError:
            connection.close()
            return False
        if how in ("half", "hold") and len(self._held) < MAX_HELD:
            self._held.append(connection)
        else:
            connection.close()
        return True


# In the process of a rank, before it begins ---------------------------------------------------------------------


def form_slowly() -> None:
    """Delay the ranks of SLOW_RANKS before they join torch's group, as slow nodes would. Meanwhile the ports of the
    other ranks are open and wait for them."""
    import torch.distributed as dist

    real = dist.init_process_group

    def late(*given: Any, **more: Any) -> None:
        if os.environ["RANK"] in os.environ["SLOW_RANKS"].split(","):
            time.sleep(1.0)
        real(*given, **more)

    dist.init_process_group = late


def unpickle_nothing() -> None:
    """Make every unpickling an error. Names bound before still work: the queues of DataLoader's workers, and the reader
    of a sharded checkpoint's index, which allows only a few classes."""
    import torch
    from torch.distributed import distributed_c10d

    class Refusing(pickle.Unpickler):
        def load(self) -> Any:
            raise AssertionError("this would have been unpickled")

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("this would have been unpickled")

    data = pickle.dumps([1])
    pickle.load = pickle.loads = refuse
    pickle.Unpickler = Refusing  # type: ignore[misc]
    distributed_c10d._unpickler = Refusing
    with contextlib.suppress(AssertionError):
        distributed_c10d._tensor_to_object(torch.frombuffer(bytearray(data), dtype=torch.uint8), len(data), None)
        raise SystemExit("torch unpickles by another way: mend this rig")
