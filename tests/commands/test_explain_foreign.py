"""`explain` finds the rank that failed first in the logs of any job: torchrun's folders, Slurm, kubectl, compose."""

import json
from datetime import datetime
from pathlib import Path

import pytest

from rankup.errors import UserError
from rankup.explain import diagnose_files, format_report
from rankup.explain.diagnosis import Diagnosis, diagnose
from rankup.explain.faults import FOLLOWED
from rankup.explain.logs import time_of
from train.main import main

THIS_YEAR = datetime.now().year
LOGS = Path(__file__).parent / "logs"
BEGIN = "Traceback (most recent call last):"
FAILED = [BEGIN, '  File "a.py", line 7, in main', "    load(image)", "KeyError: 'image_17'"]
LOST = [BEGIN, "RuntimeError: [pair.cc:553] Connection closed by peer [10.77.0.2]:19612.", "", ""]


def write(path: Path, lines: list[str], prefix: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{prefix}{line}\n" for line in lines))
    return path


def root(*paths: Path) -> Diagnosis:
    return diagnose_files(paths)[0]


# torchrun -------------------------------------------------------------------------------------------------------


def test_torchrun_folder_is_read_for_each_rank_of_the_last_attempt(tmp_path: Path) -> None:
    job = tmp_path / "none_x8k2"
    write(job / "attempt_0" / "1" / "stderr.log", ["torch.OutOfMemoryError: CUDA out of memory."])
    write(job / "attempt_1" / "0" / "stderr.log", LOST)
    write(job / "attempt_1" / "0" / "stdout.log", ["step 3"])
    write(job / "attempt_1" / "1" / "error.json", ['{"message": "RuntimeError: [gloo] Connection closed by peer"}'])
    write(job / "attempt_1" / "1" / "stderr.log", FAILED)
    write(job / "attempt_1" / "filtered_stderr.log", FAILED)
    first, *rest = diagnose_files([tmp_path])
    assert (first.seen, first.rank, first.file) == ("KeyError: 'image_17'", 1, "none_x8k2/attempt_1/1/stderr.log")
    assert first.traceback == ('  File "a.py", line 7, in main', "    load(image)")
    assert [(other.name, other.rank) for other in rest] == [("peer-closed", 0)]


SUMMARY = (LOGS / "exception-on-one-rank.log").read_text().splitlines()[-20:]


def test_torchrun_summary_names_the_first_failure_if_logs_have_no_times(tmp_path: Path) -> None:
    attempt = tmp_path / "none_x" / "attempt_0"
    write(attempt / "0" / "stderr.log", ["Traceback (most recent call last):", "ValueError: later"])
    write(attempt / "1" / "stderr.log", FAILED)
    assert root(tmp_path).rank == 0
    assert "do not have times" in format_report(diagnose_files([tmp_path]))
    assert root(tmp_path, write(tmp_path / "torchrun.out", SUMMARY)).rank == 1


# Schedulers and containers --------------------------------------------------------------------------------------


def test_logs_of_pods_with_timestamps_are_sorted_by_time(tmp_path: Path) -> None:
    early, late = "2026-11-22T10:00:01.5Z ", "2026-11-22T11:00:02+01:00 "
    write(tmp_path / "ddp-worker-0.log", [BEGIN, "ValueError: second"], prefix=late)
    write(tmp_path / "ddp-worker-1.log", FAILED, prefix=early)
    first, second = diagnose_files([tmp_path / "ddp-worker-0.log", tmp_path / "ddp-worker-1.log"])
    assert (first.host, first.seen) == ("", "KeyError: 'image_17'")
    assert first.file.endswith("ddp-worker-1.log")
    assert (second.time or 0) - (first.time or 0) == 0.5
    assert [(d.host, d.seen) for d in diagnose_files([tmp_path])] == [
        ("ddp-worker-1", "KeyError: 'image_17'"), ("ddp-worker-0", "ValueError: second"),
    ]


def test_traceback_without_times_gets_the_time_of_the_line_before() -> None:
    (found,) = diagnose(["2026-11-22 10:00:01,250 - INFO - step 3", *FAILED])
    assert found.time == datetime(2026, 11, 22, 10, 0, 1, 250_000).timestamp()


@pytest.mark.parametrize(("line", "time"), [
    ("2026-11-22T10:00:01 node1 r3 step", datetime(2026, 11, 22, 10, 0, 1)),
    ("[2026-11-22 10:00:01,500] [INFO] x", datetime(2026, 11, 22, 10, 0, 1, 500_000)),
    ("11/22/2026 10:00:01 - WARNING - x", datetime(2026, 11, 22, 10, 0, 1)),
    ("  time      : 2026-11-22_10:00:01", datetime(2026, 11, 22, 10, 0, 1)),
    ("[rank0]:[E826 10:00:01.500000000 ProcessGroupNCCL.cpp:607] x", datetime(THIS_YEAR, 8, 26, 10, 0, 1, 500_000)),
    ("epoch 3 [10:00:01<00:20]", None),
    ("9999-99-99T10:00:01 x", None),
])
def test_time_of_a_line_is_read_in_common_formats(line: str, time: datetime | None) -> None:
    assert time_of(line) == (None if time is None else time.timestamp())


# Folders --------------------------------------------------------------------------------------------------------


def test_folder_is_searched_only_for_logs(tmp_path: Path) -> None:
    write(tmp_path / "train.py", FAILED)
    write(tmp_path / "metrics.json", FAILED)
    with pytest.raises(UserError, match=r"explain needs a folder with logs \(\*.log, "):
        diagnose_files([tmp_path])
    write(tmp_path / "run.json", ['{"run": "r"}'])  # a run whose ranks wrote nothing
    with pytest.raises(UserError, match="explain needs a folder with logs"):
        diagnose_files([tmp_path])
    write(tmp_path / "sub" / "rank_2.err", FAILED)
    write(tmp_path / "job.o4711", ["all is well"])
    (found,) = diagnose_files([tmp_path])
    assert (found.rank, found.file) == (2, "sub/rank_2.err")


def test_explain_finds_a_run_by_name_and_skips_its_earlier_attempts(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "mine"
    old, new = "2026-11-21T09:59:59 vm r0 ", "2026-11-21T10:00:09 vm r0 "
    write(run / "logs" / "rank-0.log", [f"{old}{FAILED[0]}", "ValueError: of an earlier attempt", f"{new}{FAILED[0]}",
                                        *FAILED[1:]])
    write(run / "status.json", ['{"attempt": "20261121T100000-abc123", "state": "failed", "world_size": 1}'])
    (found,) = diagnose_files([Path("mine")], run_dir=tmp_path / "runs")
    assert (found.seen, found.harmless) == ("KeyError: 'image_17'", False)


@pytest.mark.parametrize(("why", "name"), [
    ("BrokenPipeError: [Errno 32] Broken pipe", "store-closed"),
    ("DistNetworkError: The client socket has failed to connect to (a, 29400).", "connect-retry"),
])
def test_recorded_reason_of_a_failed_rank_is_never_harmless(tmp_path: Path, why: str, name: str) -> None:
    write(tmp_path / "status.json", ['{"attempt": "a", "state": "failed", "world_size": 1}'])
    end = {"state": "failed", "rank": 0, "host": "vm", "code": 1, "why": why}
    write(tmp_path / "status" / "a" / "rank-0.json", [json.dumps(end)])
    first = root(tmp_path)
    assert (first.name, first.harmless) == (name, False)


def test_explain_finds_an_error_behind_a_progress_bar(tmp_path: Path) -> None:
    bar = "".join(f"\r{n}%|####" for n in range(100))
    assert root(write(tmp_path / "job.log", [f"{bar}\rRuntimeError: CUDA out of memory"])).name == "cuda-memory"


# Report ---------------------------------------------------------------------------------------------------------


def test_report_separates_the_cause_from_its_consequences(tmp_path: Path) -> None:
    for rank in range(8):
        stamp = f"2026-11-22T10:00:0{1 + (rank != 5)} node{rank // 4} r{rank} "
        write(tmp_path / f"rank-{rank}.log", FAILED if rank == 5 else LOST, prefix=stamp)
    assert format_report(diagnose_files([tmp_path])).splitlines() == [
        "an error that is not known here, rank 5 on node1 (rank-5.log line 4)",
        "  when  2026-11-22 10:00:01",
        '  seen    File "a.py", line 7, in main',
        "            load(image)",
        "        KeyError: 'image_17'",
        "  at    a.py:7",
        "  why   this is the last line of its traceback, or the last line that looks like an error.",
        "  fix   The table of known faults does not have it. The last lines of its traceback say where it happened.",
        "what others suffered from it:",
        "  a peer's connection ended, ranks 0-4, 6-7 on node0, node1 (rank-0.log line 2): "
        "Look for the first rank that failed, in its own log.",
    ]


def test_report_names_the_first_of_several_ranks_with_the_same_fault(tmp_path: Path) -> None:
    for rank, second in ((0, 7), (1, 3), (2, 9)):
        write(tmp_path / f"rank-{rank}.log", [f"2026-11-22T10:00:0{second} n r{rank} CUDA out of memory"])
    lines = format_report(diagnose_files([tmp_path])).splitlines()
    assert lines[:2] == ["the GPU's memory was not enough, ranks 0-2 on n (rank-1.log line 1)",
                         "  first rank 1 on n, 2026-11-22 10:00:03"]


@pytest.mark.parametrize(("words", "place"), [
    ("(node0.example, 29500).", "node0.example port 29500"), ("(fd00:1::5, 29500).", "fd00:1::5 port 29500"),
    ("192.0.2.1:1234", "192.0.2.1 port 1234"), ("[fd00:1::5]:1234.", "[fd00:1::5] port 1234"),
])
def test_address_that_torch_did_not_reach_is_read_completely(words: str, place: str) -> None:
    line = f"DistNetworkError: The client socket has timed out after 60s while trying to connect to {words}"
    assert [found.title for found in diagnose([line])] == [f"rank 0 at {place} was not reached"]


# Shapes of logs --------------------------------------------------------------------------------------------------

TEXT = "".join((LOGS / name).read_text(encoding="utf-8") for name in ("shapes.txt", "who-and-where.txt"))
SHAPES = dict(text.split("\n", 1) for text in TEXT.removeprefix("### ").split("\n### "))
BESIDE = {"ipv6-name": "master-unreached", "monitored-barrier": "collective-timeout"}  # torch prints these too


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.split(":")[0])
def test_first_finding_of_a_log_is_why_its_job_failed(
    shape: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A shape begins with `NAME: FAULT rank N on HOST @ FILE:LINE | TEXT SEEN` or `NAME: healthy`. One or several logs
    follow, or `<<<` and the name of a recorded log. A text after `^` must be at the beginning."""
    for file in f"\n{SHAPES[shape]}".split("\n--- "):
        name, _, text = file.partition("\n")
        path = tmp_path / (name or "slurm-7.out")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text((LOGS / text.split()[1]).read_text() if text.startswith("<<<") else text, encoding="utf-8")
    expected, _, seen = shape.split(": ", 1)[1].partition(" | ")
    expected, _, at = expected.partition(" @ ")
    healthy = expected == "healthy"
    files = [str(path) for path in sorted(tmp_path.glob("*.*")) if path.stat().st_size]
    logs = files or [str(tmp_path)]
    assert main(["explain", *logs]) == (0 if healthy else 20)
    report = capsys.readouterr().out
    assert report.startswith("nothing wrong was found") == healthy, report
    main(["explain", "--json", *logs])
    found = [diagnosis for diagnosis in json.loads(capsys.readouterr().out) if not diagnosis["harmless"]]
    assert bool(found) != healthy
    if not healthy:
        root = found[0]
        who = f" rank {root['rank']}" if root["rank"] is not None else ""
        who += f" on {root['host']}" if root["host"] else ""
        assert (root["name"] or root["seen"].split(":")[0]) + who == expected, report
        assert seen in f"^{root['seen']}", report
        assert root["at"] == (at or root["at"]), report
        # No pattern may be so wide that it matches torch's messages about another fault
        others = {each["name"] for each in found if each["order"] < FOLLOWED} - {root["name"], BESIDE.get(root["name"])}
        assert "<<<" not in SHAPES[shape] or others <= {""}, report


def test_all_recorded_logs_have_a_shape() -> None:
    recorded = {body.split()[1] for body in SHAPES.values() if body.startswith("<<<")}
    assert {path.name for path in LOGS.glob("*.log")} == recorded
