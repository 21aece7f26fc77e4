"""Sends a run to a tracker, MLflow or W&B: rank 0 starts a process that sends new lines of `metrics.jsonl`.

That file is the queue. A server that is down costs no memory and loses nothing: the next attempt sends what this one
could not. It is a process and not a thread, because importing MLflow holds Python's lock for two seconds.

No step is sent twice. A resume cuts the file and repeats steps with the same result, bit for bit; trackers can't take a
point back. So `tracker/sent.json` keeps the last step that was sent of each curve. Points whose answer was lost are
sent again, unchanged: MLflow keeps an equal point once.
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
from rankup.places.files import read_json, write_json
from rankup.timing import SENDER_END_S, SENDER_LOOK_S, SENDER_PAUSE_S, TRACKER_S

# A new tracker is a class below, and an extra in pyproject.toml with the name of its package
FOLDER = "tracker"  # in the run directory
MOST_LINES = 50  # in one request
SECRET = re.compile("key|token|secret|password", re.IGNORECASE)
FOR_PACKAGES = {
    # The sender tries again by itself: a request that hangs keeps it from everything else
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    # What leaves the machine is the run, and no report on how the packages are used
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "WANDB_ERROR_REPORTING": "false",
}


class Line(NamedTuple):
    """Of metrics.jsonl: what has not been sent yet."""

    step: int
    time: float
    values: dict[str, float]


@dataclass(frozen=True, slots=True)
class Facts:
    """What rank 0 tells the sender. `run`: the id of the run, which all attempts and checkpoints share."""

    tracker: str
    run: str
    run_dir: str
    settings: dict[str, Any]

    @property
    def folder(self) -> Path:
        return Path(self.run_dir)


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


class Tracker:
    """The sender of one attempt. It begins once `metrics.jsonl` is as this attempt goes on with it."""

    def __init__(self, facts: Facts, log: logging.Logger) -> None:
        self._name, self._log = facts.tracker, log
        paths = [str(Path(rankup.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process: Any = subprocess.Popen(
            # -P: a folder `wandb` where the run was started would be taken for the package
            [sys.executable, "-P", "-W", "ignore", "-m", "rankup.observe.tracker"],
            env={**FOR_PACKAGES, **os.environ, "PYTHONPATH": os.pathsep.join(paths)}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            start_new_session=True,  # it outlives a kill of rank 0 and all its children by a few seconds
        )
        self._tell(json.dumps(asdict(facts)))
        self._listener = threading.Thread(target=self._listen, name="tracker", daemon=True)
        self._listener.start()

    def end(self, state: str) -> None:
        """`state`: finished, stopped or failed. Waits a bounded time for what is still to be sent."""
        self._tell(state)
        if timeout_s := TRACKER_S[state]:
            self._listener.join(timeout_s)
            if self._process.poll() != 0:
                way_out = "The same command again sends the rest."
                self._log.warning(f"tracker {self._name}: not all could be sent. {way_out}")
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def _tell(self, line: str) -> None:
        with contextlib.suppress(OSError):  # it was killed
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()

    def _listen(self) -> None:
        """In a thread, until the sender has ended."""
        with self._process.stdout as lines:
            for line in lines:
                self._log.info(line.strip())
        self._process.wait()


# The process that sends -----------------------------------------------------------------------------------------------
# Each method of a tracker may be called again with the same arguments, and raises what the package raises. Servers and
# credentials come from the packages' own variables and files


class MlflowRun:
    """A run at MLflow: the one of the experiment that has our run's id as a tag, since MLflow makes its own ids."""

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
        # As parameters, which MLflow never changes: a setting that a later attempt changed stays as it was
        self.client.log_batch(self.id, params=[
            Param(name, (value if isinstance(value, str) else json.dumps(value))[:6000])
            for name, value in facts.settings.items() if name not in run.data.params
        ])

    def log(self, lines: list[Line]) -> None:
        from mlflow.entities import Metric

        self.client.log_batch(self.id, [
            # MLflow refuses a request for one character in a name that it does not know
            Metric(re.sub(r"[^\w\-. /]", "_", name), value, round(line.time * 1000), line.step)
            for line in lines for name, value in line.values.items()
        ])

    def end(self, state: str) -> None:
        """`state`: finished, stopped or failed."""
        self.client.set_terminated(self.id, {"finished": "FINISHED", "stopped": "KILLED"}.get(state, "FAILED"))


