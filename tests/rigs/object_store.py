"""A real S3 server, and doors (proxies) in front of it that make it slow, deaf, full or rude."""

import io
import socket
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from werkzeug.serving import WSGIRequestHandler, make_server
from werkzeug.test import Client
from werkzeug.wrappers import Response

from tests.rigs.jobs import free_port

BUCKET = "bucket"
ERROR = '<?xml version="1.0"?><Error><Code>{}</Code><Message>as the test wants it</Message></Error>'
# Answers that a rule may give in place of the server, with the codes of S3
CODES = {403: "AccessDenied", 503: "SlowDown", 507: "InsufficientStorage", 500: "InternalError"}


@dataclass(frozen=True)
class Request:
    """One request: its method, the object's name without the bucket, the query, and the number of bytes of its body."""

    method: str
    name: str
    query: str
    size: int


class Quiet(WSGIRequestHandler):
    def log(self, *_: Any) -> None:
        """Print nothing to the terminal. A client that was killed is no error here."""


class Door:
    """Passes requests on to the store. `rule` is called before each request. It may sleep, or return an answer to give
    instead. `seen`: the requests so far."""

    def __init__(self, store: Callable[..., Iterable[bytes]], address: str, listener: socket.socket | None) -> None:
        self.store, self.seen = store, list[Request]()
        self.rule: Callable[[Request], int | None] = lambda request: None
        self.server = make_server(address, free_port(), self._answer, threaded=True, request_handler=Quiet,
                                  fd=None if listener is None else listener.fileno())
        if listener is not None:  # the server has a copy
            listener.close()
        self.env = {  # in this environment s3://bucket is behind this door
            "AWS_ENDPOINT_URL": f"http://{address}:{self.server.server_address[1]}", "AWS_ACCESS_KEY_ID": "somebody",
            "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true",
        }
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def _answer(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        name = environ["PATH_INFO"].removeprefix(f"/{BUCKET}").lstrip("/")
        request = Request(environ["REQUEST_METHOD"], name, environ["QUERY_STRING"], len(body))
        self.seen.append(request)
        status = self.rule(request)
        if status is None:
            return self.store({**environ, "wsgi.input": io.BytesIO(body)}, start_response)
        answer = Response(ERROR.format(CODES[status]), status, content_type="application/xml")
        return answer(environ, start_response)

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


class S3:
    """moto's S3 in this process, with a door that is always open. `door()` makes another door."""

    def __init__(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from moto.moto_server.werkzeug_app import create_backend_app

            self.store = create_backend_app("s3")  # moto's own server searches its folders at each request
            assert Client(self.store).put(f"/{BUCKET}", base_url="http://127.0.0.1").status_code == 200
        self.open = Door(self.store, "127.0.0.1", None)
        self.env, self.close = self.open.env, self.open.close

    @contextmanager
    def door(self, address: str = "127.0.0.1", listener: socket.socket | None = None) -> Iterator[Door]:
        """`address`: this machine's address on which the door listens. `listener`: another machine's socket instead."""
        door = Door(self.store, address, listener)
        try:
            yield door
        finally:
            door.close()


def impatient() -> None:
    """Call this first in a process that must wait only seconds for a silent owner, not half a minute."""
    from rankup.places.lease import StoreLease

    defaults = StoreLease.__init__.__kwdefaults__
    assert defaults is not None
    defaults.update(life_s=3.0, beat_s=0.5)
