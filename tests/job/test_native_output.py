"""What compiled code prints is in the rank's log, also its last words and also if the script imports rankup."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rankup.agent.logs import host_name
from tests.rigs.fork_server import Forks
from tests.rigs.jobs import ROOT

SCRIPT = """
import ctypes, logging, os, subprocess, sys, threading
logging.basicConfig(format="THEIRS %(message)s")
import rankup
where, rank = sys.argv[1], int(os.environ["RANK"])
def crash(place):
    if (place, rank) == (where, 1):
        os.write(1, b"no end of line")
        ctypes.CDLL("libstdc++.so.6")._ZSt17__throw_bad_allocv()
crash("import")
os.write(2, b"early\\n")
job, count = rankup.init("runs/mine"), {"n": 0}
subprocess.run(["sh", "-c", "echo from a child; echo and its error >&2"])
print("printed once")
logging.getLogger("mine").warning("logged once")
job.track(count=count)
for step in job.steps(3):
    with job.step():
        count["n"] += 1
        if step == 1: crash("step")
    if step == 1:
        thread = threading.Thread(target=crash, args=["thread"])
        thread.start()
        thread.join()
job.finish()
"""
NATIVE = ("early", "from a child", "and its error")
LAST_WORDS = (
    "terminate called after throwing an instance of 'std::bad_alloc'", "  what():  std::bad_alloc",
    "Fatal Python error: Aborted", "no end of line",
)


def launch(forks: Forks, folder: Path, where: str, *options: str, code: int) -> str:
    (folder / "job.py").write_text(SCRIPT)
    return forks.ends("launch", "--nproc=2", "--max-restarts=0", *options, folder / "job.py", where, cwds=[folder],
                      code=code)


def logged(run: Path, rank: int) -> list[str]:
    """Return the lines in the rank's log, without time, host and rank."""
    lines = (run / "logs" / f"rank-{rank}.log").read_text().splitlines()
    head = f"{host_name()} r{rank} "
    assert all(line.partition(" ")[2].startswith(head) for line in lines), lines
    return [line.partition(head)[2] for line in lines]


@pytest.mark.parametrize(("where", "option", "run"), [
    ("import", "", "runs/job"),  # before rankup.init has named the run
    ("step", "", "runs/mine"),
    ("thread", "", "runs/mine"),
    ("step", "--no-fork", "runs/mine"),
])
def test_last_words_of_compiled_code_are_in_the_log_of_its_rank(
    where: str, option: str, run: str, forks: Forks, tmp_path: Path
) -> None:
    output = launch(forks, tmp_path, where, *filter(None, [option]), code=134)
    lines = logged(tmp_path / run, 1)
    assert [lines.count(each) for each in LAST_WORDS] == [1] * len(LAST_WORDS), lines
    assert [output.count(f"[{host_name()} r1/2] {each}\n") for each in LAST_WORDS] == [1] * len(LAST_WORDS), output
    assert any('job.py", line 9 in crash' in line for line in lines)  # the stack of Python
    if where != "import":
        assert not set(LAST_WORDS) & {*logged(tmp_path / run, 0)}
    _, explained = forks.run("explain", tmp_path / run)
    assert re.search(r"seen  .*std::bad_alloc", explained), explained


@pytest.mark.parametrize("options", [[], ["--no-fork"]], ids=["forked", "fresh"])
def test_each_line_is_in_the_log_once_and_in_order(options: list[str], forks: Forks, tmp_path: Path) -> None:
    output = launch(forks, tmp_path, "nowhere", *options, code=0)
    for rank in (0, 1):
        lines = logged(tmp_path / "runs/mine", rank)
        assert [line for line in lines if line in NATIVE] == [*NATIVE]
        assert [lines.count(each) for each in ("printed once", "logged once")] == [1, 1], lines
        assert len(set(lines)) == len(lines)
    assert [output.count("THEIRS logged once"), output.count("printed once\n")] == [2, 2], output
    assert not re.search(r"\] (THEIRS|printed once)", output), output


@pytest.mark.parametrize("options", [[], ["--no-fork"], None], ids=["forked", "fresh", "torchrun"])
def test_lines_that_ranks_print_at_once_do_not_mix(options: list[str] | None, forks: Forks, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(
        "import sys, rankup\njob = rankup.init('runs/mine')\njob.gather(0)\nfor n in range(500):\n"
        "    print('out', job.rank, n, 'end', file=sys.stderr if n % 2 else sys.stdout)\njob.finish()\n"
    )
    if options is None:  # as in an image: the ranks share a pipe, and no agent is between
        words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=3", str(tmp_path / "job.py")]
        env = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(ROOT)}
        output = subprocess.run(words, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                text=True, check=True, timeout=300).stdout
    else:
        output = forks.ends("launch", "--nproc=3", *options, tmp_path / "job.py", cwds=[tmp_path])
    lines = [line for line in output.splitlines() if "out" in line.split()]
    assert sorted(lines) == sorted(f"out {rank} {n} end" for rank in range(3) for n in range(500))


def test_log_on_a_full_disk_ends_no_rank_and_takes_nothing_from_the_terminal(forks: Forks, tmp_path: Path) -> None:
    (tmp_path / "runs/mine/logs").mkdir(parents=True)
    for rank in (0, 1):
        (tmp_path / f"runs/mine/logs/rank-{rank}.log").symlink_to("/dev/full")
    output = launch(forks, tmp_path, "nowhere", code=0)
    for rank in (0, 1):
        assert [output.count(f"[{host_name()} r{rank}/2] {each}\n") for each in NATIVE] == [1] * len(NATIVE), output
