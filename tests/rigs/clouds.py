"""A server that speaks the metadata services of three clouds, as their documentation describes them."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "AQAAA-a-token=="
NAME = "node-1"


class Clouds(ThreadingHTTPServer):
    """`notice`: what the clouds say; empty while they say nothing. `asked`: method and path of each request."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.notice: Any = None
        self.asked: list[str] = []
        self.address = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self.shutdown()
        self.server_close()

    def answer(self, method: str, path: str, headers: Any) -> tuple[int, str]:
        self.asked.append(f"{method} {path}")
        if path == "/latest/api/token":
            right = method == "PUT" and 0 < int(headers["X-aws-ec2-metadata-token-ttl-seconds"] or 0) <= 21600
            return (200, TOKEN) if right else (400, "")
        if path == "/latest/meta-data/spot/instance-action":
            if headers["X-aws-ec2-metadata-token"] != TOKEN:
                return 401, ""
            return (200, json.dumps(self.notice)) if self.notice else (404, "")
        if path.startswith("/computeMetadata/v1/instance/"):
            if headers["Metadata-Flavor"] != "Google":
                return 403, ""
            empty = {"preempted": "FALSE", "maintenance-event": "NONE"}
            return 200, {**empty, **(self.notice or {})}[path.rpartition("/")[2]]
        if path.startswith("/metadata/") and headers["Metadata"] == "true" and "api-version=" in path:
            if path.startswith("/metadata/instance/compute/name?") and "format=text" in path:
                return 200, NAME
            if path.startswith("/metadata/scheduledevents?"):
                return 200, json.dumps({"DocumentIncarnation": 1, "Events": self.notice or []})
        return 400, ""


class _Handler(BaseHTTPRequestHandler):
    server: Clouds

    def _answer(self) -> None:
        code, text = self.server.answer(self.command, self.path, self.headers)
        self.send_response(code)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    do_GET = do_PUT = _answer

    def log_message(self, *args: Any) -> None:
        """Not into the tests' output."""
