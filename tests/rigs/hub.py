"""As much of the Hugging Face hub as `datasets` needs to download a data set: one repository, from a folder."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = hashlib.sha1(b"the only commit").hexdigest()


class Hub:
    """The server: what was asked of it, and where it is."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.requests: list[str] = []
        self.authorizations: set[str] = set()
        self.address = ""

    def files(self) -> list[dict[str, Any]]:
        """The files of the repository, as the hub lists them."""
        found = sorted(path for path in self.folder.rglob("*") if path.is_file())
        return [
            {"type": "file", "path": path.relative_to(self.folder).as_posix(), "size": path.stat().st_size,
             "oid": hashlib.sha1(path.read_bytes()).hexdigest()}
            for path in found
        ]

    def count(self, text: str) -> int:
        """How many requests for content had this text in them."""
        return sum(line.startswith("GET ") and text in line for line in self.requests)


@contextmanager
def serve(name: str, folder: Path) -> Iterator[Hub]:
    """Serve the folder as the data set `name` on loopback."""
    hub = Hub(name, folder)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def do_POST(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            self._answer(self.rfile.read(length).decode())

        def _answer(self, body: str = "") -> None:
            hub.requests.append(f"{self.command} {self.path}")
            hub.authorizations.add(self.headers.get("Authorization", ""))
            path = unquote(urlsplit(self.path).path)
            api, files = f"/api/datasets/{hub.name}", f"/datasets/{hub.name}/resolve/"
            if path in (api, f"{api}/revision/main", f"{api}/revision/{COMMIT}"):
                siblings = [{"rfilename": file["path"]} for file in hub.files()]
                self._json({"id": hub.name, "sha": COMMIT, "private": False, "gated": False, "disabled": False,
                            "tags": [], "downloads": 0, "likes": 0, "siblings": siblings})
            elif path.startswith(f"{api}/tree/{COMMIT}"):
                self._json(self._below(path.removeprefix(f"{api}/tree/{COMMIT}").strip("/")))
            elif path.startswith(f"{api}/paths-info/"):
                asked = json.loads(body)["paths"] if body.startswith("{") else parse_qs(body).get("paths", [])
                self._json([file for file in hub.files() if file["path"] in asked])
            elif path.startswith(files) and (folder / path.removeprefix(files).partition("/")[2]).is_file():
                self._send(200, (folder / path.removeprefix(files).partition("/")[2]).read_bytes())
            else:
                code = "EntryNotFound" if path.startswith((files, api)) else "RepoNotFound"
                self._send(404, b"{}", {"X-Error-Code": code})

        def _below(self, where: str) -> list[dict[str, Any]]:
            start = f"{where}/" if where else ""
            inside = [file for file in hub.files() if file["path"].startswith(start)]
            if "recursive=true" in self.path.lower():
                return inside
            names = {start + file["path"].removeprefix(start).partition("/")[0] for file in inside}
            files = {file["path"]: file for file in inside}
            return [files.get(name, {"type": "directory", "path": name, "oid": COMMIT}) for name in sorted(names)]

        def _json(self, value: Any) -> None:
            self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

        def _send(self, code: int, content: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(code)
            facts = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha1(content).hexdigest()}"'}
            for key, value in {**facts, "Content-Length": str(len(content)), **(headers or {})}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            """Not to the terminal."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join(60)
