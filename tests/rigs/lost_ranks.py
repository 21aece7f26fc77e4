"""Jobs that lose ranks at exact places, and what must still hold at their end: nothing may differ except the time."""

import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.rigs import places
from tests.rigs.fork_server import Forks, Process
from tests.rigs.jobs import MAIN, free_port, is_comparable, outcome, rank_env, working_in
from tests.rigs.places import Fault, Strike

STEPS = 24
EVERY_JOB = (f"--max-steps={STEPS}", "--batch-size=48", "--save-every-steps=5", "--eval-batch-size=16",
             "--log-every-steps=1", "--name=run", "--step-timeout-s=120", "--join-timeout-s=120")
OWN = ("--workload=tests.rigs.recording_workload:build", "--limit-train=384")
FAKE = ("--dataset=fake", "--fake-samples=384")
JOB_TIMEOUT_S = 600.0

# Settings of the trainings, by name
PROFILES: dict[str, tuple[str, ...]] = {
    "wide": (*OWN, "--options.model=wide", "--num-workers=0"),
    "workers": (*FAKE, "--model=cnn", "--dropout=0.2", "--augment", "--num-workers=1"),
    "accumulate": (*OWN, "--options.model=wide", "--accumulate=2", "--optimizer=adamw", "--lr=0.001", "--clip-norm=1"),
    "compile": (*FAKE, "--model=mlp", "--compile"),
    "text": ("--workload=text", "--limit-train=384", "--optimizer=adamw", "--lr=0.001"),
    "sharded": (*OWN, "--options.model=wide", "--parallel=fsdp", "--checkpoint-format=sharded",
                "--memory-every-steps=0"),
}


@dataclass(frozen=True)
class Case:
    """One job and its faults. `agents`: the number of agents that start its ranks: one, or one per rank as in
    containers. With 0 the test starts and restarts each rank itself."""

    profile: str
    world_size: int
    faults: tuple[tuple[Fault, ...], ...]
    agents: int = 1

    def __str__(self) -> str:
        text = "; ".join(" + ".join(f"rank {f.rank}'s {f.whom} {f.how} {f.place}" for f in g) for g in self.faults)
        return f"{self.profile}, {self.world_size} ranks, {self.agents or 'no'} agents: {text}"


@dataclass
class Soak:
    """Runs cases in one folder, and knows the results of undisturbed jobs."""

    folder: Path
    forks: Forks
    known: dict[tuple[str, int], Mapping[str, Any]] = field(default_factory=dict)
    count: int = 0

    def run(self, case: Case) -> tuple[list[str], str]:
        """Run the case's job to its end or its time limit. Return all problems, and the output."""
        expected = self.undisturbed(case.profile, case.world_size)
        self.count += 1
        folder = self.folder / f"case-{self.count}"
        job = _Job(folder, self.forks, self.settings(case.profile), case)
        problems = job.to_its_end()
        left = psutil.wait_procs(job.processes(), timeout=20)[1]
        problems += [f"left: {process}" for process in left]
        for process in left:
            process.kill()
        if not problems:
            problems = differences(folder / "run", expected)
        struck, updates = places.strikes(folder / "faults"), places.updates(folder / "faults")
        wanted = sum(map(len, case.faults))
        if len(struck) < wanted:
            problems.append(f"only {len(struck)} of {wanted} faults struck")
        repeated = done_again(struck, updates)
        if case.profile != "sharded" and repeated:
            problems.append(f"done again although a rank had finished them and lived on: {', '.join(repeated)}")
        problems += left_in_memory(folder)
        output = job.output + "".join(path.read_text() for path in sorted((folder / "run" / "logs").glob("*.log")))
        if all(fault.whom == "self" for group in case.faults for fault in group):
            blamed = {int(rank) for rank in re.findall(r": rank (\d+) on", output)} - {strike.rank for strike in struck}
            problems += [f"rank {rank} is blamed, to which nothing happened" for rank in blamed]
        return problems, output

    def undisturbed(self, profile: str, world_size: int) -> Mapping[str, Any]:
        """Return the digest and the metrics of a run without faults."""
        if (profile, world_size) not in self.known:
            folder = self.folder / f"undisturbed-{profile}-{world_size}"
            line = ("launch", f"--nproc={world_size}", MAIN, f"--run-dir={folder}", *self.settings(profile))
            codes, output = self.forks.run(*line, timeout_s=JOB_TIMEOUT_S)
            assert codes == [0], output
            self.known[profile, world_size] = of_run(folder / "run")
        return self.known[profile, world_size]

    def settings(self, profile: str) -> list[str]:
        return [*PROFILES[profile], *EVERY_JOB, f"--tensorboard={str(profile == 'workers').lower()}"]


