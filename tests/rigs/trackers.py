"""What trackers know of a run: a real MLflow server with its data in a folder, and the offline files of W&B."""

import json
import struct
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.rigs.foreign_scripts import WARN
from tests.rigs.jobs import ended, start, wait_for

# W&B's files have the format of LevelDB's log, which its Python package can only write
BLOCK = 32 * 1024  # bytes; no piece of a record crosses the end of a block
HEAD = struct.Struct("<IHB")  # the head of a piece: checksum, length, kind
WHOLE, FIRST, MIDDLE, LAST = 1, 2, 3, 4


@dataclass
class Server:
    folder: Path
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @contextmanager
    def up(self) -> "Iterator[Server]":
        """Run the server during the block."""
        # `mlflow server` starts this command too, with these variables, but imports MLflow two more times
        command = [
            sys.executable, "-m", "uvicorn", "mlflow.server.fastapi_app:app", "--host", "127.0.0.1",
            "--port", str(self.port), "--workers", "1", "--log-level", "error",
        ]
        more = {"_MLFLOW_SERVER_FILE_STORE": f"sqlite:///{self.folder}/mlflow.db",
                "_MLFLOW_SERVER_ARTIFACT_ROOT": str(self.folder / "artifacts"),
                "MLFLOW_DISABLE_TELEMETRY": "true", **WARN, "PYTHONWARNINGS": "ignore"}
        with ended(start(*command, env=more)) as job:
            wait_for("the server's answer", self._answers, process=job.processes[0])
            yield self

    def ask(self, path: str, **question: Any) -> dict[str, Any]:
        """Return the answer of the REST API. Use POST if there is a question."""
        request = urllib.request.Request(
            f"{self.url}/api/2.0/mlflow/{path}", data=json.dumps(question).encode() if question else None,
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)  # type: ignore[no-any-return]

    def runs(self, name: str) -> list[dict[str, Any]]:
        """Return all runs of that name."""
        experiments = self.ask("experiments/search", max_results=100).get("experiments", [])
        ids = [each["experiment_id"] for each in experiments]
        found = self.ask("runs/search", experiment_ids=ids, max_results=100).get("runs", [])
        return [run for run in found if run["info"]["run_name"] == name]

    def only_run(self, name: str, status: str) -> dict[str, Any]:
        """Wait until the only run of that name has that status, and return it: a sender may outlive its rank."""
        found: list[dict[str, Any]] = []

        def ended() -> bool:
            found[:] = self.runs(name)
            return [run["info"]["status"] for run in found] == [status]

        wait_for(f"{name} {status}", ended, log=lambda: str(found))
        return found[0]

    def curve(self, run: dict[str, Any], name: str) -> list[tuple[int, float]]:
        """Return step and value of each point, by step."""
        answer = self.ask(f"metrics/get-history?run_id={run['info']['run_id']}&metric_key={name}")
        return sorted((int(each.get("step", 0)), float(each["value"])) for each in answer["metrics"])

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                return True
        except OSError:
            return False


@dataclass
class Rows:
    """The content of one run's files, in the order of the attempts."""

    ids: set[str] = field(default_factory=set)
    history: list[dict[str, Any]] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    codes: list[int] = field(default_factory=list)  # the exit codes of the attempts


def rows_of(run: Path) -> Rows:
    from wandb.proto.wandb_internal_pb2 import Record

    rows = Rows()
    for path in sorted((run / "tracker" / "wandb").glob("offline-run-*/run-*.wandb")):
        for record in map(Record.FromString, records_in(path.read_bytes())):
            kind = record.WhichOneof("record_type")
            if kind == "run":
                rows.ids.add(record.run.run_id)
            elif kind == "exit":
                rows.codes.append(record.exit.exit_code)
            elif kind == "history":
                rows.history.append(values_of(record.history.item))
            rows.config |= values_of([*record.run.config.update, *record.config.update])
    return rows


def values_of(items: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def records_in(file: bytes) -> Iterator[bytes]:
    """Yield the records of a file, after the file's own head. A record that a kill has cut ends the file."""
    pieces = b""
    for place in range(0, len(file), BLOCK):
        block = file[max(HEAD.size, place) : place + BLOCK]
        while len(block) > HEAD.size:
            _, length, kind = HEAD.unpack_from(block)
            data, block = block[HEAD.size : HEAD.size + length], block[HEAD.size + length :]
            if len(data) < length:
                return
            pieces = data if kind in (WHOLE, FIRST) else pieces + data
            if kind in (WHOLE, LAST):
                yield pieces
