"""A rank that keeps the others waiting is named, whatever the loop does, and no rank that only waits is suspected."""

import re
from pathlib import Path

import pytest

from rankup.explain import diagnose_files
from tests.rigs.fork_server import Forks

SCRIPT = Path(__file__).with_name("late_script.py")


def output_of(forks: Forks, folder: Path, where: str, exchange: str, *, code: int) -> str:
    line = ("launch", "--nproc=3", "--max-restarts=0", SCRIPT, folder / "run", where, exchange)
    return forks.ends(*line, cwds=[folder], code=code)


@pytest.mark.parametrize(("where", "exchange"), [
    ("code", "ddp"), ("data", "ddp"), ("hook", "ddp"), ("backward", "ddp"), ("code", "all_reduce"),
    ("code", "barrier"), ("code", "objects"),
])
def test_rank_that_only_waits_is_never_suspected(where: str, exchange: str, forks: Forks, tmp_path: Path) -> None:
    output = output_of(forks, tmp_path, where, exchange, code=171)
    # How a rank knows it depends on whose deadline passes first: "is alive, ...", "says that the others wait for it"
    suspected = re.findall(r"suspected: rank (\d+) on \S+ \([^)]*\)(.)", output)
    assert suspected, output
    assert {rank for rank, _ in suspected} == {"1"}, output
    assert {more for _, more in suspected}.isdisjoint({","}), output  # no second suspect
    cause = diagnose_files([tmp_path / "run"])[0]
    assert (cause.title, cause.rank) == ("the phase step took longer than its deadline", 1)


def test_rank_without_batches_is_named_at_once_and_nothing_is_repeated(forks: Forks, tmp_path: Path) -> None:
    output = output_of(forks, tmp_path, "uneven", "ddp", code=2)
    got = r"a pass must have the same number of batches on every rank, got 3 on rank 1 \(\S+\), while rank \d"
    assert re.search(got, output), output
    assert "took longer" not in output


@pytest.mark.parametrize(("where", "call"), [("finish", "finish"), ("evaluation", "gather")])
def test_ranks_at_different_places_of_the_program_are_a_fault_of_it(
    where: str, call: str, forks: Forks, tmp_path: Path
) -> None:
    """Rank 1 leaves the loop or evaluates, and the others exchange gradients. No restart helps."""
    output = output_of(forks, tmp_path, where, "ddp", code=2)
    at = r"backward \(late_script.py:\d+ <module>\) of step 4"
    why = rf"{call}: job.{call} must be called on all ranks, got a call on rank 1 \(\S+\) while rank \d \(\S+\)"
    assert re.search(f"error: {why} waits at {at}", output), output


def test_ranks_that_wait_for_each_other_in_two_groups_are_a_fault_of_the_program(forks: Forks, tmp_path: Path) -> None:
    output = output_of(forks, tmp_path, "group", "ddp", code=1)
    at = r"\(late_script.py:\d+ <module>\) of step 4"
    assert re.search(rf"at different places of the program: ranks 0[, ]+2: backward {at}; rank 1: \w+ {at}", output)


def test_uneven_passes_of_ranks_that_exchange_nothing_are_refused_too(forks: Forks, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import rankup\njob, count = rankup.init('run', compare_every_steps=0), {'n': 0}\njob.track(count=count)\n"
        "for batch in job.batches([1] * (5 - 2 * job.rank)):\n    with job.step():\n        count['n'] += 1\n"
        "job.finish()\n"
    )
    output = forks.ends("launch", "--nproc=2", tmp_path / "script.py", cwds=[tmp_path], code=2)
    assert "a pass must have the same number of batches on every rank, got 5 on rank 0, 3 on rank 1." in output
