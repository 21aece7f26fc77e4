"""A real MLflow server on this machine, with its data in a folder, and what it says over HTTP."""

import json
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.rigs.jobs import ended, start, wait_for


@dataclass
class Server:
    folder: Path
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @contextmanager
    def up(self) -> "Iterator[Server]":
        """The server for the length of the block."""
        # `mlflow server` starts this command too, with these variables; that takes two more imports of MLflow
        command = [
            sys.executable, "-m", "uvicorn", "mlflow.server.fastapi_app:app", "--host", "127.0.0.1",
            "--port", str(self.port), "--workers", "1", "--log-level", "error",
        ]
        more = {"_MLFLOW_SERVER_FILE_STORE": f"sqlite:///{self.folder}/mlflow.db",
                "_MLFLOW_SERVER_ARTIFACT_ROOT": str(self.folder / "artifacts"),
                "MLFLOW_DISABLE_TELEMETRY": "true", "PYTHONWARNINGS": "ignore"}
        with ended(start(*command, env=more)) as job:
            wait_for("its answer", self._answers, process=job.processes[0])
            yield self

    def ask(self, path: str, **question: Any) -> dict[str, Any]:
        """What the REST API answers, by POST where there is a question."""
        request = urllib.request.Request(
            f"{self.url}/api/2.0/mlflow/{path}", data=json.dumps(question).encode() if question else None,
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)  # type: ignore[no-any-return]

    def runs(self, name: str) -> list[dict[str, Any]]:
        """All runs of that name."""
        experiments = self.ask("experiments/search", max_results=100).get("experiments", [])
        ids = [each["experiment_id"] for each in experiments]
        found = self.ask("runs/search", experiment_ids=ids, max_results=100).get("runs", [])
        return [run for run in found if run["info"]["run_name"] == name]

    def curve(self, run: dict[str, Any], name: str) -> list[tuple[int, float]]:
        """Step and value of each point, by step."""
        answer = self.ask(f"metrics/get-history?run_id={run['info']['run_id']}&metric_key={name}")
        return sorted((int(each.get("step", 0)), float(each["value"])) for each in answer["metrics"])

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                return True
        except OSError:
            return False
