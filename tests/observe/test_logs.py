"""The command logs: all ranks' lines by time, equal ones folded, from any time on, and as they come."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import pytest

from tests.rigs.jobs import ROOT, environment
from train.main import main


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Write a rank's log, a line for each text: "02 step" is "step" at second 2; without a number it has no time."""

    def _write(rank: int, *texts: str, run: str = "run", host: str = "vm") -> Path:
        path = tmp_path / run / "logs" / f"rank-{rank}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [f"2026-11-22T10:00:{t[:2]} {host} r{rank} {t[3:]}" if t[:2].isdigit() else t for t in texts]
        with path.open("a") as file:
            file.writelines(f"{line}\n" for line in lines)
        return path

    return _write


def printed(capfd: pytest.CaptureFixture[str], *words: str) -> list[str]:
    """What `logs` prints, without the day and the hour."""
    code = main(["logs", *words])
    out, err = capfd.readouterr()
    assert (code, err) == (0, "")
    return out.replace("2026-11-22T10:00:", "").splitlines()


# Order and folding ----------------------------------------------------------------------------------------------


def test_lines_of_all_ranks_stand_by_time_with_rank_and_host(write, tmp_path, capfd) -> None:
    write(0, "01 a", "03 c", host="node0")
    write(1, "02 b", "04 d", host="node1")
    assert printed(capfd, str(tmp_path / "run")) == [
        "01 rank 0 on node0: a", "02 rank 1 on node1: b", "03 rank 0 on node0: c", "04 rank 1 on node1: d",
    ]


def test_equal_lines_are_folded_within_and_across_a_second(write, tmp_path, capfd) -> None:
    for rank in range(8):
        write(rank, "01 ready", f"0{2 + rank % 2} saved", host=f"node{rank // 4}")
    write(2, "06 saved", host="node0")
    write(3, "08 alone", host="node0")
    write(4, "08 two", host="node1")
    write(6, "08 two", host="node1")
    assert printed(capfd, str(tmp_path / "run")) == [
        "01 ranks 0-7: ready", "02 ranks 0-7: saved", "06 rank 2 on node0: saved", "08 rank 3 on node0: alone",
        "08 ranks 4, 6 on node1: two",
    ]


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        (["aPb", "ab", "ab"], ["0-2:a", "0:P", "0-2:b"]),
        (["ab", "aPb", "aPb"], ["0-2:a", "0:b", "1-2:P", "1-2:b"]),  # rank 0 wrote no P before its b
        (["ab", "ca"], ["0:a", "1:c", "0:b", "1:a"]),
        (["ab", "ba"], ["0:a", "0-1:b", "1:a"]),  # only one of both can be folded
        (["aa", "a"], ["0-1:a", "0:a"]),
        (["axa", "ya"], ["0:a", "1:y", "0:x", "0-1:a"]),
        (["sabc", "tabc"], ["0:s", "1:t", "0-1:a", "0-1:b", "0-1:c"]),
        (["", "a"], ["1:a"]),
    ],
)
def test_lines_of_one_second_keep_each_ranks_order(write, tmp_path, capfd, ranks, expected) -> None:
    for rank, text in enumerate(ranks):
        write(rank, *(f"00 {char}" for char in text))
    shown = [re.fullmatch(r"00 ranks? (\S+) on vm: (.)", line) for line in printed(capfd, str(tmp_path / "run"))]
    assert [f"{line[1]}:{line[2]}" if line else line for line in shown] == expected


def test_last_line_without_an_end_and_bytes_that_are_no_text_are_printed(write, tmp_path, capfdbinary) -> None:
    path = write(0, "01 start")
    with path.open("ab") as file:
        file.write(b"2026-11-22T10:00:02 vm r0 \xff half")
    assert main(["logs", str(tmp_path / "run")]) == 0
    assert capfdbinary.readouterr().out.splitlines()[-1] == b"2026-11-22T10:00:02 rank 0 on vm: \xff half"


# Which run, ranks, times ----------------------------------------------------------------------------------------


def test_run_is_found_by_name_folder_and_as_the_newest(write, tmp_path, capfd) -> None:
    old = write(0, "01 old", run="old")
    write(0, "02 new", run="new")
    os.utime(old, (1, 1))
    where = ["--run-dir", str(tmp_path)]
    assert printed(capfd, *where) == ["02 rank 0 on vm: new"]
    assert printed(capfd, "old", *where) == ["01 rank 0 on vm: old"]
    assert printed(capfd, str(tmp_path / "old")) == ["01 rank 0 on vm: old"]
    assert main(["logs", "odl", *where]) == 2
    assert f"RUN must be a run in {tmp_path}/ or its folder, got odl. Did you mean old?" in capfd.readouterr().err
    assert main(["logs", "x", *where]) == 2
    assert "got x. There are: new, old." in capfd.readouterr().err
    assert main(["logs", "--run-dir", str(tmp_path / "none")]) == 2
    assert "no run with logs was found in " in capfd.readouterr().err


