"""No schedule of faults breaks a promise of the meeting, see `simulator`. A seed that fails is replayed alone:
`python -m tests.agent.simulator 4711`."""

import os

import pytest

from tests.agent import mutants, simulator

PARTS = 8
SCHEDULES = 2000 * int(os.environ.get("RANKUP_RUNS", "10"))


@pytest.mark.parametrize("part", range(PARTS))
def test_no_schedule_of_faults_breaks_a_promise(part: int) -> None:
    failed = [(seed, why) for seed, why, _ in map(simulator.play, range(part, SCHEDULES, PARTS)) if why]
    assert not failed, failed[:5]


def test_seed_that_failed_fails_again() -> None:
    """Nothing depends on where objects are in memory."""
    played = [[simulator.play(seed) for seed in range(60)] for _ in range(3)]
    assert played[0] == played[1] == played[2]


@pytest.mark.parametrize(("number", "seed"), mutants.SEEDS.items())
def test_fault_in_the_meeting_is_found(number: int, seed: int) -> None:
    """The simulator must see what it looks for. If it does not, `python -m tests.agent.mutants` finds another seed."""
    assert mutants.broken(number).play(seed)[1]
    assert not simulator.play(seed)[1]
