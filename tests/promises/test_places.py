"""A rank that dies at any place costs no finished step: the job ends with the weights it would have had.

A few of the cases of `tests/soak.py`, which runs them all, and random ones by the hundred. At more than two ranks too:
a sum of two numbers is the same in either order, so two would not show that DDP sums in another order after a restart.
"""

import os
import random

import pytest

from tests.rigs.fork_server import Forks
from tests.rigs.lost_ranks import Case, Soak
from tests.rigs.places import JOINING, KEEPING, PREPARING, STEPPING, Fault
from tests.soak import random_case, sequence

RUNS = int(os.environ.get("RANKUP_RUNS", "1"))
# CI always draws the same faults, so that a failure can be repeated; with RANKUP_RUNS set, each run draws others
SEED = int(os.environ.get("RANKUP_SEED", random.SystemRandom().randrange(10**6) if "RANKUP_RUNS" in os.environ else 1))


@pytest.fixture(scope="module")
def soak(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Soak:
    return Soak(tmp_path_factory.mktemp("soak"), forks)


def check(soak: Soak, case: Case) -> None:
    outcome = soak.run(case)
    assert outcome.problems == [], f"{case}\n{outcome.output}"


def test_in_every_part_of_a_step(soak: Soak) -> None:
    hows = ("SIGKILL", "SIGSEGV", "SIGABRT")
    check(soak, Case("wide", 2, sequence(*(
        Fault(place, i % 2, 2 + i, hows[i % 3]) for i, place in enumerate(STEPPING)
    ))))


def test_while_starting_and_joining_again(soak: Soak) -> None:
    check(soak, Case("wide", 2, sequence(*(Fault(place, i % 2) for i, place in enumerate((*JOINING, *PREPARING))))))


@pytest.mark.parametrize("profile", ["wide", "sharded"])
def test_while_evaluating_and_saving(soak: Soak, profile: str) -> None:
    more = [Fault("saving", 1)] if profile == "sharded" else []
    check(soak, Case(profile, 2, sequence(Fault("evaluating", 1), *(Fault(place, 0) for place in KEEPING), *more)))


def test_two_of_three_ranks_at_once_and_then_all(soak: Soak) -> None:
    check(soak, Case("accumulate", 3, sequence(
        (Fault("backward", 0, 4), Fault("backward", 2, 4)),
        tuple(Fault("after the optimizer", rank, 7) for rank in range(3)),
    )))


def test_the_agent_and_what_forks_for_it(soak: Soak) -> None:
    check(soak, Case("wide", 2, sequence(
        Fault("backward", 1, 4, whom="agent"), Fault("after the optimizer", 0, 8, whom="server"),
    )))


def test_a_survivor_while_it_writes_the_rescue_and_who_reads_it(soak: Soak) -> None:
    check(soak, Case("wide", 3, sequence(
        Fault("backward", 1, 4), Fault("writing the rescue"), Fault("reading the rescue"), Fault("sending the rescue"),
        Fault("backward", 0, 7), Fault("before the rescue"), Fault("rescue known", 2),
    )))


@pytest.mark.slow
@pytest.mark.parametrize("agents", [0, 1], ids=["by hand", "launch"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_anywhere_drawn_at_random(soak: Soak, world_size: int, agents: int) -> None:
    """With dropout, augmentation and DataLoader workers, all of which draw random numbers."""
    rng = random.Random(f"{SEED} {world_size} {agents}")
    for number in range(RUNS):
        print(f"RANKUP_SEED={SEED}, case {number + 1}")
        check(soak, random_case(rng, "workers", world_size, agents))
