"""A run at MLflow. Server and credentials come from MLflow's own variables and files, never from our settings."""

import json
import os
import re
from pathlib import Path

from mlflow.entities import Metric, Param
from mlflow.tracking import MlflowClient

from train.run.trackers.tracked_run import KINDS, Facts, Point

RUN_TAG = "rankup.run"
STATES = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
MOST_PARAMS, MOST_METRICS = 100, 1000  # that a server takes in one request
LONGEST = 6000  # characters of a parameter


class MlflowRun:
    """Of all runs of the experiment, the one that has our run's id as a tag: a tag can be looked for, and MLflow makes
    its own ids.
    """

    def __init__(self, facts: Facts) -> None:
        self.client = MlflowClient()
        experiment = os.environ.get("MLFLOW_EXPERIMENT_ID") or self._experiment()
        found = self.client.search_runs([experiment], f"tags.`{RUN_TAG}` = '{facts.run}'", max_results=1)
        if found:
            self.run = found[0]
            self.client.update_run(self.run.info.run_id, status="RUNNING")
        else:
            self.run = self.client.create_run(experiment, tags={RUN_TAG: facts.run}, run_name=facts.name)
        self.id = self.run.info.run_id
        self._log_settings(facts)
        server = self.client.tracking_uri.rstrip("/")
        self.address = f"{server}/#/experiments/{experiment}/runs/{self.id}"

    def sent(self) -> dict[str, int]:
        """Asked of the server: a request that timed out may have been written all the same, or may not."""
        last = {}
        for kind in KINDS:
            # One name stands for all of its kind: a request is written whole or not at all
            if names := sorted(name for name in self.run.data.metrics if name.startswith(f"{kind}/")):
                last[kind] = max(metric.step for metric in self.client.get_metric_history(self.id, names[0]))
        return last

    def log(self, points: list[Point]) -> None:
        metrics: list[Metric] = []
        for point in points:
            own = [
                Metric(_allowed(name), value, round(point.time * 1000), point.step)
                for name, value in point.values.items()
            ]
            if len(metrics) + len(own) > MOST_METRICS:  # never part of a point: see `sent`
                self.client.log_batch(self.id, metrics=metrics)
                metrics = []
            metrics += own
        self.client.log_batch(self.id, metrics=metrics)

    def note(self, name: str, value: str) -> None:
        self.client.set_tag(self.id, _allowed(name), value[:LONGEST])

    def upload(self, path: Path) -> None:
        self.client.log_artifact(self.id, str(path), "pictures" if path.suffix == ".png" else None)

    def end(self, state: str) -> None:
        self.client.set_terminated(self.id, STATES[state])

    def _experiment(self) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "rankup")
        found = self.client.get_experiment_by_name(name)
        made: str = found.experiment_id if found is not None else self.client.create_experiment(name)
        return made

    def _log_settings(self, facts: Facts) -> None:
        """As parameters, which MLflow never changes: what an attempt has changed, such as epochs, becomes a tag."""
        texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in facts.settings.items()}
        wanted = {name: text[:LONGEST] for name, text in texts.items()}
        there = self.run.data.params
        new = [Param(name, value) for name, value in wanted.items() if name not in there]
        for begin in range(0, len(new), MOST_PARAMS):
            self.client.log_batch(self.id, params=new[begin : begin + MOST_PARAMS])
        for name, value in wanted.items():
            tag = f"changed.{name}"
            if there.get(name, value) != value or tag in self.run.data.tags:
                self.note(tag, value)


def _allowed(name: str) -> str:
    """MLflow refuses a request for one character in a name that it does not know."""
    return re.sub(r"[^\w\-. /]", "_", name)

