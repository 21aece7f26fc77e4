"""Sending a run to a tracker, MLflow or W&B: rank 0 starts a process that sends the new lines of `metrics.jsonl`.

That file is the queue. A server that is down costs no memory and loses nothing, because the next attempt sends what
this one could not. The sender is a process, because an import of MLflow in a thread would hold the GIL for two seconds.

No step is sent twice. A resume cuts the file and repeats steps with the same result, bit for bit, and trackers can't
delete points. So `tracker/sent.json` keeps the last step that was sent of each curve. If the answer to a request is
lost, its points are sent again unchanged, and MLflow keeps equal points once.
"""

import contextlib
import fcntl
import importlib.util
import json
import logging
import math
import os
import re
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import rankup
from rankup.errors import UserError, reason
from rankup.places.files import open_to_append, read_json, write_json
from rankup.timing import SENDER_END_S, SENDER_LOOK_S, SENDER_PAUSE_S, TRACKER_S

# To add a tracker, add a class below, and an extra in pyproject.toml with the name of its package
FOLDER = "tracker"  # a folder in the run directory
MOST_LINES = 50  # in one request
SECRET = re.compile("key|token|secret|password", re.IGNORECASE)
FOR_PACKAGES = {
    # No retries, because the sender itself tries again. A hanging request would keep it from everything else
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    # Only the run leaves the machine, no report on how the packages are used
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "WANDB_ERROR_REPORTING": "false",
}


class Line(NamedTuple):
    """The values of a line of metrics.jsonl that have not been sent yet."""

    step: int
    time: float
    values: dict[str, float]


@dataclass(frozen=True, slots=True)
class Facts:
    """What the sender needs to know from rank 0. `run`: the id of the run, which all attempts and checkpoints share."""

    tracker: str
    run: str
    run_dir: str
    settings: dict[str, Any]

    @property
    def folder(self) -> Path:
        return Path(self.run_dir)


def check(name: str) -> None:
    """Raise UserError if the tracker `name` can't work here. Uses no network."""
    if importlib.util.find_spec(name) is None:
        raise UserError(
            f"tracker: the package {name} must be installed on rank 0's node. "
            f"pip install 'rankup[{name}]', or '.[{name}]' in a checkout."
        )
    if name == "mlflow" and not os.environ.get("MLFLOW_TRACKING_URI"):
        # MLflow's default is a file in the current folder, which is lost in a container
        raise UserError(
            "tracker: MLFLOW_TRACKING_URI must be set for mlflow, got nothing. Set it to the server's address, such as "
            "http://127.0.0.1:5000, or to sqlite:////home/me/mlflow.db."
        )


