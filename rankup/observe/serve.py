"""How runs stand, for programs: `/metrics` for Prometheus and `/status.json` over HTTP, and the progress of Kubeflow's
TrainJob. It reads the files of runs, as `rankup status` does. No torch here."""

import json
import logging
import ssl
import threading
import time
import urllib.request
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from rankup.env.launchers import ProgressEndpoint
from rankup.errors import PEER_LOST, STOPPED, UserError
from rankup.observe.status import look, status
from rankup.timing import FEED_S, LAST_MESSAGE_S

log = logging.getLogger("rankup")
PERCENT = 100


def _lost(run: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the earlier attempts that ended because a rank, or its machine, was lost."""
    return [end for end in run["restarts"] if end["code"] is None or (end["code"] >= 128 and end["code"] != STOPPED)]


# Name, type and help of each metric, and its value of what `look` returns; None is left out
METRICS: tuple[tuple[str, str, str, Callable[[dict[str, Any]], float | None]], ...] = (
    ("step", "gauge", "Finished steps.", lambda run: run["step"]),
    ("total_steps", "gauge", "Steps of the whole run.", lambda run: run["total_steps"]),
    ("last_step_age_seconds", "gauge", "Time since the newest finished step of a running job.",
     lambda run: run["last_step_s"]),
    ("heartbeat_age_seconds", "gauge", "Time since the newest heartbeat.", lambda run: run["last_sign_s"]),
    ("goodput_ratio", "gauge", "Share of all time that went into steps that counted.",
     lambda run: run["goodput"] and run["goodput"]["share"]),
    ("remaining_seconds", "gauge", "Estimated time to the end.", lambda run: run["remaining_s"]),
    ("ranks", "gauge", "Ranks of the newest attempt.", lambda run: run["world_size"]),
    ("attempts_total", "counter", "Attempts so far.", lambda run: run["goodput"] and run["goodput"]["attempts"]),
    ("lost_attempts_total", "counter", "Attempts that ended because a rank was lost.", lambda run: len(_lost(run))),
    ("deadlines_total", "counter", "Attempts that ended because a deadline passed.",
     lambda run: sum(end["code"] == PEER_LOST and "took longer than" in end["why"] for end in run["restarts"])),
)


def metrics(runs: list[dict[str, Any]]) -> str:
    """Return what Prometheus reads. `runs`: what `look` returned.

    Format: https://prometheus.io/docs/instrumenting/exposition_formats/#text-based-format
    """
    lines = ["# HELP rankup_state 1 for the state that the run is in.", "# TYPE rankup_state gauge"]
    names = [run["run"].replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n") for run in runs]
    for name, run in zip(names, runs, strict=True):
        state = "silent" if run["silent"] else run["state"]
        lines.append(f'rankup_state{{run="{name}",state="{state}"}} 1')
    for metric, kind, text, value_of in METRICS:
        found = [(name, value_of(run)) for name, run in zip(names, runs, strict=True)]
        samples = [f'rankup_{metric}{{run="{name}"}} {value}' for name, value in found if value is not None]
        if samples:
            lines += [f"# HELP rankup_{metric} {text}", f"# TYPE rankup_{metric} {kind}", *samples]
    return "\n".join(lines) + "\n"


def server(address: tuple[str, int], runs: Path, run: str = "") -> ThreadingHTTPServer:
    """Return a server of the run, or of all runs in `runs`. Raises UserError if the address can't be used."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            try:
                found = json.loads(text := status(runs, run, as_json=True))
                if self.path == "/metrics":
                    every = found if isinstance(found, list) else [found]
                    self._answer(200, metrics(every), "text/plain; version=0.0.4")
                elif self.path == "/status.json":
                    self._answer(200, text, "application/json")
                else:
                    self._answer(404, "/metrics and /status.json are here\n", "text/plain")
            except UserError as error:
                self._answer(500, f"{error}\n", "text/plain")

        def _answer(self, code: int, text: str, kind: str) -> None:
            content = text.encode()
            self.send_response(code)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass  # Prometheus asks every few seconds

    try:
        return ThreadingHTTPServer(address, Handler)
    except OSError as error:
        where = ":".join(map(str, address))
        raise UserError(f"--serve must be a free address of this machine, got {where} ({error.strerror}).") from None


def feed(endpoint: ProgressEndpoint, run_dir: Callable[[], Path], leads: Callable[[], bool]) -> Callable[[], None]:
    """Tell the controller of a TrainJob every FEED_S how far the run is, while this node leads. Returns a function that
    tells it once more and ends. The endpoint is alpha in Kubeflow Trainer 2.2, behind the gate TrainJobStatus:
    https://github.com/kubeflow/trainer/tree/master/docs/proposals/2779-trainjob-progress"""
    over, said = threading.Event(), threading.Event()

    def tell() -> None:
        run = look(run_dir(), now=time.time())
        step, total = run["step"], run["total_steps"]
        about: dict[str, Any] = {"lastUpdatedTime": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
        about["metrics"] = [{"name": name, "value": str(value)} for name, value in sorted(run["metrics"].items())]
        if run["state"] == "finished":
            about["progressPercentage"] = PERCENT
        elif step is not None and total:
            about["progressPercentage"] = min(PERCENT, PERCENT * step // total)
        if run["remaining_s"] is not None:
            about["estimatedRemainingSeconds"] = int(run["remaining_s"])
        token = Path(endpoint.token).read_text().strip()  # it is renewed while the job runs
        request = urllib.request.Request(
            endpoint.url, json.dumps({"trainerStatus": about}).encode(),
            {"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
        )
        context = ssl.create_default_context(cafile=endpoint.ca_cert) if endpoint.url.startswith("https:") else None
        with urllib.request.urlopen(request, timeout=LAST_MESSAGE_S, context=context):
            pass

    def work() -> None:
        ended = False
        while not ended:
            ended = over.wait(FEED_S)
            if leads():
                try:
                    tell()
                except (OSError, LookupError, TypeError, ValueError, ArithmeticError) as error:
                    level = log.debug if said.is_set() else log.warning
                    level("the cluster does not take the progress of this run: %s", error)
                    said.set()

    thread = threading.Thread(target=work, name="progress", daemon=True)
    thread.start()

    def end() -> None:
        over.set()
        thread.join(2 * LAST_MESSAGE_S)

    return end
