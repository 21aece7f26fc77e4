"""`rankup logs` shows the lines of all ranks by time, folds equal lines, begins at any time, and follows new lines."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.rigs.jobs import ROOT, environment
from train.main import main


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """A function that appends lines to a rank's log. "02 step" is "step" at second 2, and "step" has no time."""

    def _write(rank: int, *texts: str, run: str = "run", host: str = "vm") -> Path:
        path = tmp_path / run / "logs" / f"rank-{rank}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [f"2026-11-22T10:00:{t[:2]} {host} r{rank} {t[3:]}" if t[:2].isdigit() else t for t in texts]
        with path.open("a") as file:
            file.writelines(f"{line}\n" for line in lines)
        return path

    return _write


def printed(capfd: pytest.CaptureFixture[str], *words: str) -> list[str]:
    """Run `logs`. Return what it prints, without the day and the hour."""
    code = main(["logs", *words])
    out, err = capfd.readouterr()
    assert (code, err) == (0, "")
    return out.replace("2026-11-22T10:00:", "").splitlines()


def test_log_lines_are_sorted_by_time_and_equal_lines_are_folded(write, tmp_path, capfd) -> None:
    for rank in range(8):
        write(rank, "01 ready", f"0{2 + rank % 2} saved", host=f"node{rank // 4}")
    write(2, "06 saved", host="node0")
    write(3, "08 alone", host="node0")
    write(4, "07 b", "08 two", host="node1")
    write(6, "08 two", host="node1")
    assert printed(capfd, str(tmp_path / "run")) == [
        "01 ranks 0-7: ready", "02 ranks 0-7: saved", "06 rank 2 on node0: saved", "07 rank 4 on node1: b",
        "08 rank 3 on node0: alone", "08 ranks 4, 6 on node1: two",
    ]


@pytest.mark.parametrize(("ranks", "expected"), [
    (["aPb", "ab", "ab"], ["0-2:a", "0:P", "0-2:b"]),
    (["ab", "aPb", "aPb"], ["0-2:a", "0:b", "1-2:P", "1-2:b"]),  # rank 0 wrote no P before its b
    (["ab", "ca"], ["0:a", "1:c", "0:b", "1:a"]),
    (["ab", "ba"], ["0:a", "0-1:b", "1:a"]),  # only one of the two can be folded
    (["aa", "a"], ["0-1:a", "0:a"]),
    (["axa", "ya"], ["0:a", "1:y", "0:x", "0-1:a"]),
    (["sabc", "tabc"], ["0:s", "1:t", "0-1:a", "0-1:b", "0-1:c"]),
    (["", "a"], ["1:a"]),
])
def test_log_lines_of_one_second_keep_each_ranks_order(write, tmp_path, capfd, ranks, expected) -> None:
    for rank, text in enumerate(ranks):
        write(rank, *(f"00 {char}" for char in text))
    shown = [re.fullmatch(r"00 ranks? (\S+) on vm: (.)", line) for line in printed(capfd, str(tmp_path / "run"))]
    assert [f"{line[1]}:{line[2]}" if line else line for line in shown] == expected


def test_logs_print_an_unfinished_last_line_and_bytes_that_are_no_text(write, tmp_path, capfdbinary) -> None:
    path = write(0, "01 start")
    with path.open("ab") as file:
        file.write(b"2026-11-22T10:00:02 vm r0 \xff half")
    assert main(["logs", str(tmp_path / "run")]) == 0
    assert capfdbinary.readouterr().out.splitlines()[-1] == b"2026-11-22T10:00:02 rank 0 on vm: \xff half"


def test_logs_find_a_run_by_name_or_folder_or_as_the_newest(write, tmp_path, capfd) -> None:
    old = write(0, "01 old", run="old")
    write(0, "02 new", run="new").with_name("rank-0.old.log").touch()  # no log of rankup
    os.utime(old, (1, 1))
    where = ["--run-dir", str(tmp_path)]
    assert printed(capfd, *where) == ["02 rank 0 on vm: new"]
    assert printed(capfd, "old", *where) == printed(capfd, str(tmp_path / "old")) == ["01 rank 0 on vm: old"]


