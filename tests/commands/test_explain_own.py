"""Runs of this program that failed, and what explain says of them."""

import re
from pathlib import Path

from rankup.explain import diagnose_files, explain_logs
from rankup.explain.diagnosis import diagnose
from tests.rigs import jobs
from tests.rigs.fork_server import Forks

TINY = ["train", "--dataset", "digits", "--model", "mlp", "--progress", "none", "--no-tensorboard"]


def test_healthy_run_has_nothing_wrong(forks: Forks, tmp_path: Path) -> None:
    output = forks.ends(*TINY, "--max-steps", "3", "--run-dir", str(tmp_path), "--name", "run", world_size=2)
    assert diagnose(output.splitlines()) == []
    assert diagnose_files([tmp_path / "run" / "logs" / "rank-0.log"]) == []
    assert diagnose_files([tmp_path / "run"]) == []


def test_run_that_never_joined_names_the_missing_rank(forks: Forks, tmp_path: Path) -> None:
    env = jobs.rank_env(0, 2, jobs.free_port())
    line = [*TINY, "--join-timeout-s", "1", "--run-dir", str(tmp_path), "--name", "run"]
    output = forks.ends(*line, env=env, code=170)
    for first, *_ in (diagnose(output.splitlines()), diagnose_files([tmp_path / "run"])):
        assert (first.name, first.rank) == ("rank-missing", 1)


def test_mistake_is_the_line_itself(forks: Forks, tmp_path: Path) -> None:
    data = ["--data-dir", str(tmp_path), "--dataset", "imagefolder"]
    output = forks.ends(*TINY, "--run-dir", str(tmp_path), *data, code=2)
    first = diagnose(output.splitlines())[0]
    assert first.name == "mistake"
    assert first.seen in output


def known_fault() -> None:
    """As a torch without the class fails, in the loop."""
    from train import loop

    def fail(*_: object, **__: object) -> None:
        name = "</torch_11_8_0>"
        raise RuntimeError(f"unable to allocate shared memory(shm) for file {name}: No space left on device (28)")

    loop.load = fail  # type: ignore[assignment]


def strange_fault() -> None:
    from train import loop

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no flux in the frobnicator")

    loop.load = fail  # type: ignore[assignment]


def test_known_fault_ends_with_what_it_is(forks: Forks, tmp_path: Path) -> None:
    output = forks.ends(*TINY, "--run-dir", str(tmp_path), preload=f"{__name__}:known_fault", code=1)
    assert output.splitlines()[-2].startswith("this is: /dev/shm is too small. ")
    assert output.count("this is:") == 1
    assert diagnose(output.splitlines())[0].name == "shm"


def test_strange_fault_ends_with_its_traceback_alone(forks: Forks, tmp_path: Path) -> None:
    output = forks.ends(*TINY, "--run-dir", str(tmp_path), preload=f"{__name__}:strange_fault", code=1)
    assert output.splitlines()[-2] == "RuntimeError: no flux in the frobnicator"
    assert diagnose(output.splitlines())[0].seen == output.splitlines()[-2]


def test_known_fault_of_a_script_ends_with_what_it_is(forks: Forks, tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text("raise RuntimeError('CUDA out of memory. Tried to allocate 2.00 GiB')")
    output = forks.ends("launch", "--nproc=2", "--run-dir", tmp_path, script, code=1)
    assert "this is: the GPU's memory was not enough" in output
    assert re.search(r"^rank \d on \S+ ended with 1 \(RuntimeError: CUDA out of .*exit code 1\)$", output, re.MULTILINE)


def test_lost_rank_is_named_with_its_reason(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "status" / "20261121T100000-abc123").mkdir(parents=True)
    (run / "logs").mkdir()
    (run / "status.json").write_text('{"attempt": "20261121T100000-abc123", "state": "failed", "world_size": 2}')
    end = '{"rank": 1, "host": "node1", "state": "failed", "code": 1, "why": "MemoryError: "}'
    (run / "status" / "20261121T100000-abc123" / "rank-1.json").write_text(end)
    lost = "lost a peer at step 5: suspected: rank 1 on node1 (MemoryError: ) (exit code 1)"
    old = "2026-11-20T10:00:00 node0 r0 torch.OutOfMemoryError: CUDA out of memory\n"
    (run / "logs" / "rank-0.log").write_text(f"{old}2026-11-21T10:00:09 node0 r0 {lost}\n")
    found = diagnose_files([run])
    assert [(d.name, d.rank, d.host, d.times) for d in found] == [("host-memory", 1, "node1", 2)]


def test_reason_of_a_failed_run_that_is_not_known_is_quoted(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "status" / "20261121T100000-abc123").mkdir(parents=True)
    (run / "status.json").write_text('{"attempt": "20261121T100000-abc123", "state": "failed", "world_size": 2}')
    end = '{"rank": 1, "host": "node1", "state": "failed", "code": 171, "why": "the mirror did not answer in time"}'
    (run / "status" / "20261121T100000-abc123" / "rank-1.json").write_text(end)
    (found,) = diagnose_files([run])
    assert (found.seen, found.rank, found.host) == ("the mirror did not answer in time (exit code 171)", 1, "node1")


def test_finished_run_is_over_whatever_earlier_attempts_said(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-0.log").write_text("2026-11-21T10:00:09 node0 r0 CUDA out of memory\n")
    assert [diagnosis.name for diagnosis in diagnose_files([tmp_path])] == ["cuda-memory"]
    (tmp_path / "status.json").write_text('{"attempt": "20261121T100000-abc123", "state": "finished"}')
    assert diagnose_files([tmp_path]) == []
    assert explain_logs([tmp_path], as_json=False) == ("nothing wrong was found: the run has finished.", False)
