"""Jobs that lose ranks at every place where one can be lost, and what has to be true of each in the end.

`python -m tests.soak` runs the whole matrix and then random cases, one line for each in the log, and a summary:

    python -m tests.soak --random 100 --seed 1 --log soak.log
"""

import argparse
import json
import os
import random
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.rigs import places
from tests.rigs.jobs import MAIN, ROOT, ended, environ_of, environment, free_port, metrics, rank_env, result, start
from tests.rigs.places import JOINING, KEEPING, PREPARING, STEPPING, Fault

STEPS = 24
EPOCH = 8  # steps
EVERY_JOB = (
    f"--max-steps={STEPS}", "--batch-size=48", "--save-every-steps=5", "--eval-batch-size=16", "--log-every-steps=1",
    "--progress=none", "--name=run", "--step-timeout-s=120", "--join-timeout-s=120",
)
OWN = ("--workload=tests.rigs.recording_workload:build", "--limit-train=384")
FAKE = ("--dataset=fake", "--fake-samples=384")
JOB_TIMEOUT_S = 600.0
SLOW_S = 5.0  # a recovery that takes longer deserves a look, so what the job said is kept

# What is trained, by name
PROFILES: dict[str, tuple[str, ...]] = {
    "wide": (*OWN, "--options.model=wide", "--num-workers=0"),
    "workers": (*FAKE, "--model=cnn", "--dropout=0.2", "--augment", "--in-memory=never", "--num-workers=1"),
    "accumulate": (*OWN, "--options.model=wide", "--accumulate=2", "--optimizer=adamw", "--lr=0.001", "--clip-norm=1"),
    "fp16": (*FAKE, "--model=cnn", "--precision=fp16", "--optimizer=adamw", "--lr=0.001"),
    "bf16": (*FAKE, "--model=cnn", "--precision=bf16"),
    "compile": (*FAKE, "--model=mlp", "--compile"),
    "text": ("--workload=text", "--limit-train=384", "--optimizer=adamw", "--lr=0.001"),
    "bert": ("--workload=text", "--limit-train=384", "--optimizer=adamw", "--lr=0.0005", "--bert-dir={bert}",
             "--max-seq-len=64"),
    # Ranks hold different states: the run goes on from its checkpoint
    "fsdp": (*OWN, "--options.model=wide", "--parallel=fsdp"),
    "powersgd": (*OWN, "--options.model=wide", "--compress=powersgd", "--powersgd-start=2"),
}
FROM_CHECKPOINT = ("fsdp", "powersgd")


@dataclass(frozen=True)
class Case:
    """One job and what it suffers. `launcher`: "launch", or "supervise": a supervisor for each rank, as in containers.
    """

    profile: str
    world_size: int
    faults: tuple[tuple[Fault, ...], ...]
    launcher: str = "launch"

    def __str__(self) -> str:
        text = "; ".join(" + ".join(_told(fault) for fault in group) for group in self.faults)
        return f"{self.profile}, {self.launcher}, {self.world_size} ranks: {text}"


def _told(fault: Fault) -> str:
    who = "any rank" if fault.rank < 0 else f"rank {fault.rank}"
    who += "" if fault.whom == "self" else f"'s {fault.whom}"
    return f"{who} {fault.how} {fault.place}" + (f" in step {fault.step}" if fault.step else "")


@dataclass
class Outcome:
    """What came of a case: no problems, if all is well."""

    problems: list[str]
    seconds: float = 0.0
    struck: int = 0
    lost: int = 0  # optimizer steps that were done again, since nobody who had finished them lived on
    slowest: tuple[float, str] = (0.0, "")  # seconds from a loss to the next step or the next loss, and where
    output: str = ""


