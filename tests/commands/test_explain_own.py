"""What `explain` says about failed runs of this program."""

import os
from datetime import datetime
from pathlib import Path

import pytest

from rankup.explain import diagnose_files, format_report
from rankup.explain.diagnosis import diagnose
from rankup.places.files import write_atomically, write_json
from tests.rigs import jobs
from tests.rigs.fork_server import Forks

ATTEMPT = "20261121T100000-abc123"
TINY = ["train", "--dataset", "digits", "--model", "mlp", "--no-tensorboard"]


def test_explain_finds_no_fault_in_a_healthy_run(forks: Forks, tmp_path: Path) -> None:
    output = forks.ends(*TINY, "--max-steps", "3", "--run-dir", tmp_path, "--name", "run", world_size=2)
    assert diagnose(output.splitlines()) == []
    assert diagnose_files([tmp_path / "run" / "logs" / "rank-0.log"]) == []
    assert diagnose_files([tmp_path / "run"]) == []


def test_explain_names_the_missing_rank_of_a_run_that_never_joined(forks: Forks, tmp_path: Path) -> None:
    env = jobs.rank_env(0, 2, jobs.free_port())
    line = [*TINY, "--join-timeout-s", "3", "--run-dir", tmp_path, "--name", "run"]
    output = forks.ends(*line, env=env, code=170)
    for first, *_ in (diagnose(output.splitlines()), diagnose_files([tmp_path / "run"])):
        assert (first.name, first.rank) == ("rank-missing", 1)


def test_explain_quotes_the_line_of_a_mistake(forks: Forks, tmp_path: Path) -> None:
    data = ["--data-dir", tmp_path, "--dataset", "imagefolder"]
    output = forks.ends(*TINY, "--run-dir", tmp_path, *data, code=2)
    first = diagnose(output.splitlines())[0]
    assert first.name == "mistake"
    assert first.seen in output


def fail() -> None:
    """Preloaded. Let the loop fail with the error in FAULT."""
    from train import loop

    def load(*_: object, **__: object) -> None:
        raise RuntimeError(os.environ["FAULT"])

    loop.load = load  # type: ignore[assignment]


@pytest.mark.parametrize(("fault", "name", "last"), [
    ("unable to allocate shared memory(shm) for file </torch_11_8_0>: No space left on device (28)", "shm",
     "this is: /dev/shm is too small. "),
    ("no flux in the frobnicator", "", "RuntimeError: no flux in the frobnicator"),
])
def test_output_of_a_fault_ends_with_its_known_explanation(
    forks: Forks, tmp_path: Path, fault: str, name: str, last: str
) -> None:
    output = forks.ends(*TINY, "--run-dir", tmp_path, preload=f"{__name__}:fail", env={"FAULT": fault}, code=1)
    assert output.splitlines()[-2].startswith(last)
    assert output.count("this is:") == bool(name)
    first = diagnose(output.splitlines())[0]
    assert (first.name, first.seen) == (name, f"RuntimeError: {fault}")


def failed_run(run: Path, *log: str, **end: object) -> Path:
    """Write a run of two ranks, in which rank 1 ended with `end` and rank 0 wrote `log`."""
    write_json(run / "status.json", {"attempt": ATTEMPT, "state": "failed", "world_size": 2})
    write_json(run / "status" / ATTEMPT / "rank-1.json", {"rank": 1, "host": "node1", "state": "failed", **end})
    (run / "logs").mkdir()
    (run / "logs" / "rank-0.log").write_text("".join(f"{line}\n" for line in log))
    return run


def test_explain_names_a_lost_rank_with_its_reason(tmp_path: Path) -> None:
    lost = "lost a peer at step 5: suspected: rank 1 on node1 (MemoryError: ) (exit code 1)"
    old = "2026-11-21T10:00:07 node0 r0 torch.OutOfMemoryError: CUDA out of memory"
    run = failed_run(tmp_path, old, f"2026-11-21T10:00:09 node0 r0 {lost}", code=1, why="MemoryError: ")
    began_s = datetime(2026, 11, 21, 10, 0, 8).timestamp()  # start of the job's last attempt
    write_json(run / "status" / ATTEMPT / f"progress-{began_s:.2f}.json", {})
    assert [(d.name, d.rank, d.host) for d in diagnose_files([run])] == [("host-memory", 1, "node1")]


def test_explain_finds_the_first_failed_rank_by_the_times_in_logs(tmp_path: Path) -> None:
    for rank, why in enumerate(["RuntimeError: CUDA error: an illegal memory access was encountered", "MemoryError: "]):
        log = [f"2026-11-21T10:00:0{9 - rank} a line", "Traceback (most recent call last):", "    f()", why]
        end = {"rank": rank, "host": f"node{rank}", "state": "failed", "code": 1, "why": why}
        write_json(tmp_path / "status" / ATTEMPT / f"rank-{rank}.json", end)
        write_atomically(tmp_path / "logs" / f"rank-{rank}.log", "".join(f"{line}\n" for line in log))
    write_json(tmp_path / "status.json", {"attempt": ATTEMPT, "state": "failed", "world_size": 2})
    found = [(each.rank, each.host, each.traceback) for each in diagnose_files([tmp_path])]
    assert found == [(1, "node1", ("    f()",)), (0, "node0", ("    f()",))]


def test_explain_quotes_an_unknown_reason(tmp_path: Path) -> None:
    (found,) = diagnose_files([failed_run(tmp_path, code=171, why="the mirror did not answer in time")])
    assert (found.seen, found.rank, found.host) == ("the mirror did not answer in time (exit code 171)", 1, "node1")


def test_explain_ignores_earlier_attempts_of_a_finished_run(tmp_path: Path) -> None:
    failed_run(tmp_path, "2026-11-21T10:00:09 node0 r0 CUDA out of memory", code=1, why="x")
    assert diagnose_files([tmp_path])[0].name == "cuda-memory"
    write_json(tmp_path / "status.json", {"attempt": ATTEMPT, "state": "finished"})
    assert diagnose_files([tmp_path]) == []
    assert format_report([]).startswith("nothing wrong was found: the run has finished")
