"""What MLflow's real server has, and what W&B's offline files have.

All attempts are one run with each step once, whatever happened. A tracker that is away changes nothing in the training.
"""

import contextlib
import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rankup.errors import UserError
from rankup.observe import tracker
from rankup.observe.metrics import cut_after
from rankup.observe.tracker import FOR_PACKAGES, Facts, Line, Sender, without_secrets
from tests.rigs.fork_server import Forks
from tests.rigs.jobs import environment, free_port, is_comparable, metrics, result, wait_for
from tests.rigs.trackers import Server, rows_of

# 8 steps an epoch
MADE_UP = ("train", "--workload", "tests.rigs.faulting_workload:build", "--batch-size", "8", "--log-every-steps", "1",
           "--eval-batch-size", "4", "--join-timeout-s", "30", "--schedule", "constant")
RUN = "0123456789abcdef"
PASSWORD = "not-for-any-file"
# The kill comes in the second epoch, so the newest checkpoint is of step 8
KILLED = {"PROBE": json.dumps({"where": "loss", "call": 16, "signal": "SIGKILL", "saved": True, "before_s": 0.5})}


def at(run: Path) -> tuple[str, ...]:
    return ("--run-dir", str(run.parent), "--name", run.name)


def written(run: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the curves that a tracker should have: name -> step and value of each point."""
    found: dict[str, list[tuple[int, float]]] = {}
    for entry in metrics(run):
        for name, value in entry.items():
            if name not in ("step", "time"):
                found.setdefault(name, []).append((entry["step"], value))
    return found


def assert_same(shown: list[tuple[int, float]], expected: list[tuple[int, float]], name: str) -> None:
    """Check that each step is there once. Speeds are not compared: of repeated steps a tracker has the first speed."""
    assert [step for step, _ in shown] == [step for step, _ in expected], name
    if is_comparable(name):
        assert [value for _, value in shown] == pytest.approx([value for _, value in expected], rel=1e-6), name


# MLflow -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("mlflow"), free_port()).up() as server:
        yield server


def mlflow_at(server: Server) -> dict[str, str]:
    # A server without passwords accepts any password
    return {"MLFLOW_TRACKING_URI": server.url.replace("//", f"//me:{PASSWORD}@")}


def parameters(run: dict[str, Any]) -> dict[str, str]:
    return {each["key"]: each.get("value", "") for each in run["data"]["params"]}


def files_with_the_password(folder: Path) -> list[str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 10
    return [str(path) for path in files if PASSWORD.encode() in path.read_bytes()]


def test_mlflow_has_one_run_for_two_attempts_and_each_step_once(forks: Forks, server: Server, tmp_path: Path) -> None:
    folder = tmp_path / "killed"
    command = (*MADE_UP, "--epochs", "3", "--tracker", "mlflow", *at(folder))
    output = forks.ends(*command, env={**mlflow_at(server), **KILLED}, code=-9)
    run = server.only_run("killed", "FAILED")  # the sender outlives its rank
    before = server.curve(run, "train/loss")
    assert_same(before, written(folder)["train/loss"], "train/loss")
    assert 8 < before[-1][0] < 16
    output += forks.ends(*command, env=mlflow_at(server))
    assert "resumed from step-00000008" in output  # steps 9 and later are repeated

    run = server.only_run("killed", "FINISHED")
    expected = written(folder)
    assert [step for step, _ in expected["train/loss"]] == list(range(1, 25))
    assert [step for step, _ in expected["eval/accuracy"]] == [8, 16, 24]
    settings = parameters(run)
    assert (settings["epochs"], settings["schedule"], settings["data_dir"]) == ("3", "constant", "null")
    shown = {each["key"] for each in run["data"]["metrics"]}
    assert shown == expected.keys()
    for name, points in expected.items():
        assert_same(server.curve(run, name), points, name)
    assert re.search(r"tracker mlflow: http://127\.0\.0\.1:\d+/#/experiments/\d+/runs/\w+", output)
    assert PASSWORD not in output
    assert files_with_the_password(folder) == []


def test_mlflow_server_that_was_down_gets_all_lines_later(forks: Forks, server: Server, tmp_path: Path) -> None:
    """The missing server costs one line, and the weights are those of a run without a tracker."""
    command = (*MADE_UP, "--tracker", "mlflow", *at(tmp_path / "late"))
    away = {"MLFLOW_TRACKING_URI": f"http://127.0.0.1:{free_port()}"}
    output = forks.ends(*command, "--epochs", "1", env=away)
    assert output.count("tracker mlflow: ") <= 2, output
    assert " Run the same command again to send the rest." in output
    forks.ends(*MADE_UP, "--epochs", "1", *at(tmp_path / "without"))
    assert result(tmp_path / "late")["digest"] == result(tmp_path / "without")["digest"]
    assert server.runs("late") == []

    output = forks.ends(*command, "--epochs", "1", env=mlflow_at(server))
    assert "is finished: 8 steps" in output
    found = server.only_run("late", "FINISHED")
    assert_same(server.curve(found, "train/loss"), written(tmp_path / "late")["train/loss"], "train/loss")

    # More epochs extend the same run. MLflow's parameters can't change
    forks.ends(*command, "--epochs", "2", env=mlflow_at(server))
    wait_for("its last step", lambda: server.curve(found, "train/loss")[-1][0] == 16)
    assert [step for step, _ in server.curve(found, "train/loss")] == list(range(1, 17))
    found = server.only_run("late", "FINISHED")
    assert parameters(found)["epochs"] == "1"


def test_mlflow_gets_more_settings_and_curves_than_one_request_takes(server: Server, tmp_path: Path) -> None:
    facts = Facts("mlflow", RUN, str(tmp_path / "many"), {"long": "x" * 7000, **{f"s{n}": n for n in range(250)}})
    facts.folder.mkdir()
    (facts.folder / "metrics.jsonl").write_text(line(1, **{f"eval/class {n}": n / 2 for n in range(1200)}))
    command, env = [sys.executable, "-W", "ignore", "-m", "rankup.observe.tracker"], FOR_PACKAGES | mlflow_at(server)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=environment(env)) as sender:
        assert sender.stdin is not None
        sender.stdin.write(f"{json.dumps(asdict(facts))}\n".encode())
        sender.stdin.flush()
        (run,) = wait_for("all curves", lambda: [
            run for run in server.runs("many") if len(run["data"].get("metrics", ())) == 1200
        ])
        sender.stdin.close()
    settings = parameters(run)
    assert (len(settings), settings["s249"], settings["long"]) == (251, "249", "x" * 6000)


def test_tracker_server_that_never_answers_delays_nothing(forks: Forks, tmp_path: Path) -> None:
    stop = {"PROBE": json.dumps({"where": "loss", "call": 6, "signal": "SIGTERM"})}
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = {"MLFLOW_TRACKING_URI": f"http://127.0.0.1:{silent.getsockname()[1]}"}
        forks.ends(*MADE_UP, "--tracker", "mlflow", *at(tmp_path / "run"), env={**address, **stop}, code=143)
    assert [entry["step"] for entry in metrics(tmp_path / "run")] == [1, 2, 3, 4]


def test_mlflow_without_an_address_is_the_users_mistake(forks: Forks, tmp_path: Path) -> None:
    output = forks.ends(*MADE_UP, "--tracker", "mlflow", *at(tmp_path / "run"), world_size=2, code=2)
    assert "tracker: MLFLOW_TRACKING_URI must be set for mlflow, got nothing." in output


# W&B ----------------------------------------------------------------------------------------------------------


def test_wandb_files_have_one_run_and_each_step_once(forks: Forks, tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = (*MADE_UP, "--epochs", "3", "--tracker", "wandb", *at(run))
    offline = {"WANDB_MODE": "offline", "WANDB_API_KEY": PASSWORD * 3}
    output = forks.ends(*command, env={**offline, **KILLED}, code=-9)
    wait_for("its end", lambda: rows_of(run).codes == [1])  # the sender outlives its rank
    (first,) = rows_of(run).ids
    (run / "run.json").unlink()  # the checkpoint knows the run's id too
    output = forks.ends(*command, env=offline)
    assert "resumed from step-00000008" in output
    assert len(list((run / "tracker" / "wandb").glob("offline-run-*"))) == 2
    rows = rows_of(run)
    assert rows.ids == {first} == {json.loads((run / "run.json").read_text())["run"]}
    assert rows.codes == [1, 0]
    for name, points in written(run).items():
        assert_same([(row["step"], row[name]) for row in rows.history if name in row], points, name)
    assert rows.config["epochs"] == 3
    assert files_with_the_password(run) == []
    # There are no files about the machine, its packages, or the repository in which the run was started
    assert not [*run.rglob("offline-run-*/files/*")]


def test_wandb_without_a_key_gives_one_line(forks: Forks, tmp_path: Path) -> None:
    output = forks.ends(
        *MADE_UP, "--epochs", "1", "--tracker", "wandb", *at(tmp_path / "run"), env={"HOME": str(tmp_path)}
    )
    said = [line for line in output.splitlines() if line.startswith("tracker wandb: ")]
    assert 1 <= len(said) <= 2, output
    assert "api_key" in said[0] or "API key" in said[0]


# Units --------------------------------------------------------------------------------------------------------


def line(step: int, **values: float) -> str:
    values = values or {"train/loss": 1 / step}
    return json.dumps({"step": step, "time": 1.0, **values}) + "\n"


def test_sender_sends_each_line_once_despite_failures_and_a_cut_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracked = SimpleNamespace(sent=[], fails=False, address="nowhere", end=lambda state: None)

    def log(lines: list[Line]) -> None:
        if tracked.fails:
            raise TimeoutError
        tracked.sent += lines

    tracked.log = log
    monkeypatch.setitem(tracker.RUNS, "mlflow", lambda facts: tracked)
    monkeypatch.setattr(tracker, "MOST_LINES", 2)
    path, facts = tmp_path / "metrics.jsonl", Facts("mlflow", RUN, str(tmp_path), {})
    one = Sender(facts)
    path.write_text(line(1))
    one.look()
    path.write_text(line(1) + line(2) + line(3)[:20])
    tracked.fails = True
    with pytest.raises(TimeoutError):
        one.look()
    one = Sender(facts)
    # job.log may be called for each of several data sets
    both = [line(4, **{"eval/clean": 0.9}), line(4, **{"eval/noisy": 0.7})]
    path.write_text("".join([line(1), line(2), line(3), line(4), *both, line(5), line(6), line(7), line(8)]))
    tracked.fails = False
    one.look()

    cut_after(path, 4, 4)  # as the next attempt does after the kill of this sender's rank
    with path.open("a") as file:
        file.write(line(5) + line(6))
    one.look()
    new = Sender(facts)
    new.look("stopped")
    with path.open("a") as file:  # longer than before, so the old sender is in the middle of a line
        file.write("".join(line(step) for step in range(70, 76)))
    with contextlib.suppress(ValueError):
        one.look("failed")
    new.look("stopped")
    curve = [Line(step, 1.0, {"train/loss": 1 / step}) for step in (*range(1, 9), *range(70, 76))]
    named = [Line(4, 1.0, {"eval/clean": 0.9}), Line(4, 1.0, {"eval/noisy": 0.7})]
    assert tracked.sent == [*curve[:4], *named, *curve[4:]]


def test_secrets_are_removed_from_tracker_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "")
    text = f"http://me:word@host:5000/api: bad key {'0' * 40}, s3://bucket/x"
    assert without_secrets(text) == "http://host:5000/api: bad key ***, s3://bucket/x"
    for password in ("wo@rd", "wo/rd", "w@o/r@d", "12/3@4"):
        assert without_secrets(f"bad: http://me:{password}@host:5000/api now") == "bad: http://host:5000/api now"
    assert without_secrets("http://host:5000/#/runs/1 of s3://b/x@2") == "http://host:5000/#/runs/1 of s3://b/x@2"


def test_missing_tracker_package_is_the_users_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracker.importlib.util, "find_spec", lambda name: None)
    way_out = r"on rank 0's node\. pip install 'rankup\[wandb\]', or '\.\[wandb\]' in a checkout\."
    with pytest.raises(UserError, match=f"wandb must be installed {way_out}"):
        tracker.check("wandb")