def test_logs_can_be_limited_to_ranks_and_times(write, tmp_path, capfd) -> None:
    for rank in range(12):
        write(rank, "01 old", "05 here")
    run, since = str(tmp_path / "run"), ("--since", "2026-11-22T10:00:02")
    assert printed(capfd, run, "--rank", "3") == ["01 rank 3 on vm: old", "05 rank 3 on vm: here"]
    assert printed(capfd, run, "--rank", "0-2,10", *since) == ["05 ranks 0-2, 10 on vm: here"]
    now = time.strftime("%Y-%m-%dT%H:%M:%S")
    with write(0).open("a") as file:
        file.write(f"{now} vm r0 now\n")
    assert printed(capfd, run, "--since", "10m") == [f"{now} rank 0 on vm: now"]


@pytest.mark.parametrize(("words", "said"), [
    ("odl --run-dir {0}", "RUN must be a run in {0}/ or a run's folder, got odl. There are: old."),
    ("--run-dir {0}/none", "no run with logs was found in {0}/none."),
    ("{0}/old --rank 3-1", "--rank must be ranks such as 3 or 0-3,7, got 3-1."),
    ("{0}/old --rank 7", "got no logs/rank-7.log in {0}/old."),
    ("{0}/old --rank all", "--rank must be ranks such as 3 or 0-3,7, got all."),
    ("{0}/old --since yesterday", "--since must be a time such as 10m, 2h or 2026-11-22T14:05, got yesterday."),
])
def test_logs_refuse_runs_ranks_and_times_that_do_not_exist(write, tmp_path, capfd, words: str, said: str) -> None:
    write(0, "01 old", run="old")
    assert main(["logs", *words.format(tmp_path).split()]) == 2
    assert said.format(tmp_path) in capfd.readouterr().err


def test_logs_follow_new_lines_ranks_and_files_until_ctrl_c(write, tmp_path: Path) -> None:
    log = write(0, *[f"01 {number:09}" for number in range(1000)])
    process = subprocess.Popen([sys.executable, "-m", "train.main", "logs", "--run-dir", str(tmp_path), "--follow"],
                               cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process:
        try:
            first = int(process.stdout.readline().split(": ")[1])
            assert 800 < first < 999
            assert [int(process.stdout.readline()[-10:]) for _ in range(first + 1, 1000)] == [*range(first + 1, 1000)]
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
            assert (process.wait(60), process.communicate()[1]) == (-signal.SIGINT, "")  # a shell says 130
        finally:
            process.kill()


def test_logs_end_with_0_when_their_reader_ends(write, tmp_path: Path) -> None:
    write(0, *(["01 line " + "x" * 1000] * 2000))
    words = f"{sys.executable} -m train.main logs --run-dir {tmp_path} | head -n 1; echo ${{PIPESTATUS[0]}}"
    line = ["bash", "-c", words]
    done = subprocess.run(line, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300)
    assert (done.stdout.splitlines()[1], done.stderr) == ("0", "")


MEASURE = """
import pathlib, sys
from train.main import main
def peak_kb(): return int(pathlib.Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
before = peak_kb()
main(["logs", sys.argv[1]])
print(peak_kb() - before, file=sys.stderr)
"""


def test_memory_of_logs_does_not_depend_on_their_size(write, tmp_path: Path) -> None:
    """All lines are of one second, because lines of earlier seconds are printed and freed first."""
    for rank in range(4):
        write(rank, *(f"00 line {number} {'x' * 60}" for number in range(60_000)))  # 24 MB in all
    words = [sys.executable, "-c", MEASURE, str(tmp_path / "run")]
    done = subprocess.run(words, cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert int(done.stderr) < 14_000