class WandbRun:
    """A run at Weights & Biases, which takes our run's id as its own. W&B writes all to a file below the run directory,
    one for each attempt, and a process of its own uploads that, unless WANDB_MODE=offline.
    """

    def __init__(self, facts: Facts) -> None:
        import wandb

        self.run = wandb.init(
            id=facts.run, resume="allow", name=facts.folder.name, project=os.environ.get("WANDB_PROJECT", "rankup"),
            dir=str(facts.folder / FOLDER),
            settings=wandb.Settings(
                # Seconds for the server to answer, and for what is left at the end; the rest is for `wandb sync`
                silent=True, init_timeout=20.0, finish_timeout=12.0,
                # Only what is logged below: no output, code, commands, packages or facts about the machine
                console="off", save_code=False, disable_code=True, disable_git=True, disable_job_creation=True,
                x_disable_meta=True, x_disable_stats=True, x_disable_machine_info=True, x_save_requirements=False,
            ),
        )
        self.run.config.update(facts.settings, allow_val_change=True)
        # Not W&B's own step: it counts the calls of `log`, and what belongs to an earlier step would be dropped
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
    """Sends what is new in the run directory at each `look`. Raises whatever the package raises: then a new one goes on
    behind what was sent."""

    def __init__(self, facts: Facts) -> None:
        self.facts, self._memory = facts, facts.folder / FOLDER / "sent.json"
        known = read_json(self._memory)
        self._sent: dict[str, int] = known["sent"] if known.get("run") == facts.run else {}  # the last step by name
        self._read = 0  # bytes of metrics.jsonl
        self.tracked = RUNS[facts.tracker](facts)

    def look(self, state: str = "") -> None:
        """Send what is new, and keep on the disk how far that was, for the next attempt. `state`: how the run has
        ended, empty while it goes on."""
        while lines := list(islice(self._new_lines(), MOST_LINES)):
            self.tracked.log(lines)
            self._sent |= {name: line.step for line in lines for name in line.values}
            with contextlib.suppress(OSError):  # a full disk: the next save says so
                write_json(self._memory, {"run": self.facts.run, "sent": self._sent})
        if state:
            self.tracked.end(state)

    def _new_lines(self) -> Iterator[Line]:
        """What stands behind that which was read before, and was not sent. Raises ValueError in the middle of a line:
        the next attempt has cut the file, and this is the sender of a killed one."""
        with (self.facts.folder / "metrics.jsonl").open("rb") as file:
            file.seek(self._read)
            for text in file:
                if not text.endswith(b"\n"):  # it is being written
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
    """`text` without the users and passwords of addresses, and without any value of a variable that may be a secret."""
    for name, value in os.environ.items():
        if SECRET.search(name) and len(value) > 3:
            text = text.replace(value, "***")
    return re.sub(r"://(?:[^/\s@]*:\S*|[^/\s]*)@", "://", text)


def main() -> None:
    """Look until rank 0 says how the run ended, or closes its pipe as it is killed, and once more then."""
    channel = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    # What the packages print goes nowhere: they print addresses with passwords in them
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    os.nice(10)  # the ranks of this node come first
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)  # a stop is rank 0's affair: it says when it has saved
    rank0 = open(sys.stdin.fileno(), "rb", buffering=0, closefd=False)  # noqa: SIM115
    facts = Facts(**json.loads(rank0.readline()))

    def say(text: str) -> None:
        with contextlib.suppress(OSError):  # rank 0 was killed
            print(f"tracker {facts.tracker}: {without_secrets(text)}", file=channel, flush=True)

    with contextlib.suppress(OSError):  # some network file systems have no such locks
        (facts.folder / FOLDER).mkdir(parents=True, exist_ok=True)
        # One sender of a run at a time, to the end of this process: that of a killed rank 0 may still be at work
        lock = os.open(facts.folder / FOLDER / ".lock", os.O_WRONLY | os.O_CREAT, 0o666)
        fcntl.flock(lock, fcntl.LOCK_EX)
    # Not in the seconds that are left once rank 0 has ended: on a busy machine it may take longer than those
    with contextlib.suppress(Exception):  # the first look says why
        importlib.import_module(facts.tracker)
    sender: Sender | None = None
    pause_s, state, complained = 0.0, "", False
    while not state:
        if select.select([rank0], [], [], pause_s)[0]:
            state = rank0.readline().decode().strip() or "failed"
            signal.alarm(SENDER_END_S)  # the kernel ends this process: a package may wait for a server for ever
        begun = sender is not None
        try:
            sender = sender or Sender(facts)
            sender.look(state)
        except Exception as error:  # what packages raise has nothing in common
            if not complained:
                why = reason(error)[:200].rstrip(". ")
                say(why + (not state) * ". Training goes on; what is missing is sent once this works.")
            sender, pause_s, complained = None, SENDER_PAUSE_S, True
        else:
            if not begun:
                say(sender.tracked.address)
            pause_s, complained = SENDER_LOOK_S, False
    os._exit(1 if sender is None else 0)  # past what the packages do at the end of a process


if __name__ == "__main__":
    main()
