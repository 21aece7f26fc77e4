"""A web server that knows range requests, as every object store is one; it can be made to fail."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


@dataclass
class Serving:
    """`url`: of the folder. `ranges`: what was asked for, (name, first byte, last byte). `failures`: how many of the
    next requests for a range get a 503."""

    folder: Path
    url: str = ""
    ranges: list[tuple[str, int, int]] = field(default_factory=list)
    failures: int = 0


@contextmanager
def serving(folder: Path) -> Iterator[Serving]:
    """Serve the files of a folder on the loopback until the block is left."""
    found = Serving(folder)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, found))
    server.daemon_threads = True
    found.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, found: Serving, *rest: object) -> None:
        self.found = found
        super().__init__(*rest)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        path = self.found.folder / self.path.lstrip("/")
        if not path.is_file():
            self._send(404, b"", {}, body=body)
            return
        data, asked = path.read_bytes(), self.headers.get("Range", "")
        headers = {"Accept-Ranges": "bytes", "ETag": f'"{path.stat().st_mtime_ns}"'}
        if not asked:
            self._send(200, data, headers, body=body)
            return
        first, _, last = asked.removeprefix("bytes=").partition("-")
        begin, end = int(first), min(int(last or len(data) - 1), len(data) - 1)
        self.found.ranges.append((path.name, begin, end))
        if self.found.failures > 0:
            self.found.failures -= 1
            self._send(503, b"", {}, body=body)
            return
        headers["Content-Range"] = f"bytes {begin}-{end}/{len(data)}"
        self._send(206, data[begin : end + 1], headers, body=body)

    def _send(self, code: int, data: bytes, headers: dict[str, str], *, body: bool) -> None:
        self.send_response(code)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, *arguments: object) -> None:
        """Not to the terminal."""
