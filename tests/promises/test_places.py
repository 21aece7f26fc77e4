"""A rank that dies at any place in its code costs no finished step, and the job ends with an undisturbed run's weights.

`make soak` adds the whole matrix and hundreds of random cases. Some cases have more than two ranks, because a sum of
two numbers is the same in either order: two ranks would not show that DDP sums in another order after a restart.
"""

import os
import random
from collections.abc import Iterator

import pytest

from tests.rigs.fork_server import Forks
from tests.rigs.lost_ranks import PROFILES, Case, Soak
from tests.rigs.places import JOINING, KEEPING, PREPARING, RESCUED, RESCUING, STEPPING, Fault

SOAK = "RANKUP_RUNS" in os.environ
RUNS = int(os.environ.get("RANKUP_RUNS", "1"))
# CI always draws the same faults, so that a failure can be repeated. With RANKUP_RUNS set, each run draws other faults
SEED = int(os.environ.get("RANKUP_SEED", random.SystemRandom().randrange(10**6) if SOAK else 1))
HOWS = ("SIGKILL", "SIGSEGV", "SIGABRT")


def case(profile: str, world_size: int, *faults: Fault | tuple[Fault, ...], agents: int = 1) -> Case:
    """A case with these faults, one after the other. The faults of a tuple happen at the same time."""
    return Case(profile, world_size, tuple((f,) if isinstance(f, Fault) else f for f in faults), agents)


CASES = {
    "in every part of a step": case("wide", 2, *(
        Fault(place, i % 2, 2 + i, HOWS[i % 3]) for i, place in enumerate(STEPPING)
    )),
    "while starting and joining again": case("wide", 2, *(
        Fault(place, i % 2) for i, place in enumerate((*JOINING, *PREPARING))
    )),
    "while evaluating and saving": case("wide", 2, Fault("evaluating", 1), *(Fault(place, 0) for place in KEEPING)),
    "while saving parts": case("sharded", 2, *(Fault(place, 0) for place in KEEPING), Fault("saving", 1)),
    "two of three ranks at once and then all": case(
        "accumulate", 3, (Fault("backward", 0, 4), Fault("backward", 2, 4)),
        tuple(Fault("after the optimizer", rank, 7) for rank in range(3)),
    ),
    "the agent and what forks for it": case(
        "wide", 2, Fault("backward", 1, 4, whom="agent"), Fault("after the optimizer", 0, 8, whom="server"),
    ),
    "a survivor while it writes the rescue and who reads it": case(
        "wide", 3, Fault("backward", 1, 4), Fault("writing the rescue"), Fault("reading the rescue"),
        Fault("sending the rescue"), Fault("backward", 0, 7), Fault("before the rescue"), Fault("rescue known", 2),
    ),
}


def matrix() -> Iterator[Case]:
    """Yield cases that cover every place for each profile and number of ranks, several places in each job."""
    for world_size in (2, 3, 4):
        last = world_size - 1
        for rank, how in ((0, "SIGKILL"), (last, "SIGSEGV"), (1, "SIGABRT")):
            yield case("wide", world_size, *(Fault(place, rank, 2 + i, how) for i, place in enumerate(STEPPING)))
        for rank in (0, last):
            yield case("wide", world_size, *(Fault(place, rank) for place in (*PREPARING, *JOINING)))
        yield case("wide", world_size, *(Fault(place, 0) for place in KEEPING), Fault("evaluating", last))
        yield case("wide", world_size, Fault("forward", 1, 4, whom="agent"), Fault("backward", 0, 8, whom="node"),
                   Fault("after the optimizer", last, 12, whom="server"), Fault("between buckets", 0, 16))
        for place in RESCUING if world_size > 2 else ():  # a second loss during the recovery from the first
            yield case("wide", world_size, Fault("backward", 1, 4), Fault(place), Fault("forward", 0, 13), Fault(place))
        yield case("wide", world_size, *(
            fault for i, place in enumerate(RESCUED)  # these rescues are newer than any checkpoint
            for fault in (Fault("backward", i % 2, (3, 8, 13)[i]), Fault(place), Fault(place))
        ))
        for profile in PROFILES:
            # The hooks of "backward" cannot see FSDP's parameters
            first = "in the optimizer" if profile == "sharded" else "backward"
            places = [first, "after the optimizer", "evaluating"]
            yield case(profile, world_size, *(Fault(p, i % world_size, 3 + 4 * i) for i, p in enumerate(places)))
    for world_size in (2, 3):  # each rank has its own agent, as in a container
        yield case("wide", world_size, Fault("forward", 1, 4), Fault("after the optimizer", 1, 10, whom="node"),
                   Fault("in the optimizer", 0, 13, whom="node"), (Fault("backward", 0, 17), Fault("backward", 1, 17)),
                   agents=world_size)
    yield case("wide", 2, Fault("evaluating", 1, 5, "SIGTERM", "agent"), Fault("between the renames"))


def random_case(rng: random.Random, world_size: int, agents: int) -> Case:
    """Draw one to six faults at any place. One fault in three happens some milliseconds after its place."""
    groups: list[tuple[Fault, ...]] = []
    step = 0
    for _ in range(rng.randint(1, 6)):
        kind = rng.choice((STEPPING, STEPPING, STEPPING, PREPARING, JOINING, KEEPING))
        step += rng.randint(1, 3)
        place = rng.choice(kind)
        how = rng.choice(("SIGKILL", *HOWS))
        late_s = rng.choice((0.0, 0.0, round(rng.uniform(0.001, 0.05), 3)))
        ranks = [0] if kind is KEEPING else rng.sample(range(world_size), rng.choice((1, 1, 1, 2, world_size)))
        groups.append(tuple(Fault(place, r, step if kind is STEPPING else 0, how, late_s=late_s) for r in ranks))
    return Case("workers", world_size, tuple(groups), agents)


@pytest.fixture(scope="module")
def soak(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Soak:
    return Soak(tmp_path_factory.mktemp("soak"), forks)


def check(soak: Soak, case: Case) -> None:
    problems, output = soak.run(case)
    assert problems == [], f"{case}\n{output}"


@pytest.mark.parametrize("name", CASES)
def test_lost_rank_changes_no_weight(soak: Soak, name: str) -> None:
    check(soak, CASES[name])


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "agents"), [(2, 0), (4, 1), *([(2, 1), (4, 0)] if SOAK else [])])
def test_ranks_lost_at_random_change_no_weight(soak: Soak, world_size: int, agents: int) -> None:
    """The job has dropout, augmentation and DataLoader workers, all of which draw random numbers."""
    rng = random.Random(f"{SEED} {world_size} {agents}")
    for number in range(RUNS):
        print(f"RANKUP_SEED={SEED}, case {number + 1}")
        check(soak, random_case(rng, world_size, agents))


if SOAK:
    @pytest.mark.slow
    @pytest.mark.parametrize("lost", [*matrix()], ids=str)
    def test_ranks_lost_at_each_place_change_no_weight(soak: Soak, lost: Case) -> None:
        check(soak, lost)