class Tracker:
    """The sender process of one attempt. Start it after `metrics.jsonl` was cut for this attempt."""

    def __init__(self, facts: Facts, log: logging.Logger) -> None:
        self._name, self._log = facts.tracker, log
        paths = [str(Path(rankup.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process: Any = subprocess.Popen(
            # -P: otherwise a folder `wandb` in the current folder would be imported instead of the package
            [sys.executable, "-P", "-W", "ignore", "-m", "rankup.observe.tracker"],
            env={**FOR_PACKAGES, **os.environ, "PYTHONPATH": os.pathsep.join(paths)}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            start_new_session=True,  # it outlives a kill of rank 0 and all its children by a few seconds
        )
        self._tell(json.dumps(asdict(facts)))
        self._listener = threading.Thread(target=self._listen, name="tracker", daemon=True)
        self._listener.start()

    def end(self, state: str) -> None:
        """End the sender, and wait a bounded time for the last values. `state`: finished, stopped or failed."""
        self._tell(state)
        if timeout_s := TRACKER_S[state]:
            self._listener.join(timeout_s)
            if self._process.poll() != 0:
                way_out = "Run the same command again to send the rest."
                self._log.warning(f"tracker {self._name}: not all values could be sent. {way_out}")
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def _tell(self, line: str) -> None:
        with contextlib.suppress(OSError):  # the sender was killed
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()

    def _listen(self) -> None:
        """Log what the sender says, in a thread, until it has ended."""
        with self._process.stdout as lines:
            for line in lines:
                self._log.info(line.strip())
        self._process.wait()


# The process that sends -----------------------------------------------------------------------------------------------
# Methods of a tracker may be called again with the same arguments. They raise what the package raises. Servers and
# credentials come from the packages' own variables and files


class MlflowRun:
    """A run at MLflow. A tag of the MLflow run holds our run's id, because MLflow makes its own ids."""

    TAG = "rankup.run"

    def __init__(self, facts: Facts) -> None:
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        self.client = MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "rankup")
        there = self.client.get_experiment_by_name(name)
        experiment = there.experiment_id if there is not None else self.client.create_experiment(name)
        found = self.client.search_runs([experiment], f"tags.`{self.TAG}` = '{facts.run}'", max_results=1)
        if found:
            self.client.update_run(found[0].info.run_id, status="RUNNING")
        run = found[0] if found else self.client.create_run(
            experiment, tags={self.TAG: facts.run}, run_name=facts.folder.name
        )
        self.id = run.info.run_id
        self.address = f"{self.client.tracking_uri.rstrip('/')}/#/experiments/{experiment}/runs/{self.id}"
        # Settings become parameters, which MLflow never changes: a setting that a later attempt changes stays as it was
        self.client.log_batch(self.id, params=[
            Param(name, (value if isinstance(value, str) else json.dumps(value))[:6000])
            for name, value in facts.settings.items() if name not in run.data.params
        ])

    def log(self, lines: list[Line]) -> None:
        from mlflow.entities import Metric

        self.client.log_batch(self.id, [
            # MLflow refuses the whole request if a name has a character that it does not allow
            Metric(re.sub(r"[^\w\-. /]", "_", name), value, round(line.time * 1000), line.step)
            for line in lines for name, value in line.values.items()
        ])

    def end(self, state: str) -> None:
        """Set how the run ended. `state`: finished, stopped or failed."""
        self.client.set_terminated(self.id, {"finished": "FINISHED", "stopped": "KILLED"}.get(state, "FAILED"))


class WandbRun:
    """A run at Weights & Biases, which uses our run's id as its own. W&B writes everything to a file below the run
    directory, one for each attempt. Unless WANDB_MODE=offline, a process of W&B uploads that file.
    """

    def __init__(self, facts: Facts) -> None:
        import wandb

        self.run = wandb.init(
            id=facts.run, resume="allow", name=facts.folder.name, project=os.environ.get("WANDB_PROJECT", "rankup"),
            dir=str(facts.folder / FOLDER),
            settings=wandb.Settings(
                # Seconds that W&B may wait for the server, and for uploads at the end. `wandb sync` uploads the rest
                silent=True, init_timeout=20.0, finish_timeout=12.0,
                # Send only what is logged below: no output, code, commands, packages or facts about the machine
                console="off", save_code=False, disable_code=True, disable_git=True, disable_job_creation=True,
                x_disable_meta=True, x_disable_stats=True, x_disable_machine_info=True, x_save_requirements=False,
            ),
        )
        self.run.config.update(facts.settings, allow_val_change=True)
        # W&B's own step won't do: it counts calls of `log`, and W&B drops values of earlier steps
        self.run.define_metric("*", step_metric="step")
        folder = Path(self.run.settings.sync_dir).parent
        self.address = self.run.url or f"offline, in {folder}; to upload it: wandb sync {folder}/offline-run-*"

    def log(self, lines: list[Line]) -> None:
        for line in lines:
            self.run.log({**line.values, "step": line.step, "_timestamp": line.time})

    def end(self, state: str) -> None:
        self.run.finish(exit_code=0 if state == "finished" else 1)


RUNS: dict[str, Callable[[Facts], Any]] = {"mlflow": MlflowRun, "wandb": WandbRun}


class Sender:
    """Sends what is new in the run directory at each `look`. Raises what the package raises. The caller then makes a
    new Sender, which continues after the values that were sent."""

    def __init__(self, facts: Facts) -> None:
        self.facts, self._memory = facts, facts.folder / FOLDER / "sent.json"
        known = read_json(self._memory)
        self._sent: dict[str, int] = known["sent"] if known.get("run") == facts.run else {}  # last step of each curve
        self._read = 0  # how many bytes of metrics.jsonl were read
        self.tracked = RUNS[facts.tracker](facts)

    def look(self, state: str = "") -> None:
        """Send what is new, and record on disk what was sent, for the next attempt. `state`: how the run has ended, ""
        while it continues."""
        while lines := list(islice(self._new_lines(), MOST_LINES)):
            self.tracked.log(lines)
            self._sent |= {name: line.step for line in lines for name in line.values}
            with contextlib.suppress(OSError):  # the next save reports a full disk
                write_json(self._memory, {"run": self.facts.run, "sent": self._sent})
        if state:
            self.tracked.end(state)

    def _new_lines(self) -> Iterator[Line]:
        """Yield the values that were not sent, from the lines that were not read yet. Raises ValueError if these begin
        within a line: then the next attempt has cut the file, and this is the sender of a killed attempt."""
        with (self.facts.folder / "metrics.jsonl").open("rb") as file:
            file.seek(self._read)
            for text in file:
                if not text.endswith(b"\n"):  # the line is still being written
                    return
                self._read += len(text)
                values = json.loads(text)
                step, time = values.pop("step"), values.pop("time")
                new = {
                    name: math.nan if value is None else value for name, value in values.items()
                    if step > self._sent.get(name, -1)
                }
                if new:
                    yield Line(step, time, new)


def without_secrets(text: str) -> str:
    """Return `text` without users and passwords in addresses, and without values of variables that may be secret."""
    for name, value in os.environ.items():
        if SECRET.search(name) and len(value) > 3:
            text = text.replace(value, "***")
    return re.sub(r"://(?:[^/\s@]*:\S*|[^/\s]*)@", "://", text)


def main() -> None:
    """Send until rank 0 says how the run ended, or is killed, which closes its pipe. Then send a last time."""
    channel = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    # Discard what the packages print: they print addresses with passwords
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    os.nice(10)  # the ranks of this node have priority
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)  # rank 0 handles a request to stop, and tells us after it has saved
    rank0 = open(sys.stdin.fileno(), "rb", buffering=0, closefd=False)  # noqa: SIM115
    facts = Facts(**json.loads(rank0.readline()))

    def say(text: str) -> None:
        with contextlib.suppress(OSError):  # rank 0 was killed
            print(f"tracker {facts.tracker}: {without_secrets(text)}", file=channel, flush=True)

    with contextlib.suppress(OSError):  # some network file systems have no such locks
        (facts.folder / FOLDER).mkdir(parents=True, exist_ok=True)
        # One sender of a run at a time, until this process ends: the sender of a killed rank 0 may still be at work
        lock = open_to_append(facts.folder / FOLDER / ".lock")
        fcntl.flock(lock, fcntl.LOCK_EX)
    # Import the package now: on a busy machine this may take longer than the time that is left after rank 0's end
    with contextlib.suppress(Exception):  # the first look reports the error
        importlib.import_module(facts.tracker)
    sender: Sender | None = None
    pause_s, state, complained = 0.0, "", False
    while not state:
        if select.select([rank0], [], [], pause_s)[0]:
            state = rank0.readline().decode().strip() or "failed"
            signal.alarm(SENDER_END_S)  # the kernel then ends this process, as a package may wait for a server forever
        begun = sender is not None
        try:
            sender = sender or Sender(facts)
            sender.look(state)
        except Exception as error:  # the errors of the packages have no common class
            if not complained:
                why = reason(error)[:200].rstrip(". ")
                say(why + (not state) * ". Training goes on; missing values are sent once this works.")
            sender, pause_s, complained = None, SENDER_PAUSE_S, True
        else:
            if not begun:
                say(sender.tracked.address)
            pause_s, complained = SENDER_LOOK_S, False
    os._exit(1 if sender is None else 0)  # skips what the packages do at the end of a process


if __name__ == "__main__":
    main()