def test_ranks_are_chosen(write, tmp_path, capfd) -> None:
    for rank in range(12):
        write(rank, "01 here")
    assert printed(capfd, str(tmp_path / "run"), "--rank", "3") == ["01 rank 3 on vm: here"]
    assert printed(capfd, str(tmp_path / "run"), "--rank", "0-2,10") == ["01 ranks 0-2, 10 on vm: here"]
    assert main(["logs", str(tmp_path / "run"), "--rank", "3-1"]) == 2
    assert "--rank must be ranks such as 3 or 0-3,7, got 3-1." in capfd.readouterr().err
    assert main(["logs", str(tmp_path / "run"), "--rank", "all"]) == 2


def test_since_is_a_duration_or_a_time(write, tmp_path, capfd) -> None:
    write(0, "01 old", "05 new")
    assert printed(capfd, str(tmp_path / "run"), "--since", "2026-11-22T10:00:02") == ["05 rank 0 on vm: new"]
    assert main(["logs", str(tmp_path / "run"), "--since", "yesterday"]) == 2
    said = "--since must be a time such as 10m, 2h or 2026-11-22T14:05, got yesterday."
    assert said in capfd.readouterr().err
    now = time.strftime("%Y-%m-%dT%H:%M:%S")
    with write(0).open("a") as file:
        file.write(f"{now} vm r0 now\n")
    assert printed(capfd, str(tmp_path / "run"), "--since", "10m") == [f"{now} rank 0 on vm: now"]


# Live -----------------------------------------------------------------------------------------------------------


@contextmanager
def following(folder: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "train.main", "logs", "--run-dir", str(folder), "--follow", *words],
        cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_follow_shows_new_lines_new_ranks_and_a_new_file_until_ctrl_c(write, tmp_path: Path) -> None:
    log = write(0, "01 first")
    with following(tmp_path) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().endswith("rank 0 on vm: first\n")
        with log.open("a") as file:
            file.write("2026-11-22T10:00:02 vm r0 sec")
        write(1, "02 of a new rank")
        assert process.stdout.readline().endswith("rank 1 on vm: of a new rank\n")
        with log.open("a") as file:
            file.write("ond\n")
        assert process.stdout.readline().endswith("rank 0 on vm: second\n")
        log.rename(log.with_name("old"))  # as --fresh does
        write(0, "03 anew")
        assert process.stdout.readline().endswith("rank 0 on vm: anew\n")
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == -signal.SIGINT  # a shell says 130
        assert process.stderr.read() == ""


def test_follow_begins_with_the_last_lines_of_each_rank(write, tmp_path: Path) -> None:
    write(0, *[f"01 {number:09}" for number in range(1000)])
    with following(tmp_path) as process:
        assert process.stdout is not None
        shown = [int(process.stdout.readline().split(": ")[1])]
        while shown[-1] < 999:
            shown.append(int(process.stdout.readline().split(": ")[1]))
    assert shown == list(range(shown[0], 1000))
    assert shown[0] > 800


def test_reader_that_has_had_enough_is_no_fault(write, tmp_path: Path) -> None:
    write(0, *(["01 line " + "x" * 1000] * 2000))
    words = f"{sys.executable} -m train.main logs --run-dir {tmp_path} | head -n 1; echo ${{PIPESTATUS[0]}}"
    line = ["bash", "-c", words]
    done = subprocess.run(line, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300)
    assert (done.stdout.splitlines()[1], done.stderr) == ("0", "")


# Size -----------------------------------------------------------------------------------------------------------


MEASURE = """
import resource, sys
from train.main import main
main(["logs", "--run-dir", sys.argv[1]])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)
"""


@pytest.mark.parametrize("kind", ["lines", "one second"])
def test_memory_does_not_depend_on_the_size(tmp_path: Path, kind: str) -> None:
    def peak_kb(megabytes: int) -> int:
        logs = tmp_path / str(megabytes) / "run" / "logs"
        logs.mkdir(parents=True)
        for rank in range(4):
            with (logs / f"rank-{rank}.log").open("w") as file:
                for number in range(megabytes * 2500):
                    second = 1_700_000_000 + (number // 10 if kind == "lines" else 0)
                    file.write(f"{datetime.fromtimestamp(second).isoformat()} vm r{rank} line {number} {'x' * 60}\n")
        words = [sys.executable, "-c", MEASURE, str(tmp_path / str(megabytes))]
        done = subprocess.run(words, cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        return int(done.stderr)

    small, large = peak_kb(4), peak_kb(24)
    assert large < small + 8000, (small, large)  # the files have 14 MB more, or with times 20 MB
