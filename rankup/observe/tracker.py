"""Rank 0's side of a tracker (MLflow, W&B): it starts the sender, logs what that says, and says how the run has ended.

Rank 0 never talks to the tracker, and never waits for it but in the end, when there is nothing left to train. No torch
here, and none of the trackers' packages.
"""

import contextlib
import importlib.util
import json
import logging
import os
import subprocess
import sys
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import rankup
from rankup.errors import UserError
from rankup.places.files import read_json
from rankup.timing import TRACKER_S

# A new tracker is a class in `rankup.observe.sender` and an extra in pyproject.toml with the name of its package
TRACKERS = ("mlflow", "wandb")
FOLDER = "tracker"  # in the run directory
FOR_PACKAGES = {
    "PYTHONWARNINGS": "ignore",
    # The sender tries again by itself: a request that hangs keeps it from everything else
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    # What leaves the machine is the run, and no report on how the packages are used
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "WANDB_ERROR_REPORTING": "false",
}


@dataclass(frozen=True, slots=True)
class Facts:
    """What rank 0 tells the sender.

    `run`: the id of the run, which all attempts and checkpoints share. `name`: of the run directory.
    """

    tracker: str
    run: str
    name: str
    run_dir: str
    settings: dict[str, Any]


def check(name: str) -> None:
    """Raises UserError where the tracker `name` can't work here. It asks nobody over the network."""
    if importlib.util.find_spec(name) is None:
        raise UserError(
            f"tracker: the package {name} must be installed on rank 0's node. "
            f"pip install 'rankup[{name}]', or '.[{name}]' in a checkout."
        )
    if name == "mlflow" and not os.environ.get("MLFLOW_TRACKING_URI"):
        # MLflow's own default is a file in the folder in which the run was started: in a container it is lost
        raise UserError(
            "tracker: MLFLOW_TRACKING_URI must be set for mlflow, got nothing. Set it to the server's address, such as "
            "http://127.0.0.1:5000, or to sqlite:////home/me/mlflow.db."
        )


def address_of(run_dir: Path, run: str) -> str:
    """Where a browser finds the run with that id; empty where no tracker has it."""
    known = read_json(run_dir / FOLDER / "sent.json") or {}
    return str(known["address"]) if known.get("run") == run else ""


class Tracker:
    """The sender of one attempt, from `start` to `end`."""

    def __init__(self, facts: Facts, log: logging.Logger) -> None:
        self.facts, self.log = facts, log
        self._process: subprocess.Popen[str] | None = None
        self._listener = threading.Thread(target=self._listen, name="tracker", daemon=True)

    def start(self) -> None:
        """To be called once `metrics.jsonl` is as this attempt goes on with it."""
        environment = os.environ | {name: os.environ.get(name, value) for name, value in FOR_PACKAGES.items()}
        root = str(Path(rankup.__file__).parents[1])
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
        try:
            self._process = subprocess.Popen(
                # -P: a folder `wandb` where the run was started would be taken for the package
                [sys.executable, "-P", "-W", "ignore", "-m", "rankup.observe.sender"],
                env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                start_new_session=True,  # it outlives a kill of rank 0 and all its children by a few seconds
            )
        except OSError as error:
            self.log.warning(f"tracker {self.facts.tracker}: the sender can't be started: {error}. Training goes on.")
            return
        self._tell(json.dumps(asdict(self.facts)))
        self._listener.start()

    def end(self, state: str) -> None:
        """`state`: finished, stopped or failed. Waits a bounded time for what is still to be sent."""
        if self._process is None:
            return
        self._tell(state)
        if TRACKER_S[state]:
            self._listener.join(TRACKER_S[state])
            if self._process.poll() != 0:
                self.log.warning(f"tracker {self.facts.tracker}: not all could be sent within {TRACKER_S[state]:g} s. "
                                 "The same command again sends the rest.")
        with contextlib.suppress(OSError):
            self._process.stdin.close()  # type: ignore[union-attr]

    def _tell(self, line: str) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it was killed
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()

    def _listen(self) -> None:
        """In a thread, until the sender has ended."""
        assert self._process is not None
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                level, _, text = line.strip().partition(" ")
                (self.log.warning if level == "warning" else self.log.info)(text)
        self._process.wait()
