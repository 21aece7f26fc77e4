"""What Kubeflow Trainer's address is told of a training: over real TLS, and never at the expense of the training.

The server here refuses what the schema of a TrainJob (trainer.kubeflow.org/v1alpha1) and KEP-2779 refuse.
"""

import json
import re
import ssl
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.rigs.fork_server import Forks
from train.process.launchers.platform_status import ADDRESS, CERTIFICATE, TOKEN, PlatformStatus

PATH = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/team/trainjobs/job/status"
SECRET = "eyJhbGciOiJSUzI1NiJ9.of-this-job.aaaa"
TRAIN = ("train", "--dataset", "digits", "--model", "mlp", "--max-steps", "20", "--tensorboard=false", "--name", "run")


class Server(HTTPServer):
    """Listens on a free port of 127.0.0.1. `requests`: path and body of each that had the right token."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.code = 200
        self.certificate = make_certificate(folder, "server")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certificate, self.certificate.with_suffix(".key"))
        self.socket = context.wrap_socket(self.socket, server_side=True)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that does not trust us: no traceback."""

    def environment(self, folder: Path, token: str = SECRET) -> dict[str, str]:
        (folder / "token").write_text(f"{token}\n")
        return {
            ADDRESS: f"https://127.0.0.1:{self.server_port}{PATH}", CERTIFICATE: str(self.certificate),
            TOKEN: str(folder / "token"),
        }


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        code = self.server.code if self.headers["Authorization"] == f"Bearer {SECRET}" else 403
        if code == 200:
            self.server.requests.append((self.path, body))
        self.send_response(code)
        self.end_headers()

    def log_message(self, *_: Any) -> None: ...


def make_certificate(folder: Path, name: str) -> Path:
    """A certificate for 127.0.0.1 that is its own authority; its key lies beside it."""
    certificate = folder / f"{name}.crt"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
               "-days", "2", "-subj", "/CN=status", "-addext", "subjectAltName=IP:127.0.0.1",
               "-keyout", certificate.with_suffix(".key"), "-out", certificate]
    subprocess.run(command, check=True, capture_output=True)
    return certificate


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with Server(tmp_path) as made:
        thread = threading.Thread(target=made.serve_forever, daemon=True)
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def check_schema(body: dict[str, Any]) -> None:
    """What the API server checks of `status.trainerStatus`."""
    assert body.keys() == {"trainerStatus"}
    status = body["trainerStatus"]
    assert status.keys() <= {"progressPercentage", "estimatedRemainingSeconds", "metrics", "lastUpdatedTime"}
    assert type(status["progressPercentage"]) is int
    assert 0 <= status["progressPercentage"] <= 100
    assert type(status.get("estimatedRemainingSeconds", 0)) is int
    assert status.get("estimatedRemainingSeconds", 0) >= 0
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", status["lastUpdatedTime"])
    assert len(status["metrics"]) <= 256
    for metric in status["metrics"]:
        assert metric.keys() == {"name", "value"}
        assert all(isinstance(text, str) and 1 <= len(text) <= 64 for text in metric.values())


def everything_in(folder: Path) -> str:
    return "".join(path.read_text(errors="replace") for path in folder.rglob("*") if path.is_file())


def test_progress_of_a_training_arrives(forks: Forks, tmp_path: Path, server: Server) -> None:
    run_dir = tmp_path / "runs"
    codes, output = forks.run(
        *TRAIN, "--run-dir", str(run_dir), world_size=2, env=server.environment(tmp_path)
    )
    assert codes == [0, 0], output
    assert server.requests
    for path, body in server.requests:
        assert path == PATH
        check_schema(body)
    last = server.requests[-1][1]["trainerStatus"]
    assert (last["progressPercentage"], last["estimatedRemainingSeconds"]) == (100, 0)
    assert {"train/loss", "eval/accuracy"} <= {metric["name"] for metric in last["metrics"]}
    assert SECRET not in output + everything_in(run_dir)


@pytest.mark.parametrize("wrong", ["another certificate", "another token", "no token", "two tokens", "http", "500"])
def test_what_does_not_arrive_is_said_once_and_ends_no_training(
    forks: Forks, tmp_path: Path, server: Server, wrong: str
) -> None:
    env, says = server.environment(tmp_path), "answered 403"
    if wrong == "another certificate":
        env[CERTIFICATE], says = str(make_certificate(tmp_path, "other")), "CERTIFICATE_VERIFY_FAILED"
    elif wrong == "another token":
        env = server.environment(tmp_path, "another")
    elif wrong == "no token":
        env[TOKEN], says = str(tmp_path / "missing"), "No such file"
    elif wrong == "two tokens":  # http.client would quote them in its error
        env, says = server.environment(tmp_path, f"{SECRET}\n{SECRET}"), "holds no token"
    elif wrong == "http":
        env[ADDRESS], says = env[ADDRESS].replace("https", "http"), "must begin with https://"
    else:
        server.code, says = 500, "answered 500"
    run_dir = tmp_path / "runs"
    codes, output = forks.run(*TRAIN, "--run-dir", str(run_dir), env=env)
    assert codes == [0], output
    assert server.requests == []
    assert output.count("the progress could not be sent to 127.0.0.1") == 1
    assert says in output
    assert SECRET not in output + everything_in(run_dir)


def test_an_address_that_never_answers_ends_no_training(forks: Forks, tmp_path: Path, server: Server) -> None:
    """It accepts the connection and says nothing, as a machine behind a broken load balancer."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as silent:
        env = server.environment(tmp_path)
        env[ADDRESS] = f"https://127.0.0.1:{silent.getsockname()[1]}{PATH}"
        codes, output = forks.run(*TRAIN, "--run-dir", str(tmp_path / "runs"), env=env)
    assert codes == [0], output
    assert "finished after 20 steps" in output


def test_long_names_and_many_metrics_are_cut_to_what_the_schema_takes() -> None:
    status = PlatformStatus("https://127.0.0.1:1", certificate="", token="", warn=lambda line: None)
    metrics = {f"{number:03d}{'x' * 100}": 1 / 3 for number in range(300)}
    status.tell(step=199, total_steps=200, finished=False, remaining_s=None, metrics=metrics)
    assert status._newest is not None
    check_schema(status._newest)
    assert status._newest["trainerStatus"]["progressPercentage"] == 99
    status.tell(step=200, total_steps=200, finished=False, remaining_s=0.4, metrics={})
    assert status._newest["trainerStatus"]["progressPercentage"] == 99  # it still saves
    status.close()


def test_nothing_is_started_where_no_platform_asks() -> None:
    assert PlatformStatus.from_environment({}, warn=print) is None
