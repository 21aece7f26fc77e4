"""One live attempt owns a run directory, with the kernel's locks or without, on one machine or several."""

import errno
import fcntl
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import rankup.places.lease
from rankup.errors import UserError
from rankup.places.lease import Lease, kernel_id
from tests.rigs.checkpoints import steps, train
from tests.rigs.fork_server import Forks
from tests.rigs.jobs import ROOT, environment, result

FOR_EVER_S = 600.0  # a wait of this length makes a test fail
pytestmark = pytest.mark.timeout(400)
OWNER = """
import sys, rankup.places.lease
from pathlib import Path
from rankup.places.lease import Lease

rankup.places.lease.LOCK_S = 0.5
if sys.argv[2]:
    from tests.places import test_lease
    getattr(test_lease, sys.argv[2])()
try:
    with Lease(Path(sys.argv[1]), f"attempt-{sys.argv[3]}", beat_s=0.1):
        print("held", flush=True)
        sys.stdin.read()
except Exception as error:
    print(f"{type(error).__name__}: {error}", flush=True)
    sys.stdin.read()
"""


def short_waits() -> None:
    rankup.places.lease.LOCK_S = 0.5
    assert Lease.__init__.__kwdefaults__ is not None
    Lease.__init__.__kwdefaults__["life_s"] = 1.5


def no_locks() -> None:
    """Simulate a file system without locks, such as NFS without its lock service."""

    def lockf(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    fcntl.lockf = lockf  # type: ignore[assignment]


def on_machine_one() -> None:
    short_waits()
    no_locks()
    rankup.places.lease.kernel_id = lambda: "one"


def on_machine_two() -> None:
    on_machine_one()
    rankup.places.lease.kernel_id = lambda: "two"


def start_owner(folder: Path, where: str = "", *, number: int = 1) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", OWNER, str(folder), where, str(number)],
        env=environment({"PYTHONPATH": str(ROOT)}), text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


@contextmanager
def owner(folder: Path, where: str = "") -> Iterator[subprocess.Popen[str]]:
    process = start_owner(folder, where)
    try:
        assert said(process) == "held"
        yield process
    finally:
        end(process)


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rankup.places.lease, "LOCK_S", 0.5)
    monkeypatch.setattr(fcntl, "lockf", fcntl.lockf)  # so that monkeypatch restores it


def held(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "lease.json").read_text())  # type: ignore[no-any-return]


# One machine --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGKILL, None], ids=str)
def test_lease_of_an_owner_that_has_ended_is_taken_at_once(tmp_path: Path, number: int | None) -> None:
    """The owner was killed, or released its lease at its end."""
    with owner(tmp_path) as process:
        if number is None:
            process.communicate("")
        else:
            rankup.places.lease.LOCK_S = FOR_EVER_S
            threading.Timer(0.2, process.send_signal, [number]).start()  # it may end a moment later
        assert held(tmp_path)["released"] == (number is None)
        with Lease(tmp_path, "second", life_s=FOR_EVER_S):
            assert held(tmp_path)["attempt"] == "second"


def test_stopped_owner_on_the_same_machine_is_alive(tmp_path: Path) -> None:
    with owner(tmp_path) as process:
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(UserError, match="live attempt"), Lease(tmp_path, "second", life_s=0.2):
            pass


@pytest.mark.parametrize("content", ["", "[]", '{"token": 1}'])
def test_meaningless_lease_is_taken(tmp_path: Path, content: str) -> None:
    (tmp_path / "lease.json").write_text(content)
    with Lease(tmp_path, "second", life_s=0.3) as lease:
        lease.check()
        assert held(tmp_path)["attempt"] == "second"


def test_one_of_several_simultaneous_attempts_gets_the_lease(tmp_path: Path) -> None:
    processes = [start_owner(tmp_path, number=number) for number in range(5)]
    try:
        answers = [said(process) for process in processes]
        assert answers.count("held") == 1, answers
        assert sum(answer.startswith("UserError: run_dir: ") for answer in answers) == 4, answers
    finally:
        for process in processes:
            end(process)


