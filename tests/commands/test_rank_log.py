"""A rank's log is read from any time on, and piece by piece: its size does not matter."""

import subprocess
import sys
from contextlib import closing
from datetime import datetime
from pathlib import Path

import pytest

from tests.rigs.jobs import ROOT, environment
from train.commands.logs import rank_log
from train.commands.logs.rank_log import RankLog


@pytest.mark.parametrize("size", [rank_log.CHUNK, 200])
@pytest.mark.parametrize("second", [0, 1, 777, 1999, 2500])
def test_since_finds_the_first_line_by_bisection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, second: int, size: int
) -> None:
    monkeypatch.setattr(rank_log, "CHUNK", max(size, 4000))

    def stamp(number: int) -> str:
        return datetime.fromtimestamp(1_700_000_000 + number).isoformat()

    path = tmp_path / "rank-0.log"
    with path.open("w") as file:
        for number in range(2000):
            file.write(f"{stamp(number)} vm r0 {number}\n")
            file.write("  without a time\n" * (number % 7))
            file.write("x" * 9000 + "\n" if number == 800 else "")
    with closing(RankLog(path, 0)) as log:
        log.seek(stamp(second).encode())
        found = [line for block in log.blocks(whole=True) for line in block.lines]
        assert log.last_stamp() == stamp(1999).encode()
    assert [int(line.split(b"\n")[0]) for line in found] == list(range(second, 2000))


def test_blocks_are_the_same_however_the_file_is_cut_into_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rank-0.log"
    stamped = (
        f"2026-11-22T10:00:{second:02} vm r0 line {number}" for second in range(20) for number in range(second % 5)
    )
    path.write_text("".join(f"{line}\n" for line in ("before", *stamped, "rest", "end")))

    def lines() -> list[tuple[bytes, bytes]]:
        with closing(RankLog(path, 0)) as log:
            return [(block.stamp, line) for block in log.blocks(whole=True) for line in block.lines]

    whole = lines()
    assert len(whole) > 40
    for size in (1, 7, 64, 333):
        monkeypatch.setattr(rank_log, "CHUNK", size)
        assert lines() == whole


MEASURE = """
import resource, sys
from train.main import main
main(["logs", "--run-dir", sys.argv[1]])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)
"""


@pytest.mark.parametrize("kind", ["lines", "one second", "no times", "no line ends"])
def test_memory_does_not_depend_on_the_size(tmp_path: Path, kind: str) -> None:
    def peak_kb(megabytes: int) -> int:
        logs = tmp_path / str(megabytes) / "run" / "logs"
        logs.mkdir(parents=True)
        for rank in range(4):
            with (logs / f"rank-{rank}.log").open("w") as file:
                for number in range(megabytes * 2500):
                    second = 1_700_000_000 + (number // 10 if kind == "lines" else 0)
                    head = "" if kind.startswith("no") else f"{datetime.fromtimestamp(second).isoformat()} vm r{rank} "
                    line_end = "" if kind == "no line ends" else "\n"
                    file.write(f"{head}line {number} {'x' * 60}{line_end}")
        words = [sys.executable, "-c", MEASURE, str(tmp_path / str(megabytes))]
        done = subprocess.run(words, cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        return int(done.stderr)

    small, large = peak_kb(4), peak_kb(24)
    assert large < small + 8000, (small, large)  # the files have 14 MB more, or with times 20 MB
