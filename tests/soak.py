"""Jobs that lose ranks at every place where one can be lost: which, and what came of them.

`python -m tests.soak` runs the whole matrix and then random cases, one line for each in the log, and a summary:

    python -m tests.soak --random 100 --seed 1 --log soak.log
"""

import argparse
import random
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.rigs import places
from tests.rigs.fork_server import Forks
from tests.rigs.jobs import ROOT
from tests.rigs.lost_ranks import PROFILES, WITHOUT_RESCUE, Case, Outcome, Soak
from tests.rigs.places import JOINING, KEEPING, PREPARING, STEPPING, Fault


def sequence(*faults: Fault | tuple[Fault, ...]) -> tuple[tuple[Fault, ...], ...]:
    """Faults that come one after the other; those in a tuple at once."""
    return tuple((fault,) if isinstance(fault, Fault) else fault for fault in faults)


def matrix() -> Iterator[Case]:
    """Every place, for each kind of job and number of ranks; several in each job."""
    hows = ("SIGKILL", "SIGSEGV", "SIGABRT")
    for world_size in (2, 3, 4):
        last = world_size - 1
        for rank, how in ((0, "SIGKILL"), (last, "SIGSEGV"), (1, "SIGABRT")):
            yield Case("wide", world_size, sequence(*(Fault(p, rank, 2 + i, how) for i, p in enumerate(STEPPING))))
        for rank in (0, last):
            yield Case("wide", world_size, sequence(*(Fault(place, rank) for place in (*PREPARING, *JOINING))))
            yield Case("wide", world_size, sequence(Fault("backward", last - rank, 3),
                                                    *(Fault(place, rank) for place in JOINING)))
        yield Case("wide", world_size, sequence(*(Fault(place, 0) for place in KEEPING), Fault("evaluating", last)))
        everyone = range(world_size)
        yield Case("wide", world_size, sequence(
            *(tuple(Fault(place, rank, 4 + 3 * i) for rank in everyone) for i, place in enumerate(STEPPING[::3])),
            (Fault("forward", 0, 17), Fault("forward", last, 17)),
        ))
        yield Case("wide", world_size, sequence(
            Fault("forward", 1, 4, whom="agent"), Fault("backward", 0, 8, whom="node"),
            Fault("after the optimizer", last, 12, whom="server"),
        ))
    for world_size in (2, 3):  # each rank in a container of its own
        yield Case("wide", world_size, sequence(
            Fault("forward", 1, 4), Fault("backward", 0, 7), Fault("after the optimizer", 1, 10, whom="node"),
            Fault("in the optimizer", 0, 13, whom="node"), (Fault("backward", 0, 17), Fault("backward", 1, 17)),
        ), agents=world_size)
    yield Case("wide", 2, sequence(Fault("backward", 1, 3, "SIGSTOP"), Fault("in the optimizer", 0, 7, "SIGSTOP")))
    yield Case("wide", 2, sequence(Fault("evaluating", 1, 5, "SIGTERM", "agent"), Fault("between the renames")))
    yield from rescue_cases()
    for number, profile in enumerate(PROFILES):
        for world_size in (2, 3):
            chosen = ["backward", "after the optimizer", "evaluating", "forward", "before the optimizer"]
            if profile in WITHOUT_RESCUE:  # whose parameters the hooks of "backward" do not know
                chosen[0] = "in the optimizer"
            yield Case(profile, world_size, sequence(*(
                Fault(place, (number + i) % world_size, 3 + 4 * i, hows[i % 3]) for i, place in enumerate(chosen)
            )))


def rescue_cases() -> Iterator[Case]:
    """A second loss while the first is being recovered from."""
    for place in places.RESCUING:
        for world_size in (3, 4):
            yield Case("wide", world_size, sequence(
                Fault("backward", 1, 4), Fault(place), Fault("forward", 0, 13), Fault(place),
            ))
    for world_size in (2, 3):
        yield Case("wide", world_size, sequence(
            *(fault for i, place in enumerate(places.RESCUED)  # no checkpoint is as new as these rescues
              for fault in (Fault("backward", i % 2, (3, 8, 13)[i]), Fault(place), Fault(place))),
        ))


def random_case(rng: random.Random, profile: str = "", world_size: int = 0, agents: int | None = None) -> Case:
    """One to six faults, anywhere; one of three some time after its place. `profile` and so on: drawn unless given."""
    world_size = world_size or rng.choice((2, 2, 3, 4))
    profile = profile or rng.choice(("wide", "wide", "workers", "accumulate"))
    agents = rng.choice((1, 1, 0)) if agents is None else agents
    groups: list[tuple[Fault, ...]] = []
    step = 0
    for _ in range(rng.randint(1, 6)):
        kind = rng.choice((STEPPING, STEPPING, STEPPING, PREPARING, JOINING, KEEPING))
        step += rng.randint(1, 3)
        place = rng.choice(kind)
        how = rng.choice(("SIGKILL", "SIGKILL", "SIGSEGV", "SIGABRT"))
        late_s = rng.choice((0.0, 0.0, round(rng.uniform(0.001, 0.05), 3)))
        ranks = rng.sample(range(world_size), rng.choice((1, 1, 1, 2, world_size)))
        if kind is KEEPING:
            ranks = [0]  # which saves
        groups.append(tuple(Fault(place, r, step if kind is STEPPING else 0, how, late_s=late_s) for r in ranks))
    return Case(profile, world_size, tuple(groups), agents)


# Running them -----------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--random", type=int, default=100, metavar="N", help="random cases after the matrix")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6), help="of the random cases")
    parser.add_argument("--log", type=Path, default=ROOT / "runs" / "soak.log", help="one line for each case")
    parser.add_argument("--no-matrix", action="store_true", help="random cases alone")
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases whose text has this in it")
    given = parser.parse_args()
    rng = random.Random(given.seed)
    cases = [*(() if given.no_matrix else matrix()), *(random_case(rng) for _ in range(given.random))]
    cases = [case for case in cases if given.only in str(case)]
    outcomes = []
    given.log.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, given.log.open("a", buffering=1) as log:
        forks = Forks(Path(folder))
        soak = Soak(Path(folder), forks)
        log.write(f"{len(cases)} cases, seed {given.seed}\n")
        for number, case in enumerate(cases, 1):
            outcome = soak.run(case)
            outcomes.append(outcome)
            verdict = "; ".join(outcome.problems) or "well"
            times = f"{outcome.seconds:.0f} s, {len(outcome.struck)} faults, {outcome.lost} lost steps done again"
            log.write(f"{number}: {verdict} ({times}): {case}\n")
            if outcome.problems:
                given.log.with_name(f"{given.log.stem}-{number}.txt").write_text(f"{case}\n\n{outcome.output}")
        forks.close()
        log.write(summary(outcomes) + "\n")
    print(summary(outcomes))
    return int(any(outcome.problems for outcome in outcomes))


def summary(outcomes: Sequence[Outcome]) -> str:
    well = sum(not outcome.problems for outcome in outcomes)
    kinds = Counter(strike.fault.how for outcome in outcomes for strike in outcome.struck)
    faults = ", ".join(f"{count} {how}" for how, count in kinds.most_common())
    lost = sum(outcome.lost for outcome in outcomes)
    seconds = statistics.median(outcome.seconds for outcome in outcomes) if outcomes else 0.0
    return (
        f"{well} of {len(outcomes)} cases ended well; {kinds.total()} faults struck ({faults}); {lost} steps were done "
        f"again, as all ranks that had finished them died; a job took {seconds:.0f} s (median)"
    )


if __name__ == "__main__":
    sys.exit(main())