@dataclass
class Soak:
    """Runs cases in one folder, and knows what undisturbed jobs end with."""

    folder: Path
    known: dict[tuple[str, int], Mapping[str, Any]] = field(default_factory=dict)
    count: int = 0

    def run(self, case: Case) -> Outcome:
        """The job of that case to its end, or to its time limit, and all that is wrong with it."""
        expected = self.undisturbed(case.profile, case.world_size)
        self.count += 1
        folder = self.folder / f"case-{self.count}"
        began_s = time.monotonic()
        job = _Job(folder, self.settings(case.profile), case)
        problems = job.to_its_end()
        left = psutil.wait_procs(job.processes(), timeout=20)[1]
        problems += [f"left: {process}" for process in left]
        for process in left:
            process.kill()
        if not problems:
            problems = _differences(folder / "run", expected)
        struck = places.strikes(folder / "faults")
        wanted = sum(map(len, case.faults))
        if len(struck) < wanted:
            problems.append(f"only {len(struck)} of {wanted} faults struck")
        lost, repeated = _done_again(folder / "faults")
        if case.profile not in FROM_CHECKPOINT and repeated:
            problems.append(f"done again although a rank had finished them and lived on: {', '.join(repeated)}")
        problems += _left_in_memory(folder)
        output = job.output + "".join(path.read_text() for path in sorted((folder / "run" / "logs").glob("*.log")))
        return Outcome(problems, time.monotonic() - began_s, len(struck), lost, _slowest(folder / "faults"), output)

    def undisturbed(self, profile: str, world_size: int) -> Mapping[str, Any]:
        """Digest and metrics of the run that nothing happens to."""
        if (profile, world_size) not in self.known:
            folder = self.folder / f"undisturbed-{profile}-{world_size}"
            command = [sys.executable, str(MAIN), "launch", f"--nproc={world_size}", f"--run-dir={folder}"]
            job = start(*command, *self.settings(profile))
            with ended(job):
                assert job.wait(JOB_TIMEOUT_S) == [0], job.output
            self.known[profile, world_size] = _of_run(folder / "run")
        return self.known[profile, world_size]

    def settings(self, profile: str) -> list[str]:
        words = [*PROFILES[profile], *EVERY_JOB, f"--tensorboard={str(profile == 'workers').lower()}"]
        if "{bert}" in " ".join(words):
            bert = self.folder / "bert"
            if not bert.exists():
                from tests.rigs.tiny_bert import make_bert

                make_bert(bert)
            words = [word.format(bert=bert) for word in words]
        return words


class _Job:
    """The processes of a job. Those that end without success are started again, as users, containers and pods are."""

    def __init__(self, folder: Path, settings: Sequence[str], case: Case) -> None:
        self.mark = secrets.token_hex(8)  # children inherit it, also those whose parent has ended
        common = {**places.order(folder / "faults", case.faults), "JOB_UNDER_TEST": self.mark}
        line = [f"--run-dir={folder}", *settings, "--max-restarts=20"]
        self.starts: list[tuple[list[str], dict[str, str]]] = []
        if case.launcher == "launch":
            self.starts.append((["launch", f"--nproc={case.world_size}", *line], common))
        else:
            port = free_port()
            for rank in range(case.world_size):
                self.starts.append((["supervise", *line], common | rank_env(rank, case.world_size, port)))
        # A supervisor that was killed or asked to stop has nobody else to start it again
        self.left = sum(fault.whom != "self" or fault.how == "SIGTERM" for group in case.faults for fault in group)
        self.output_file = folder / "output.txt"

    @property
    def output(self) -> str:
        return self.output_file.read_text(errors="replace")

    def to_its_end(self) -> list[str]:
        """Run it. Returns what is wrong, nothing if all ended with 0."""
        until_s = time.monotonic() + JOB_TIMEOUT_S
        running = dict(enumerate(map(self._start, self.starts)))
        try:
            while running:
                if time.monotonic() > until_s:
                    return [f"did not end within {JOB_TIMEOUT_S:g} s"]
                for number, process in list(running.items()):
                    code = process.poll()
                    if code == 0:
                        del running[number]
                    elif code is not None:
                        if not self.left:
                            return [f"ended with {code}"]
                        self.left -= 1
                        running[number] = self._start(self.starts[number])
                time.sleep(0.02)
            return []
        finally:
            for process in running.values():
                process.kill()
                process.wait(20)

    def _start(self, line: tuple[list[str], dict[str, str]]) -> subprocess.Popen[bytes]:
        arguments, env = line
        with self.output_file.open("ab") as output:
            return subprocess.Popen(
                [sys.executable, MAIN, *arguments], env=environment(env), cwd=ROOT, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            )

    def processes(self) -> list[psutil.Process]:
        """All processes of the job that are alive."""
        found = [p for p in psutil.process_iter() if environ_of(p.pid).get("JOB_UNDER_TEST") == self.mark]
        return [process for process in found if process.is_running()]