def test_workers_forked_by_the_owner_do_not_hold_its_lock(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    with Lease(tmp_path, "first"):
        if (child := os.fork()) == 0:
            os.close(writing)
            os.read(reading, 1)
            os._exit(0)
    try:
        with owner(tmp_path):
            pass
    finally:
        os.close(writing)
        os.waitpid(child, 0)
        os.close(reading)


@pytest.mark.parametrize("beat", [1, 2])
def test_metrics_file_is_copied_if_the_last_owner_may_not_have_done_it(beat: int, tmp_path: Path) -> None:
    """The owner before the last one may wake up, with the old file still open."""
    killed = {"token": "second", "kernel": kernel_id(), "beat": beat, "released": False}
    (tmp_path / "lease.json").write_text(json.dumps(killed))
    (opened := tmp_path / "metrics.jsonl").touch()
    number = opened.stat().st_ino
    with Lease(tmp_path, "third"):
        assert (opened.stat().st_ino != number) == (beat == 1)


# Without locks, and other machines ----------------------------------------------------------------------------


@pytest.mark.parametrize(("where", "locks"), [("no_locks", False), ("on_machine_one", False), ("on_machine_one", True)])
def test_owner_lives_by_its_beats_without_locks_or_on_another_machine(tmp_path: Path, where: str, locks: bool) -> None:
    """With `locks` each machine has its own, as with NFS mounted nolock: the free lock here proves nothing."""
    if not locks:
        no_locks()
    with owner(tmp_path, where) as process:
        with pytest.raises(UserError, match=rf"live attempt, attempt-1 on .* \(pid {process.pid}\)"):
            Lease(tmp_path, "second", life_s=FOR_EVER_S).__enter__()
        process.send_signal(signal.SIGKILL)
        process.wait()
        with Lease(tmp_path, "second", life_s=0.5):
            assert held(tmp_path)["attempt"] == "second"


@pytest.mark.parametrize("frozen", [True, False])
def test_agreed_later_attempt_takes_over_at_once(tmp_path: Path, frozen: bool) -> None:
    """Even from a live process with the kernel's lock. The former owner writes nothing more."""
    with owner(tmp_path) as process:
        if frozen:
            process.send_signal(signal.SIGSTOP)
        for attempt, agreed in (("attempt-2", False), ("other-2", True), ("attempt-1", True)):
            with pytest.raises(UserError, match="live attempt"), Lease(tmp_path, attempt, agreed=agreed, life_s=0.3):
                pass
        with Lease(tmp_path, "attempt-2", agreed=True, life_s=FOR_EVER_S):
            process.send_signal(signal.SIGCONT)
            time.sleep(0.5)  # several beats
            assert held(tmp_path)["attempt"] == "attempt-2"


def test_release_ends_the_wait_for_a_silent_owner(tmp_path: Path) -> None:
    no_locks()
    first = Lease(tmp_path, "first", beat_s=FOR_EVER_S)
    first.__enter__()
    threading.Timer(0.5, first.__exit__).start()
    with Lease(tmp_path, "second", life_s=FOR_EVER_S):
        pass


def test_attempt_that_was_stopped_does_not_take_the_owner_for_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole machine was stopped, so the owner sends its next heartbeat only a moment later."""
    no_locks()
    owner, pauses = Lease(tmp_path, "first", beat_s=FOR_EVER_S), itertools.count()
    now = SimpleNamespace(s=0.0)

    def sleep(seconds: float) -> None:
        number = next(pauses)
        now.s += 3600.0 if number == 0 else seconds
        if number == 1:
            owner._write(2)

    with owner:
        monkeypatch.setattr(rankup.places.lease, "time", SimpleNamespace(monotonic=lambda: now.s, sleep=sleep))
        with pytest.raises(UserError, match="live attempt"):
            Lease(tmp_path, "second").__enter__()


# Jobs ---------------------------------------------------------------------------------------------------------

def waiting(until: Path, **more: Any) -> dict[str, str]:
    return {"PROBE": json.dumps({"where": "loss", "call": 14, "until": str(until), **more})}


def test_second_attempt_is_refused_on_all_ranks_and_disturbs_nothing(forks: Forks, tmp_path: Path) -> None:
    forks.ends(*train(tmp_path / "undisturbed"), world_size=2)
    run, go_on = tmp_path / "run", tmp_path / "go on"
    with forks.running(*train(run), world_size=2, env=waiting(go_on)) as first:
        first.wait_for("epoch 1:")
        before = (run / "status.json").read_text()
        assert json.loads(before)["state"] == "running"
        impatient = "tests.places.test_lease:short_waits"
        output = forks.ends(*train(run), world_size=2, preload=impatient, code=2)
        lease = held(run)
        assert f"is owned by a live attempt, {lease['attempt']} on {lease['host']} (pid {lease['pid']})" in output
        assert lease["pid"] == first.processes[0].pid
        assert output.count("live attempt") == 1
        assert (run / "status.json").read_text() == before
        go_on.touch()
        assert first.wait() == [0, 0], first.output
    assert result(run)["digest"] == result(tmp_path / "undisturbed")["digest"]
    status = json.loads((run / "status.json").read_text())
    assert (status["state"], status["attempt"]) == ("finished", json.loads(before)["attempt"])


def freeze() -> None:
    """Stop on machine one until a file appears. FREEZE says where: in the save of step 16, before the files of the run
    directory are written, or before the file or folder of that name is renamed or removed."""
    on_machine_one()
    from rankup.state import copies
    from rankup.state.run import Run

    folder = Path(os.environ["FOLDER"])
    begin, write = Run.begin, copies.write_durably

    def wait() -> None:
        (folder / "there").touch()
        while not (folder / "go on").exists():
            time.sleep(0.01)

    def removes(event: str, values: tuple[Any, ...]) -> None:
        if event in ("os.rename", "os.remove") and str(values[0]) == str(folder / "run" / os.environ["FREEZE"]):
            wait()

    def writes(path: Path, content: Any) -> Any:
        if "step-00000016" in path.parent.name and path.name == "manifest.json":
            wait()
        return write(path, content)

    def begins(*values: Any) -> Any:
        wait()
        return begin(*values)

    if os.environ["FREEZE"] == "save":
        copies.write_durably = writes
    elif os.environ["FREEZE"] == "set-up":
        Run.begin = begins  # type: ignore[method-assign]
    else:
        sys.addaudithook(removes)


@pytest.mark.parametrize("where", ["set-up", "result.json", "metrics.jsonl", "save", "step"])
def test_frozen_job_writes_nothing_after_another_one_took_over(forks: Forks, tmp_path: Path, where: str) -> None:
    run = tmp_path / "run"
    env = {"FOLDER": str(tmp_path), "FREEZE": where}
    if where == "step":
        env |= waiting(tmp_path / "go on", tell=str(tmp_path / "there"))
    preload, fresh = "tests.places.test_lease:{}", ()
    if where == "metrics.jsonl":  # an earlier run wrote it
        (run / "checkpoints" / "earlier").mkdir(parents=True)
        (run / where).touch()
        fresh = ("--fresh",)
    with forks.running(*train(run, *fresh), env=env, preload=preload.format("freeze")) as first:
        first.wait_until((tmp_path / "there").exists, where)
        if where == "save":  # the loop then waits for that save, and is not between a check of the owner and a write
            lines = run / "metrics.jsonl"
            first.wait_until(lambda: lines.read_text().count("eval/loss") == 3, "the evaluation of step 24")
        if where == "step":
            first.wait_until(lambda: steps(run / "checkpoints") == [8], "checkpoint")
            (tmp_path / "metrics").hardlink_to(run / "metrics.jsonl")  # the file that the job has open
        first.processes[0].signal("SIGSTOP")
        output = forks.ends(*train(run), preload=preload.format("on_machine_two"))
        assert ("resumed from step-00000008" in output) == (where in ("save", "step"))
        files = [*tmp_path.iterdir(), *run.iterdir(), *(run / "checkpoints").rglob("*")]
        left = {path: path.read_bytes() for path in files if path.is_file() and path.name != ".lock"}
        assert {run / "run.json", run / "metrics.jsonl", run / "result.json"} <= left.keys()
        (tmp_path / "go on").touch()
        first.processes[0].signal("SIGCONT")
        assert first.wait() == [171], first.output
    assert "another attempt owns" in first.output
    assert {path: path.read_bytes() for path in left} == left
    assert len(steps(run / "checkpoints")) == len(list((run / "checkpoints").iterdir()))
    assert json.loads(left[run / "status.json"])["state"] == "finished"
    assert len(list(run.glob("before-*/checkpoints/earlier"))) == len(fresh)
