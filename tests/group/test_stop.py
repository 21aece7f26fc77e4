"""A stop request at any time and place: the ranks save that step, end with 143, and resume to the same weights."""

import json
import multiprocessing
import os
import re
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.rigs import faulting_workload
from tests.rigs.fork_server import Forks
from tests.rigs.jobs import MAIN, ROOT, ended, metrics, probe, result, start, status
from train.config import Config
from train.workloads import Workload

# 8 steps an epoch, 32 in all, six batches an evaluation
SETTINGS = ("--workload", "tests.rigs.faulting_workload:build", "--batch-size", "8", "--epochs", "4",
            "--eval-batch-size", "4", "--log-every-steps", "1", "--tensorboard=false", "--keep", "99",
            "--join-timeout-s", "30")
TOTAL = 32
AT_THE_END = ("--evaluate-every-epochs", "4")  # no evaluation before, where a signal would also be seen


def train(run: Path, *more: str) -> tuple[str, ...]:
    return ("train", *SETTINGS, "--run-dir", str(run.parent), "--name", run.name, *more)


@pytest.fixture(scope="module")
def undisturbed(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """The digest of the final weights of an undisturbed run, by world size."""
    digests = {}
    for world_size in (1, 2):
        run = tmp_path_factory.mktemp("undisturbed") / "run"
        forks.ends(*train(run), world_size=world_size)
        digests[world_size] = result(run)["digest"]
    return digests


def steps(run: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").glob("step-*"))


def assert_stopped(run: Path, codes: list[int], output: str, *, at_least: int) -> int:
    """Assert that all ranks stopped at the same step, which is saved. Return the step."""
    assert codes == [143] * len(codes), output
    assert "Traceback" not in output
    summary = status(run)
    assert (summary["state"], summary["code"], len(summary["ranks"])) == ("stopped", 143, len(codes)), summary
    ends = [json.loads(path.read_text()) for path in (run / "status" / summary["attempt"]).glob("rank-*.json")]
    assert len(ends) == len(codes)
    assert {end["state"] for end in ends} == {"stopped"}
    (step,) = {end["step"] for end in ends}
    assert at_least <= step < TOTAL
    assert steps(run)[-1] == step
    assert f"saved at step {step} of {TOTAL}" in output
    return int(step)


def assert_resumes(
    forks: Forks, run: Path, digests: dict[int, str], *more: str, world_size: int,
    evaluated: tuple[int, ...] = (8, 16, 24, 32),
) -> None:
    output = forks.ends(*train(run, *more), world_size=world_size)
    assert "resumed from step-" in output
    assert result(run)["digest"] == digests[world_size]
    assert [line["step"] for line in lines(run, "train/loss")] == list(range(1, TOTAL + 1))
    assert [line["step"] for line in lines(run, "eval/loss")] == list(evaluated)
    assert status(run)["state"] == "finished"


def lines(run: Path, key: str) -> list[dict[str, Any]]:
    return [entry for entry in metrics(run) if key in entry]


# Moments of the signal -----------------------------------------------------------------------------------------


def test_signal_in_training_saves_that_step(forks: Forks, undisturbed: dict[int, str], tmp_path: Path) -> None:
    """Also if an asyncio loop of the user handles signals."""
    run = tmp_path / "run"
    codes, output = forks.run(*train(run), env=probe("loss", 12, signal="SIGUSR1", asyncio=True))
    assert_stopped(run, codes, output, at_least=10)
    assert "SIGUSR1" in output
    assert_resumes(forks, run, undisturbed, world_size=1)


@pytest.mark.parametrize(("world_size", "where", "call", "order", "at_least", "at_most"), [
    (2, "loss", 13, {"signal": "SIGTERM"}, 11, TOTAL),  # to both ranks at once
    (2, "loss", 13, {"signal": "SIGINT", "rank": 1}, 11, TOTAL),
    # The second of the three batches in the second evaluation, which is then repeated
    (2, "evaluate", 5, {"signal": "SIGTERM", "rank": 0}, 16, 16),
    (2, "evaluate", 5, {"signal": "SIGINT"}, 16, 16),
    # A worker signals the process group while the loop waits for it. It gets the signal first, and sleeps very long
    (2, "data", 6, {"signal": "SIGTERM", "to": "group", "before_s": 1.0, "sleep_s": 600}, 1, TOTAL),
    (1, "data", 6, {"signal": "SIGTERM", "to": "group", "before_s": 1.0, "sleep_s": 600}, 1, TOTAL),
    (2, "data", 6, {"signal": "SIGUSR1", "to": "group", "rank": 1, "before_s": 1.0, "sleep_s": 600}, 1, TOTAL),
    (2, "data", 6, {"signal": "SIGHUP", "to": "group", "rank": 1, "before_s": 1.0, "sleep_s": 600}, 1, TOTAL),
    # Workers may get there before the eighth step ends
    (2, "eval_data", 2, {"signal": "SIGUSR1", "to": "group", "lines": 8, "sleep_s": 600}, 8, 8),
])
def test_signal_stops_all_ranks_at_one_step_and_the_run_resumes(
    forks: Forks, undisturbed: dict[int, str], tmp_path: Path, world_size: int, where: str, call: int,
    order: dict[str, Any], at_least: int, at_most: int,
) -> None:
    run = tmp_path / "run"
    more = AT_THE_END if where == "data" else ()
    order |= {"log": str(run / "metrics.jsonl")} if "lines" in order else {}
    line = train(run, "--num-workers=2", *more)
    codes, output = forks.run(*line, world_size=world_size, env=probe(where, call, **order))
    assert assert_stopped(run, codes, output, at_least=at_least) <= at_most
    if where == "evaluate":
        assert [line["step"] for line in lines(run, "eval/loss")] == [8]
    evaluated = (32,) if where == "data" else (8, 16, 24, 32)
    assert_resumes(forks, run, undisturbed, "--num-workers=1", *more, world_size=world_size, evaluated=evaluated)


def test_evaluate_command_stops_on_a_signal(forks: Forks, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert forks.run(*train(run))[0] == [0]
    arguments = ("evaluate", *train(run)[1:])
    forks.ends(*arguments, world_size=2, env=probe("evaluate", 2, signal="SIGTERM", rank=1), code=143)
    assert status(run)["state"] == "finished"


def build_with_children(config: Config) -> Workload:
    """A workload that forks processes and ends them."""
    fork = multiprocessing.get_context("fork")
    with fork.Pool(2) as pool:
        assert pool.map(abs, [-1, 2]) == [1, 2]
    child = fork.Process(target=time.sleep, args=(600,))
    child.start()
    child.terminate()
    child.join(60)
    assert child.exitcode == -signal.SIGTERM
    return faulting_workload.build(config)


def test_signal_to_a_users_forked_process_stops_no_job(forks: Forks, tmp_path: Path) -> None:
    forks.ends(*train(tmp_path / "run", "--workload", f"{__name__}:build_with_children"))


# Without a collective -----------------------------------------------------------------------------------------


def note_collectives() -> None:
    from rankup.group.group import Group

    collective = Group.collective

    def noted(self: Group, call: Any) -> Any:
        if self.record.read().phase == "step" and not self.watch._steps_ended:  # it saves at the end
            with Path(os.environ["NOTES_DIR"], f"rank-{self.rank}").open("a") as notes:
                notes.write(f"{self.record.read().step}\n")
        return collective(self, call)

    Group.collective = noted  # type: ignore[method-assign]


def test_report_is_the_only_collective_of_rankup_in_steps(forks: Forks, tmp_path: Path) -> None:
    """Here it is the report of the last step, the mean loss. At the start of an epoch the ranks compare its order."""
    quiet = ("--log-every-steps", "100", "--save-every-steps", "100", "--max-steps", "7", *AT_THE_END)
    forks.ends(*train(tmp_path / "run", *quiet), world_size=2, env={"NOTES_DIR": str(tmp_path)},
               preload=f"{__name__}:note_collectives")
    assert [[*dict.fromkeys((tmp_path / f"rank-{rank}").read_text().split())] for rank in (0, 1)] == [["0", "6"]] * 2


def build_uneven(config: Config) -> Workload:
    """Ranks of different speeds. At its 21st loss, rank 1 stops the job, and dies if AT_21 says so."""
    workload, rank, calls = faulting_workload.build(config), int(os.environ["RANK"]), 0
    loss = workload.loss

    def slower(model: Any, batch: Any) -> Any:
        nonlocal calls
        calls += 1
        time.sleep(0.004 * rank)
        if calls == 21 and rank == 1 and (what := os.environ.get("AT_21")):
            agent = psutil.Process().parent()
            assert agent is not None
            agent.send_signal(signal.SIGTERM if what == "lost" else signal.SIGUSR1)
            if what == "lost":
                os.kill(os.getpid(), signal.SIGKILL)
        return loss(model, batch)

    return replace(workload, loss=slower)


@pytest.mark.parametrize("what", ["stop", "lost"])
def test_ranks_of_different_speeds_stop_at_one_step_even_if_one_dies(forks: Forks, tmp_path: Path, what: str) -> None:
    run = tmp_path / "run"
    more = ("--workload", f"{__name__}:build_uneven", "--save-every-steps", "8", *AT_THE_END)
    line = ("launch", "--nproc=3", MAIN, *train(run, *more))
    output = forks.ends(*line, env={"AT_21": what}, code=143)
    assert "restarted (" not in output
    newest = steps(run)[-1]
    output = forks.ends(*line)
    resumed = re.search(r"resumed from .*?(\d+)", output)
    assert resumed, output
    # The stop came in the loss of step 20, after one extra call. Any rank that finished step 19 has kept it
    assert 19 <= int(resumed[1]) < TOTAL
    assert what == "lost" or int(resumed[1]) == newest
    assert [line["step"] for line in lines(run, "train/loss")] == list(range(1, TOTAL + 1))


# Repeated signals ---------------------------------------------------------------------------------------------


def slow_save() -> None:
    """Keep even a slow sender within the window. While `asked` exists, a save does not end, so repeats come during
    it."""
    from rankup.group import stop
    from rankup.state import copies

    stop.REPEAT_S = 60.0
    write = copies.write_durably

    def slow(path: Path, content: Any) -> Any:
        while (path.parents[2] / "asked").exists():
            time.sleep(0.05)
        return write(path, content)

    copies.write_durably = slow


@pytest.mark.parametrize("saving", [False, True])
def test_repeated_signals_within_the_window_count_once(forks: Forks, tmp_path: Path, saving: bool) -> None:
    run, there, go = tmp_path / "run", tmp_path / "there", tmp_path / "go"
    order = probe("loss", 14, rank=0, tell=str(there), until=str(go))
    with forks.running(*train(run), world_size=2, env=order, preload="tests.group.test_stop:slow_save") as job:
        job.wait_until(there.exists, "rank 0 in step 12")
        (run / "asked").touch()
        for number in range(3):
            if saving and number == 1:
                go.touch()
                job.wait_until(lambda: any((run / "checkpoints").glob(".writing-*")), "the save")
            for process in job.processes:
                process.signal_group("SIGTERM")
            time.sleep(0.2)  # the kernel merges faster signals
        (run / "asked").unlink()
        go.touch()
        codes = job.wait()
    assert_stopped(run, codes, job.output, at_least=11)
    assert "leaving without saving" not in job.output + "".join(log.read_text() for log in run.glob("logs/*"))


def no_window() -> None:
    """Make every further signal a second request. A file `read-RANK` says that the first was read: the kernel would
    merge a second signal that comes before."""
    from rankup import process
    from rankup.group import stop

    class Noting(stop.StopRequest):
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value)
            if name == "_requested_at_s" and value:
                Path(os.environ["NOTES_DIR"], f"read-{os.environ['RANK']}").touch()

    stop.REPEAT_S, process.StopRequest = 0.0, Noting


def test_second_request_ends_a_rank_that_waits_for_its_peer_which_ends_as_stopped(
    forks: Forks, undisturbed: dict[int, str], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    # Rank 0 stays in the middle of a step. Rank 1 waits for it in that step's collective
    there, left, read = (tmp_path / name for name in ("there", "left", "read-1"))
    order = probe("loss", 14, rank=0, tell=str(there), until=str(left)) | {"NOTES_DIR": str(tmp_path)}
    with forks.running(*train(run), world_size=2, env=order, preload="tests.group.test_stop:no_window") as job:
        job.wait_until(there.exists, "rank 0 in step 12")
        zero, one = job.processes
        one.signal("SIGTERM")
        job.wait_until(read.exists, "note of the signal")
        one.signal("SIGTERM")
        assert one.ended.wait(60), "the second request did not end a rank that waits in a collective"
        assert "leaving without saving" in (run / "logs" / "rank-1.log").read_text()
        left.touch()
        assert job.wait() == [143, 143], job.output
    assert "rank 1 on" in zero.output
    assert "leaving without saving" in zero.output
    output = forks.ends(*train(run), world_size=2)
    assert result(run)["digest"] == undisturbed[2], output


# During the start ---------------------------------------------------------------------------------------------

HOOK = """
import os, signal, sys, time

class Hook:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["HOOK_MODULE"]:
            os.kill(os.getpid(), getattr(signal, os.environ["HOOK_SIGNAL"]))
            time.sleep(300)

if "HOOK_MODULE" in os.environ:
    sys.meta_path.insert(0, Hook())
"""


@pytest.mark.parametrize(
    ("name", "module"), [("SIGTERM", "pydantic"), ("SIGUSR1", "torch.nn"), ("SIGINT", "train.workloads.images")]
)
def test_signal_during_the_start_ends_the_process_at_once(tmp_path: Path, name: str, module: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(HOOK)
    env = {"HOOK_MODULE": module, "HOOK_SIGNAL": name, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    job = start(sys.executable, "-m", "train.main", "train", "--dataset", "digits", "--run-dir", str(tmp_path), env=env)
    with ended(job):
        assert job.wait() == [143], job.output
    assert job.output.count("\n") == 1
    assert f"{name} before the first step: nothing new to save" in job.output


@pytest.mark.parametrize("rank", [0, 1])
def test_signal_to_one_rank_in_setup_stops_all(forks: Forks, tmp_path: Path, rank: int) -> None:
    run = tmp_path / "run"
    order = probe("build", 1, signal="SIGTERM", rank=rank, sleep_s=600)
    output = forks.ends(*train(run), world_size=2, env=order, code=143)
    assert "Traceback" not in output
    assert status(run)["state"] == "stopped"