# Claims -----------------------------------------------------------------------------------------------------------


def _of_run(run_dir: Path) -> dict[str, Any]:
    clock = ("time", "train/images_per_s", "train/texts_per_s", "train/samples_per_s")
    lines = [{name: value for name, value in entry.items() if name not in clock} for entry in metrics(run_dir)]
    return {"digest": result(run_dir)["digest"], "metrics": lines, "tensorboard": _tensorboard(run_dir / "tensorboard")}


def _tensorboard(folder: Path) -> dict[str, list[int]]:
    """The steps of each curve, as TensorBoard shows it."""
    if not folder.exists():
        return {}
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {tag: [point.step for point in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def _differences(run_dir: Path, expected: Mapping[str, Any]) -> list[str]:
    got = _of_run(run_dir)
    problems = []
    if got["digest"] != expected["digest"]:
        problems.append("other weights")
    if got["tensorboard"] != expected["tensorboard"]:
        problems.append(f"other curves in TensorBoard: {got['tensorboard']}")
    if got["metrics"] != expected["metrics"]:
        steps = [entry["step"] for entry in got["metrics"] if "train/loss" in entry]
        twice = sorted({step for step in steps if steps.count(step) > 1})
        missing = sorted(set(range(1, STEPS + 1)) - set(steps))
        problems.append(f"other metrics (training steps twice: {twice}, missing: {missing})")
    return problems


def _done_again(folder: Path) -> tuple[int, list[str]]:
    """How many optimizer steps had to be done again, and those that need not: a process had finished them and lived on.

    A killed process takes the step along that it had finished as the first.
    """
    killed = {pid for strike in places.strikes(folder) for pid in strike.pids}
    done: dict[tuple[int, int], dict[str, Any]] = {}  # by rank and step
    lost, repeated = 0, []
    for update in places.updates(folder):
        rank, step = update["rank"], update["step"]
        before = done.get((rank, step))
        if before is not None and before["pid"] in killed:
            lost += 1
        elif before is not None:
            repeated.append(f"step {step} by rank {rank}")
        done[rank, step] = update
    return lost, repeated


def _slowest(folder: Path) -> tuple[float, str]:
    """The longest time from a loss to the next step of the lost rank, or to the next loss: seconds, and the place."""
    struck, done = places.strikes(folder), places.updates(folder)
    times = [(0.0, "")]
    for strike in struck:
        later = [other.time for other in struck if other.time > strike.time]
        later += [u["time"] for u in done if u["rank"] == strike.rank and u["time"] > strike.time]
        if later:
            times.append((min(later) - strike.time, strike.fault.place))
    return max(times)


def _left_in_memory(folder: Path) -> list[str]:
    """What the job has left in /dev/shm: rescues of its run, and what its processes shared with their workers."""
    try:
        run = json.loads((folder / "run" / "run.json").read_text())["run"]
    except (OSError, KeyError, ValueError):
        run = None
    pids = {str(update["pid"]) for update in places.updates(folder / "faults")}
    shared = Path("/dev/shm")
    left = [path for path in shared.glob("torch_*") if path.name.split("_")[1] in pids]
    left += [path for path in shared.glob(f"rankup-{os.getuid()}/*") if path.name == run]
    return [f"left in memory: {path}" for path in left]


# Cases ------------------------------------------------------------------------------------------------------------


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
            Fault("forward", 1, 4, whom="supervisor"), Fault("backward", 0, 8, whom="node"),
            Fault("after the optimizer", last, 12, whom="server"), Fault("between buckets", 0, 16, "memory"),
        ))
    for world_size in (2, 3):  # each rank in a container of its own
        yield Case("wide", world_size, sequence(
            Fault("forward", 1, 4), Fault("backward", 0, 7), Fault("after the optimizer", 1, 10, whom="node"),
            Fault("in the optimizer", 0, 13, whom="node"), (Fault("backward", 0, 17), Fault("backward", 1, 17)),
        ), launcher="supervise")
    yield Case("wide", 2, sequence(Fault("backward", 1, 3, "SIGSTOP"), Fault("in the optimizer", 0, 7, "SIGSTOP")))
    yield Case("wide", 2, sequence(Fault("evaluating", 1, 5, "SIGTERM", "supervisor"), Fault("between the renames")))
    yield from rescue_cases()
    for number, profile in enumerate(PROFILES):
        for world_size in (2, 3):
            chosen = ["backward", "after the optimizer", "evaluating", "forward", "before the optimizer"]
            if profile == "fsdp":  # whose parameters the hooks of "backward" do not know
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
            *(fault for i, place in enumerate(places.RESCUED)
              for fault in (Fault("backward", i % 2, 3 + 4 * i), Fault(place), Fault(place))),
        ))