class _Job:
    """The processes of a job. Those that fail are started again, as users, containers and pods do."""

    def __init__(self, folder: Path, forks: Forks, settings: Sequence[str], case: Case) -> None:
        folder.mkdir(parents=True)
        self.forks, self.folder = forks, folder.resolve()
        common = places.order(folder / "faults", case.faults)
        own, port = [f"--run-dir={folder}", *settings], free_port()
        self.starts: list[tuple[list[str], dict[str, str]]] = []
        for node in range(case.agents or case.world_size):
            line = ["train", *own]
            if case.agents:
                nproc = case.world_size // case.agents
                line = ["launch", f"--nproc={nproc}", "--max-restarts=20", str(MAIN), *own]
            own_place = {"LOCAL_RANK": "0"} if case.agents else {}  # an agent in a container of its own
            env = rank_env(node, case.agents or case.world_size, port, **own_place) if case.agents != 1 else {}
            self.starts.append((line, common | env))
        # The test restarts an agent that was killed or asked to stop, and a rank without an agent: nothing else would
        self.by_hand = not case.agents
        self.left = 100 if self.by_hand else sum(
            fault.whom != "self" or fault.how == "SIGTERM" for group in case.faults for fault in group
        )
        self.started: list[Process] = []

    @property
    def output(self) -> str:
        return "".join(process.output for process in self.started)

    def to_its_end(self) -> list[str]:
        """Run the job. Return its problems, or an empty list if all processes ended with 0."""
        until_s = time.monotonic() + JOB_TIMEOUT_S
        running = dict(enumerate(map(self._start, self.starts)))
        try:
            while running:
                if time.monotonic() > until_s:
                    return [f"did not end within {JOB_TIMEOUT_S:g} s"]
                for number, process in list(running.items()):
                    code = process.code
                    if code == 0:
                        del running[number]
                    elif code is not None:
                        if not self.left or 0 < code < 128:
                            return [f"ended with {code}"]
                        self.left -= 1
                        running[number] = self._start(self.starts[number])
                time.sleep(0.02)
            return []
        finally:
            for process in running.values():
                process.kill()
                process.ended.wait(20)

    def _start(self, line: tuple[list[str], dict[str, str]]) -> Process:
        arguments, env = line
        preload = "tests.rigs.places:install_in_fork" if self.by_hand else ""
        self.started += self.forks.start(*arguments, env=env, cwds=[self.folder], preload=preload).processes
        return self.started[-1]

    def processes(self) -> list[psutil.Process]:
        """Return all live processes of the job."""
        return working_in(self.folder)


# What must hold at the end, read from the run's folder and from the records of the faults -----------------------------


def of_run(run_dir: Path) -> dict[str, Any]:
    return outcome(run_dir) | {"tensorboard": _tensorboard(run_dir / "tensorboard")}


def _tensorboard(folder: Path) -> dict[str, list[int]]:
    """Return the steps of each curve in TensorBoard, except for curves whose steps depend on the clock."""
    if not folder.exists():
        return {}
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    tags = [tag for tag in events.Tags()["scalars"] if is_comparable(tag) or tag.startswith("train/")]
    return {tag: [point.step for point in events.Scalars(tag)] for tag in tags}


def differences(run_dir: Path, expected: Mapping[str, Any]) -> list[str]:
    got = of_run(run_dir)
    problems = [f"left: {path}" for path in (run_dir / "checkpoints").glob(".*")]
    if got["digest"] != expected["digest"]:
        problems.append("other weights")
    if got["tensorboard"] != expected["tensorboard"]:
        problems.append(f"other curves in TensorBoard: {got['tensorboard']}")
    if got["metrics"] != expected["metrics"]:
        steps = [entry["step"] for entry in got["metrics"] if "train/loss" in entry]
        twice = sorted({step for step in steps if steps.count(step) > 1})
        missing = sorted({entry["step"] for entry in expected["metrics"]} - set(steps))
        problems.append(f"other metrics (training steps twice: {twice}, missing: {missing})")
    return problems


def done_again(struck: Sequence[Strike], updates: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the optimizer steps that were repeated although a process that had finished them was not killed.

    A killed process takes with it a step that only it had finished."""
    killed = {pid for strike in struck for pid in strike.pids}
    done: dict[tuple[int, int], Mapping[str, Any]] = {}  # the newest, by rank and step
    repeated = []
    for update in updates:
        rank, step = update["rank"], update["step"]
        before = done.get((rank, step))
        if before is not None and before["pid"] not in killed:
            repeated.append(f"step {step} by rank {rank}")
        done[rank, step] = update
    return repeated


def left_in_memory(folder: Path) -> list[str]:
    """Return what the job left in /dev/shm: rescued copies of its run, and memory shared with its workers."""
    try:
        run = json.loads((folder / "run" / "run.json").read_text())["run"]
    except (OSError, KeyError, ValueError):
        run = None
    pids = {str(update["pid"]) for update in places.updates(folder / "faults")}
    shared = Path("/dev/shm")
    left = [path for path in shared.glob("torch_*") if path.name.split("_")[1] in pids]
    left += [path for path in shared.glob(f"rankup-{os.getuid()}/*") if path.name.partition(".")[0] == run]
    return [f"left in memory: {path}" for path in left]
