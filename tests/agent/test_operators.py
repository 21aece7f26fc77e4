"""What operators ask of `rankup launch`: a command at the end, a check before a node joins, a cloud's notice."""

import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rankup.agent.logs import host_name
from rankup.agent.operators import TOO_LATE, run
from tests.agent.test_launch import WAITS, add_node, launch, nodes, pid_of, write
from tests.rigs.foreign_scripts import BE_SCRIPT, WARN
from tests.rigs.fork_server import Forks
from tests.rigs.jobs import Job, ended, free_port, lives, start, wait_for


def told(folder: Path) -> list[dict[str, Any]]:
    path = folder / "told"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def on_end(folder: Path) -> tuple[str, str]:
    return "--on-end", f"cat >> {folder}/told"


# At the end -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "code", "cause"), [
    ("", 0, ""), ("sys.exit(3 * rank)", 3, "rank 1 on {host} ended with 3"),
])
def test_end_of_a_job_is_told_once(tmp_path: Path, text: str, code: int, cause: str) -> None:
    with ended(nodes(tmp_path, text, *on_end(tmp_path))) as job:
        assert job.wait() == [code, code], job.output
    line, = told(tmp_path)
    assert line.pop("seconds") > 0
    assert line.pop("cause").startswith(cause.format(host=host_name()))
    assert line == {"run": "job", "code": code, "step": 0, "host": host_name(), "requeued": False}


def test_end_of_a_stopped_job_is_told_and_a_failing_command_changes_no_code(tmp_path: Path) -> None:
    command = f"cat > {tmp_path}/told; echo no route to the chat; exit 7"
    with ended(launch(tmp_path, WAITS, "--on-end", command, nproc=1)) as job:
        pid_of(tmp_path, 0)
        job.processes[0].send_signal(signal.SIGTERM)
        assert job.wait() == [143]
        assert "--on-end: the command ended with 7: no route to the chat" in job.output
    assert [line["code"] for line in told(tmp_path)] == [143]


OWN = (
    "import rankup, os, signal, sys\njob = rankup.init('runs/mine', tensorboard=False, on_end='cat >> told')\n"
    "for step in job.steps({}):\n    with job.step():\n        {}\njob.finish()\n"
)
STOPS = "os.kill(os.getpid(), signal.SIGTERM) if step == 1 else signal.sigtimedwait([], 0.05)"
FAILS = "1 / (job.rank or step != 2)"
LAUNCH = ("launch", "--nproc=2")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
ENDS = {
    "pass": (0, 7, ""), STOPS: (143, None, ""), FAILS: (1, 2, "ZeroDivisionError: division by zero"),
}


def own(folder: Path, act: str = "pass") -> Path:
    """Write a script that names a command in `rankup.init`, and does `act` in each step, of which most have seven."""
    (folder / "own.py").write_text(OWN.format(10**6 if act == STOPS else 7, act))
    return folder / "own.py"


def test_end_names_the_step_and_the_run_of_rankup_init(forks: Forks, tmp_path: Path) -> None:
    """The command of `launch` outranks that of the script."""
    line = ("launch", "--nproc=2", "--on-end", "cat > first", own(tmp_path))
    forks.ends(*line, cwds=[tmp_path])
    line = json.loads((tmp_path / "first").read_text())
    assert (line["run"], line["code"], line["step"]) == ("mine", 0, 7)
    assert told(tmp_path) == []


@pytest.mark.parametrize(("starter", "act"), [
    ((), "pass"), ((), STOPS), ((), FAILS), (LAUNCH, FAILS), (TORCHRUN, STOPS),
], ids=["alone", "alone, stopped", "alone, failed", "launch, failed", "torchrun, stopped"])
def test_command_of_the_script_is_told_the_end_under_each_launcher(
    starter: tuple[str, ...], act: str, forks: Forks, tmp_path: Path
) -> None:
    code, step, cause = ENDS[act]
    how: dict[str, Any] = {} if starter == LAUNCH else {"preload": BE_SCRIPT, "env": WARN}
    whole = 1 if code and starter == TORCHRUN else code
    output = forks.ends(*starter, own(tmp_path, act), cwds=[tmp_path], code=whole, **how)
    line, = told(tmp_path)
    assert (line["run"], line["code"], step or line["step"]) == ("mine", code, line["step"]), output
    assert cause in line["cause"]


