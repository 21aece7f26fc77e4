"""What a plain TCP connection carries, without torch: what `train.main bench` is held against.

    python tests/bench/wire.py serve PORT                     # on one machine
    python tests/bench/wire.py call HOST PORT SIZE COUNT      # on the other; prints JSON: seconds one way, bytes/s

A message of SIZE bytes goes there and comes back, COUNT times; the median half round trip counts, as bench's point to point.
"""

import json
import socket
import statistics
import sys
import time


def serve(port: int) -> None:
    """Send back what comes, for one caller."""
    with socket.create_server(("", port)) as listener:
        print("ready", flush=True)
        connection, _ = listener.accept()
        with connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            size = int.from_bytes(_receive(connection, 8), "big")
            while message := _receive(connection, size):
                connection.sendall(message)


def call(host: str, port: int, size: int, count: int) -> dict[str, float]:
    """Median seconds of one way, and bytes a second."""
    message, times = bytes(size), []
    with socket.create_connection((host, port), timeout=120) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(size.to_bytes(8, "big"))
        for _ in range(count + 1):  # the first one opens the window
            began_s = time.perf_counter()
            connection.sendall(message)
            assert len(_receive(connection, size)) == size
            times.append((time.perf_counter() - began_s) / 2)
    median_s = statistics.median(times[1:])
    return {"median_s": median_s, "algorithm": size / median_s}


def _receive(connection: socket.socket, size: int) -> bytes:
    """So many bytes, or none: the other side is gone."""
    parts, left = [], size
    while left and (part := connection.recv(min(left, 1 << 20))):
        parts.append(part)
        left -= len(part)
    return b"" if left else b"".join(parts)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(int(sys.argv[2]))
    else:
        print(json.dumps(call(sys.argv[2], *map(int, sys.argv[3:6]))))
