"""The part of the Hugging Face hub that `datasets` needs to download a data set: one repository, from a folder."""

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import flask
from werkzeug.exceptions import HTTPException
from werkzeug.serving import make_server

from tests.rigs.object_store import Quiet

COMMIT = hashlib.sha1(b"the only commit").hexdigest()


class Hub:
    """The server, with its address and the requests that it got."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder, self.address = name, folder, ""
        self.requests: list[str] = []
        self.authorizations: set[str] = set()

    def files(self) -> list[dict[str, Any]]:
        """Return the repository's files as the hub lists them."""
        return [
            {"type": "file", "path": path.relative_to(self.folder).as_posix(), "size": path.stat().st_size,
             "oid": hashlib.sha1(path.read_bytes()).hexdigest()}
            for path in sorted(self.folder.rglob("*")) if path.is_file()
        ]

    def count(self, text: str) -> int:
        """Return the number of requests for content whose path has this text."""
        return sum(line.startswith("GET ") and text in line for line in self.requests)

    def app(self) -> flask.Flask:
        app, api, request = flask.Flask(__name__), f"/api/datasets/{self.name}", flask.request

        @app.before_request
        def note() -> None:
            self.requests.append(f"{request.method} {request.path}")
            self.authorizations.add(request.headers.get("Authorization", ""))

        @app.get(api)
        @app.get(f"{api}/revision/<commit>")
        def about(commit: str = "") -> dict[str, Any]:
            siblings = [{"rfilename": file["path"]} for file in self.files()]
            return {"id": self.name, "sha": COMMIT, "private": False, "gated": False, "disabled": False, "tags": [],
                    "downloads": 0, "likes": 0, "siblings": siblings}

        @app.get(f"{api}/tree/{COMMIT}")
        @app.get(f"{api}/tree/{COMMIT}/<path:where>")
        def tree(where: str = "") -> list[dict[str, Any]]:
            start = f"{where}/" if where else ""
            inside = {file["path"]: file for file in self.files() if file["path"].startswith(start)}
            if request.args.get("recursive", "").lower() == "true":
                return [*inside.values()]
            names = sorted({start + path.removeprefix(start).partition("/")[0] for path in inside})
            return [inside.get(name, {"type": "directory", "path": name, "oid": COMMIT}) for name in names]

        @app.get(f"/datasets/{self.name}/resolve/<commit>/<path:path>")
        def content(commit: str, path: str) -> flask.Response:
            answer = flask.send_from_directory(self.folder, path)
            answer.headers["X-Repo-Commit"] = COMMIT
            return answer

        @app.errorhandler(404)
        def missing(error: HTTPException) -> tuple[dict[str, Any], int, dict[str, str]]:
            return {}, 404, {"X-Error-Code": "EntryNotFound" if self.name in request.path else "RepoNotFound"}

        return app


@contextmanager
def serve(name: str, folder: Path) -> Iterator[Hub]:
    """Serve the folder as the data set `name` on loopback."""
    hub = Hub(name, folder)
    server = make_server("127.0.0.1", 0, hub.app(), threaded=True, request_handler=Quiet)
    hub.address = f"http://127.0.0.1:{server.port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