def test_command_of_the_script_is_told_of_a_step_that_hangs(forks: Forks, tmp_path: Path) -> None:
    """The watchdog ends this process, and not the script."""
    script = own(tmp_path, "signal.pause()")
    script.write_text(script.read_text().replace("on_end=", "step_timeout_s=1, on_end="))
    forks.ends(script, cwds=[tmp_path], preload=BE_SCRIPT, code=171)
    line, = told(tmp_path)
    assert (line["code"], "1 s" in line["cause"]) == (171, True), line


def test_command_that_the_settings_name_is_told_the_end(forks: Forks, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(f"on_end: cat >> {tmp_path}/told\nrun_dir: {tmp_path}\nname: mine\n")
    forks.ends("train", "--config", tmp_path / "mine.yaml", "--dataset=fake", "--max-steps=2", world_size=2)
    forks.ends("train", "--config", tmp_path / "mine.yaml", "--dataset=fake", "--max-steps=2", "--lr=9", code=2)
    assert [(line["run"], line["code"], line["step"]) for line in told(tmp_path)] == [("mine", 0, 2), ("mine", 2, 2)]
    assert "lr" in told(tmp_path)[1]["cause"]


@pytest.mark.parametrize(("given", "got"), [("print", "built-in"), ("'x' * 2000", "2000")])
def test_command_that_cannot_be_run_is_refused(given: str, got: str, forks: Forks, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(f"import rankup\nrankup.init(on_end={given})\n")
    output = forks.ends(tmp_path / "own.py", cwds=[tmp_path], preload=BE_SCRIPT, code=2)
    assert "on_end must be" in output
    assert got in output


def test_end_in_a_slurm_job_is_told_by_the_batch_script(tmp_path: Path) -> None:
    """The agents of a step may be restarted. So they only note the command of the script."""
    (tmp_path / ".slurm-7").touch()
    line = (sys.executable, "-m", "rankup", "launch", "--here", "--nproc=1", own(tmp_path))
    with ended(start(*line, env={"SLURM_JOB_ID": "7"}, cwd=tmp_path)) as job:
        assert job.wait() == [0], job.output
    assert told(tmp_path) == []
    kind, _, noted = (tmp_path / ".slurm-7").read_text().partition(" ")
    assert (kind, json.loads(noted)) == ("on_end", ["cat >> told", str(tmp_path / "runs/mine")])


def test_command_that_hangs_is_killed_with_what_it_started(tmp_path: Path) -> None:
    command = f"sleep 600 & echo $! > {tmp_path}/pid; cat; wait"
    assert run(command, given="said\n", limit_s=1.0) == (TOO_LATE, "said")
    wait_for("its child is gone", lambda: not lives(int((tmp_path / "pid").read_text())))
    assert run("exit 5", limit_s=60) == (5, "")
    assert run("kill -9 $$", limit_s=60)[0] == 137


# Is the node fit? -----------------------------------------------------------------------------------------------------


def test_node_that_is_not_fit_waits_and_says_why(tmp_path: Path) -> None:
    """Node 1 passes its check at first, fails it once its rank was killed, and passes it again later."""
    job, port, fit = Job(), free_port(), tmp_path / "fit"
    fit.touch()
    for node in range(2):
        check = f"test {node} = 0 || test -e {fit} || {{ touch {tmp_path}/refused; echo GPU 3 has failed; exit 20; }}"
        text = "say('here')\nwait_for('../go')\n"
        add_node(job, tmp_path / f"node{node}", text, f"--health-check={check}", node=node, num_nodes=2, port=port)
    with ended(job):
        victim = pid_of(tmp_path / "node1", 1)
        fit.unlink()
        os.kill(victim, signal.SIGKILL)
        wait_for("the check after the kill", (tmp_path / "refused").exists)
        (tmp_path / "refused").unlink()
        wait_for("the next check", (tmp_path / "refused").exists)
        fit.touch()
        pid_of(tmp_path / "node1", 1, 1)
        (tmp_path / "go").touch()
        assert job.wait() == [0, 0], job.output
        assert "this node is not fit and leaves the job for now: --health-check ended with 20: GPU 3" in job.output
        assert "this node is not fit and waits: --health-check ended with 20: GPU 3 has failed" in job.output
        assert "this node is fit now, and joins" in job.output


def test_node_that_is_stopped_while_it_is_not_fit_ends(tmp_path: Path) -> None:
    with ended(launch(tmp_path, WAITS, f"--health-check=echo x >> {tmp_path}/refused; exit 1", nproc=1)) as job:
        wait_for("two checks", lambda: (tmp_path / "refused").exists() and "x\nx" in (tmp_path / "refused").read_text())
        job.processes[0].send_signal(signal.SIGTERM)
        assert job.wait() == [143], job.output
    assert not (tmp_path / "here-0-0").exists()


# A cloud takes the machine away ---------------------------------------------------------------------------------------


class Cloud(BaseHTTPRequestHandler):
    """The metadata server of `kind`, which gives notice once `taken` is set."""

    kind, taken = "", threading.Event()

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, text: str | None) -> None:
        self.send_response(404 if text is None else 200)
        self.end_headers()
        self.wfile.write((text or "").encode())

    def do_PUT(self) -> None:
        self.answer("secret" if self.kind == "AWS" and self.path == "/latest/api/token" else None)

    def do_GET(self) -> None:
        taken, answer = self.taken.is_set(), None
        if self.kind == "AWS" and self.headers["X-aws-ec2-metadata-token"] == "secret":
            action = json.dumps({"action": "terminate", "time": "2026-11-29T01:02:03Z"})
            answer = action if taken and self.path == "/latest/meta-data/spot/instance-action" else None
        elif self.kind == "GCP" and self.headers["Metadata-Flavor"] == "Google":
            answer = str(taken).upper() if self.path == "/computeMetadata/v1/instance/preempted" else None
        elif self.kind == "Azure" and self.headers["Metadata"] == "true":
            others = {"EventType": "Reboot", "Resources": ["vm_7"], "NotBefore": ""}
            neighbour = {"EventType": "Preempt", "Resources": ["vm_8"], "NotBefore": ""}
            own = {"EventType": "Preempt", "Resources": ["vm_7"], "NotBefore": "Sun, 29 Nov 2026 01:02:03 GMT"}
            events = json.dumps({"Events": [others, neighbour, *([own] if taken else [])]})
            answer = "vm_7" if self.path.startswith("/metadata/instance/compute/name") else events
        self.answer(answer)


@contextmanager
def cloud(name: str) -> Iterator[tuple[str, threading.Event]]:
    taken = threading.Event()
    with ThreadingHTTPServer(("127.0.0.1", 0), type("Its", (Cloud,), {"kind": name, "taken": taken})) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", taken
        server.shutdown()


@pytest.mark.parametrize(("name", "says"), [
    ("AWS", "AWS will terminate this machine at 2026-11-29T01:02:03Z"), ("GCP", "GCP preempts this machine"),
    ("Azure", "Azure plans Preempt for this machine, not before Sun, 29 Nov 2026 01:02:03 GMT"),
])
def test_spot_machine_that_is_taken_away_leaves_as_after_sigterm(tmp_path: Path, name: str, says: str) -> None:
    with cloud(name) as (url, taken):
        line = ("-m", "rankup", "launch", "--spot", f"--run-dir={tmp_path}/runs", *on_end(tmp_path))
        env = {"RANKUP_METADATA_URL": url, "http_proxy": "http://127.0.0.1:1"}
        with ended(start(sys.executable, *line, write(tmp_path, WAITS), env=env)) as job:
            pid_of(tmp_path, 0)
            taken.set()
            assert job.wait() == [143], job.output
            assert f"{says}: this node leaves as after SIGTERM" in job.output
    assert [line["code"] for line in told(tmp_path)] == [143]


def test_machine_without_a_metadata_server_says_so(forks: Forks, tmp_path: Path) -> None:
    line, env = ("launch", "--spot", f"--run-dir={tmp_path}/runs"), {"RANKUP_METADATA_URL": "http://127.0.0.1:1"}
    with forks.running(*line, write(tmp_path, "wait_for('go')"), env=env) as job:
        job.wait_for("--spot: no metadata server of AWS, GCP or Azure answers")
        (tmp_path / "go").touch()
        assert job.wait() == [0], job.output
