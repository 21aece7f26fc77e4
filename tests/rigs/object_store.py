"""A real S3 server in a process of its own, and before it a door that makes it slow, deaf, full, forgetful or rude."""

import contextlib
import http.client
import http.server
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.rigs.jobs import free_port

BUCKET = "bucket"
ERROR = '<?xml version="1.0"?><Error><Code>{}</Code><Message>as the test wants it</Message></Error>'
# What a rule may answer instead of the server: the store's own codes
CODES = {403: "AccessDenied", 503: "SlowDown", 507: "InsufficientStorage", 500: "InternalError"}
HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "expect", "host"}


@dataclass(frozen=True)
class Request:
    """One request: its method, the object's name without the bucket, the query, and how many bytes its body has."""

    method: str
    name: str
    query: str
    size: int


class Door(http.server.ThreadingHTTPServer):
    """Passes requests on to the server. `rule` is asked before each, and may sleep, or return what to answer instead.

    A status of 200 is a lie: the request is not passed on. `seen`: what came.
    """

    daemon_threads = True

    def __init__(self, target_port: int, address: str, listener: socket.socket | None) -> None:
        self.target_port, self.address = target_port, address
        self.rule: Callable[[Request], int | None] = lambda request: None
        self.seen: list[Request] = []
        if listener is None:
            super().__init__((address, free_port()), _Handler)
        else:
            super().__init__(listener.getsockname(), _Handler, bind_and_activate=False)
            self.socket.close()
            self.socket = listener
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    @property
    def env(self) -> dict[str, str]:
        """The environment in which s3://bucket is behind this door."""
        return _env(self.server_address[1], self.address)

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that was killed is no error here."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Door

    def handle_one_request(self) -> None:
        self.raw_requestline = self.rfile.readline(65537)
        if not self.raw_requestline or not self.parse_request():
            self.close_connection = True
            return
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path, _, query = self.path.partition("?")
        request = Request(self.command, path.removeprefix(f"/{BUCKET}").lstrip("/"), query, len(body))
        self.server.seen.append(request)
        status = self.server.rule(request)
        if status is None:
            self._pass_on(body)
            return
        text = b"" if status == 200 else ERROR.format(CODES[status]).encode()
        self._answer(status, {"ETag": '"0"', "Content-Type": "application/xml"}, text)

    def _pass_on(self, body: bytes) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.target_port, timeout=60)
        with contextlib.closing(connection):
            headers = {name: value for name, value in self.headers.items() if name.lower() not in HOP}
            connection.request(self.command, self.path, body, headers | {"Content-Length": str(len(body))})
            answer = connection.getresponse()
            content = answer.read()
            headers = {name: value for name, value in answer.getheaders() if name.lower() not in HOP}
            self._answer(answer.status, headers, content, length=answer.getheader("Content-Length"))

    def _answer(self, status: int, headers: dict[str, str], content: bytes, *, length: str | None = None) -> None:
        self.send_response_only(status)
        # The answer to HEAD names the length of a body that does not come
        for name, value in {**headers, "Content-Length": length or str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)
        self.wfile.flush()


class S3:
    """The server. `door()` makes a new way in."""

    def __init__(self, log: Path) -> None:
        self.port = free_port()
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"}
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", "moto.server", "-p", str(self.port)], env=environment,
                stdout=output, stderr=output, stdin=subprocess.DEVNULL,
            )
        until_s = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
                break
            assert self.process.poll() is None, log.read_text()
            assert time.monotonic() < until_s, log.read_text()
            time.sleep(0.05)
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(connection):
            connection.request("PUT", f"/{BUCKET}", headers={"Host": f"127.0.0.1:{self.port}"})
            assert connection.getresponse().status == 200

    @property
    def env(self) -> dict[str, str]:
        """The environment in which s3://bucket is this server."""
        return _env(self.port)

    @contextmanager
    def door(self, address: str = "127.0.0.1", listener: socket.socket | None = None) -> Iterator[Door]:
        """`address`: of this machine, where the door is. `listener`: of another one, in its place."""
        door = Door(self.port, address, listener)
        try:
            yield door
        finally:
            door.shutdown()
            door.server_close()

    def close(self) -> None:
        self.process.kill()
        self.process.wait(60)


def _env(port: int, address: str = "127.0.0.1") -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": f"http://{address}:{port}", "AWS_ACCESS_KEY_ID": "somebody",
        "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true",
    }


def impatient() -> None:
    """Call it first in a process: it waits seconds for the silence of an owner, not half a minute."""
    from rankup.places.lease import StoreLease

    defaults = StoreLease.__init__.__kwdefaults__
    assert defaults is not None
    defaults.update(life_s=3.0, beat_s=0.5)