def random_case(rng: random.Random) -> Case:
    """One to six faults, anywhere."""
    world_size = rng.choice((2, 2, 3, 4))
    profile = rng.choice(("wide", "wide", "workers", "accumulate"))
    groups: list[tuple[Fault, ...]] = []
    step = 0
    for _ in range(rng.randint(1, 6)):
        kind = rng.choice((STEPPING, STEPPING, STEPPING, PREPARING, JOINING))
        step += rng.randint(1, 3)
        place = rng.choice(kind)
        how = rng.choice(("SIGKILL", "SIGKILL", "SIGSEGV", "SIGABRT"))
        ranks = rng.sample(range(world_size), rng.choice((1, 1, 1, 2, world_size)))
        groups.append(tuple(Fault(place, rank, step if kind is STEPPING else 0, how) for rank in ranks))
    return Case(profile, world_size, tuple(groups))


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
        soak = Soak(Path(folder))
        log.write(f"{len(cases)} cases, seed {given.seed}\n")
        for number, case in enumerate(cases, 1):
            outcome = soak.run(case)
            outcomes.append(outcome)
            verdict = "; ".join(outcome.problems) or "well"
            times = f"{outcome.seconds:.0f} s, {outcome.struck} faults, {outcome.lost} lost steps done again"
            times += ", slowest recovery {:.1f} s, {}".format(*outcome.slowest)
            log.write(f"{number}: {verdict} ({times}): {case}\n")
            if outcome.problems or outcome.slowest[0] > SLOW_S:
                given.log.with_name(f"{given.log.stem}-{number}.txt").write_text(f"{case}\n\n{outcome.output}")
        log.write(summary(outcomes) + "\n")
    print(summary(outcomes))
    return int(any(outcome.problems for outcome in outcomes))


def summary(outcomes: Sequence[Outcome]) -> str:
    well = sum(not outcome.problems for outcome in outcomes)
    faults = sum(outcome.struck for outcome in outcomes)
    seconds = statistics.median(outcome.seconds for outcome in outcomes) if outcomes else 0.0
    return f"{well} of {len(outcomes)} cases ended well; {faults} faults struck; a job took {seconds:.0f} s (median)"


if __name__ == "__main__":
    sys.exit(main())
