"""Runs over HTTP: what Prometheus and programs read, and what a TrainJob of Kubeflow is told."""

import json
import sys
import threading
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rankup import cli
from rankup.errors import UserError
from rankup.observe.serve import metrics, server
from tests.rigs.fork_server import Forks
from tests.rigs.jobs import ended, free_port, start, wait_for

LOOP = (
    "import rankup\njob = rankup.init('runs/mine', tensorboard=False, log_every_steps=2)\n"
    "for step in job.steps(8):\n    with job.step(loss=0.5):\n        pass\njob.finish()\n"
)


def read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return str(answer.read().decode())


def test_status_serves_a_run_to_prometheus_and_to_programs(forks: Forks, tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    forks.ends("launch", "--nproc=2", tmp_path / "loop.py", cwds=[tmp_path])
    line = ("-m", "rankup", "status", f"--run-dir={tmp_path}/runs", "--serve", port := str(free_port()))
    with ended(start(sys.executable, *line)) as job:

        def answer() -> str:
            try:
                return read(f"http://127.0.0.1:{port}/metrics")
            except urllib.error.URLError:
                return ""

        wait_for("an answer", answer)
        samples = dict(each.rsplit(" ", 1) for each in answer().splitlines() if each[0] != "#")
        found, = json.loads(read(f"http://127.0.0.1:{port}/status.json"))
        with pytest.raises(urllib.error.HTTPError, match="404"):
            read(f"http://127.0.0.1:{port}/../../etc/passwd")
        job.kill()
    assert samples['rankup_state{run="mine",state="finished"}'] == "1"
    assert samples['rankup_step{run="mine"}'] == samples['rankup_total_steps{run="mine"}'] == "8"
    assert samples['rankup_attempts_total{run="mine"}'] == "1"
    assert 0 <= float(samples['rankup_goodput_ratio{run="mine"}']) <= 1
    assert (found["run"], found["step"], found["state"]) == ("mine", 8, "finished")


def run(**more: Any) -> dict[str, Any]:
    return {
        "run": 'a"b', "silent": False, "state": "running", "step": 3, "total_steps": None, "last_step_s": 1.5,
        "last_sign_s": 0.1, "goodput": None, "remaining_s": None, "world_size": 2, "restarts": [], **more,
    }


def test_metrics_count_lost_attempts_and_deadlines_and_leave_out_what_is_unknown() -> None:
    late = "lost a peer at step 3: rank 1 on a: step (step 3) took longer than 600 s"
    ends = [(None, ""), (171, late), (137, "killed"), (143, "stopped"), (1, "KeyError")]
    text = metrics([run(restarts=[{"code": code, "why": why} for code, why in ends])])
    lines = text.splitlines()
    name = r'run="a\"b"'
    assert f"rankup_lost_attempts_total{{{name}}} 3" in lines
    assert f"rankup_deadlines_total{{{name}}} 1" in lines
    assert f"rankup_last_step_age_seconds{{{name}}} 1.5" in lines
    assert "rankup_goodput_ratio" not in text
    assert len(lines) == len({*lines})


def test_address_that_is_taken_or_is_none_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    taken = r"--serve must be a free address of this machine, got 127\.0\.0\.1:\d+ \("
    with server(("127.0.0.1", 0), tmp_path) as first, pytest.raises(UserError, match=taken):
        server(("127.0.0.1", first.server_port), tmp_path)
    assert cli.main(["status", "--serve", "no"]) == 2
    assert "--serve must be a port, or HOST:PORT, got no" in capsys.readouterr().err


def test_trainjob_is_told_the_progress_of_its_run(forks: Forks, tmp_path: Path) -> None:
    told = []

    class Controller(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            told.append((self.path, self.headers["Authorization"], content["trainerStatus"]))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    (tmp_path / "loop.py").write_text(LOOP)
    (tmp_path / "token").write_text("secret\n")
    with ThreadingHTTPServer(("127.0.0.1", 0), Controller) as controller:
        threading.Thread(target=controller.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{controller.server_port}/apis/trainer/v1/status"
        env = {"KUBEFLOW_TRAINER_STATUS_URL": url, "KUBEFLOW_TRAINER_STATUS_TOKEN": f"{tmp_path}/token"}
        output = forks.ends("launch", "--nproc=2", tmp_path / "loop.py", cwds=[tmp_path], env=env)
        controller.shutdown()
    assert "secret" not in output
    path, token, last = told[-1]
    assert (path, token, last["progressPercentage"]) == ("/apis/trainer/v1/status", "Bearer secret", 100)
    assert {"name": "train/loss", "value": "0.5"} in last["metrics"]
