"""Rank 0's side of a tracker: it starts the sender, logs what that says, and says how the run has ended. No torch here.

Rank 0 never talks to the tracker, and never waits for it but in the end, when there is nothing left to train.
"""

import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
from dataclasses import asdict
from pathlib import Path

from train.process.status import read_json
from train.run.trackers.tracked_run import Facts

ROOT = Path(__file__).parents[3]  # the folder of the package `train`
# How long rank 0 waits for the last values to be sent. The sender itself gives up a little earlier. A run that is
# stopped may have few seconds until it is killed: its sender goes on alone, if it can.
WAIT_S = {"finished": 17.0, "stopped": 4.0, "failed": 0.0}
FOR_PACKAGES = {
    "PYTHONWARNINGS": "ignore",
    # The sender tries again by itself: a request that hangs keeps it from everything else
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    # What leaves the machine is the run, and no report on how the packages are used
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "WANDB_ERROR_REPORTING": "false",
}


class Tracker:
    """The sender of one attempt, from `start` to `end`."""

    def __init__(self, facts: Facts, log: logging.Logger) -> None:
        self.facts, self.log = facts, log
        self._process: subprocess.Popen[str] | None = None
        self._listener = threading.Thread(target=self._listen, name="tracker", daemon=True)

    def start(self) -> None:
        """To be called once `metrics.jsonl` is as this attempt goes on with it."""
        environment = os.environ | {name: os.environ.get(name, value) for name, value in FOR_PACKAGES.items()}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        try:
            self._process = subprocess.Popen(
                # -P: a folder `wandb` where the run was started would be taken for the package
                [sys.executable, "-P", "-W", "ignore", "-m", "train.run.trackers.sender"],
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
        if WAIT_S[state]:
            self._listener.join(WAIT_S[state])
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


def address_of(run_dir: Path, run: str) -> str:
    """Where a browser finds the run with that id; empty where no tracker has it."""
    known = read_json(run_dir / "tracker" / "sent.json") or {}
    return str(known["address"]) if known.get("run") == run else ""
