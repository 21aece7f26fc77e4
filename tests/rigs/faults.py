"""Faults for real jobs: end or stop one rank at a chosen moment, and see that nothing of the job is left."""

import json
import os
import random
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.rigs.fork_server import Forks, Process
from tests.rigs.jobs import MAIN, environ_of, free_port, metrics, rank_env, working_in

Ranks = dict[int, psutil.Process]


class Scene:
    """A job as it is seen from outside: its processes, and what they write into the run directory."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.log = run_dir / "logs" / "rank-0.log"
        self.joined_before = 0  # by incarnations of rank 0 that have ended
        self.old: set[int] = set()  # their processes

    def ranks(self) -> Ranks:
        """The processes of the present incarnation."""
        raise NotImplementedError

    def running(self) -> bool:
        """Whether the job still runs. Call it often: ranks that are restarted by hand are restarted here."""
        raise NotImplementedError

    def processes(self) -> list[psutil.Process]:
        """All processes of the job that are alive, orphans and workers included."""
        raise NotImplementedError

    def left_after(self, timeout_s: float = 60) -> list[psutil.Process]:
        """The processes of the job that are still alive after `timeout_s`."""
        return psutil.wait_procs(self.processes(), timeout=timeout_s)[1]

    # What it wrote --------------------------------------------------------------------------------------------

    def said(self) -> str:
        """What rank 0 has written to its log since its present incarnation said who it is; "" before."""
        parts = self.log.read_text().split(" r0 rank 0 of ") if self.log.exists() else [""]
        return parts[-1] if len(parts) - 1 > self.joined_before else ""

    def metrics(self) -> list[dict[str, Any]]:
        try:
            return metrics(self.run_dir)
        except (FileNotFoundError, ValueError):  # a line that is being written
            return []

    def step(self) -> int:
        return max((entry["step"] for entry in self.metrics()), default=0)

    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in (self.run_dir / "checkpoints").glob("step-*"))

    def saving(self) -> bool:
        return any((self.run_dir / "checkpoints").glob(".writing-*"))

    def next_incarnation(self, ranks: Ranks) -> None:
        """Wait for the end of `ranks`; from then on the methods here describe the next incarnation."""
        while lives(ranks[0]):
            self.running()
            time.sleep(0.01)
        self.joined_before = self.log.read_text().count(" r0 rank 0 of ") if self.log.exists() else 0
        while any(lives(process) for process in ranks.values()):
            self.running()
            time.sleep(0.01)
        self.old |= {process.pid for process in ranks.values()}

    def log_sizes(self) -> dict[Path, int]:
        return {path: path.stat().st_size for path in self.log.parent.glob("rank-*.log")}

    def written_since(self, sizes: dict[Path, int]) -> str:
        """To the logs, after they had those sizes."""
        paths = sorted(self.log.parent.glob("rank-*.log"))
        return "\n".join(path.read_bytes()[sizes.get(path, 0) :].decode() for path in paths)


def lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def suspend(process: psutil.Process) -> None:
    """Send SIGSTOP and wait until it has stopped. Signals that come before that are still delivered: the kernel takes
    the lowest number first, so a SIGTERM overtakes the SIGSTOP of a process that has not had the CPU meanwhile."""
    process.suspend()
    while process.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE):
        time.sleep(0.001)


class Launched(Scene):
    """A job under `launch`, which restarts it by itself. `options`: of `launch`."""

    def __init__(
        self, run_dir: Path, forks: Forks, world_size: int, *arguments: str, options: Sequence[str] = ()
    ) -> None:
        super().__init__(run_dir)
        self.folder = run_dir.parent.resolve() / "started-here"
        self.folder.mkdir(parents=True)
        line = ("launch", f"--nproc={world_size}", *options, MAIN, *arguments)
        self.job = forks.start(*line, cwds=[self.folder])
        self.process = self.job.processes[0]

    def ranks(self) -> Ranks:
        try:
            family = psutil.Process(self.process.pid).children(recursive=True)
            return {int(c.name()[5:]): c for c in family if c.pid not in self.old and is_rank(c) and lives(c)}
        except (psutil.Error, ValueError):  # one that ends or begins right now
            return {}

    def running(self) -> bool:
        return self.process.code is None

    def processes(self) -> list[psutil.Process]:
        return working_in(self.folder)


def is_rank(process: psutil.Process) -> bool:
    """Not one of its DataLoader workers, which have its name."""
    return process.name().startswith("rank ") and session(process) == process.pid


def environ(process: psutil.Process) -> dict[str, str]:
    return environ_of(process.pid)


class ByHand(Scene):
    """Ranks started with the five variables, and each started again when it ends with a code from 128 on.

    As a container is: with the same variables, without the others, at once.
    """

    def __init__(self, run_dir: Path, forks: Forks, world_size: int, *arguments: str) -> None:
        super().__init__(run_dir)
        self.forks, self.arguments, self.port = forks, arguments, free_port()
        self.world_size = world_size
        self.current: dict[int, Process] = {}
        self.all: list[Process] = []
        self.codes: dict[int, int] = {}  # of the ranks that have ended for good
        for rank in range(world_size):
            self._start(rank)

    def _start(self, rank: int) -> None:
        env = rank_env(rank, self.world_size, self.port)
        self.current[rank] = self.forks.start("train", *self.arguments, env=env).processes[0]
        self.all.append(self.current[rank])

    def ranks(self) -> Ranks:
        self.running()
        alive = {r: p.pid for r, p in self.current.items() if p.code is None and p.pid not in self.old}
        try:
            return {rank: psutil.Process(pid) for rank, pid in alive.items()}
        except psutil.NoSuchProcess:
            return {}

    def running(self) -> bool:
        for rank, process in self.current.items():
            if process.code is not None and rank not in self.codes:
                if 0 <= process.code < 128:
                    self.codes[rank] = process.code
                else:
                    self._start(rank)
        return len(self.codes) < self.world_size

    def wait(self, timeout_s: float = 240) -> list[int]:
        """Restart and wait until all have ended for good; their codes."""
        until_s = time.monotonic() + timeout_s
        while self.running():
            assert time.monotonic() < until_s, self.output
            time.sleep(0.02)
        return [self.codes[rank] for rank in range(self.world_size)]

    def kill(self) -> None:
        for process in self.all:
            if process.code is None:
                process.kill()

    def processes(self) -> list[psutil.Process]:
        sessions = {process.pid for process in self.all}  # each rank leads one, its workers belong to it
        return [p for p in psutil.process_iter() if session(p) in sessions and lives(p)]

    @property
    def output(self) -> str:
        return "\n".join(process.output for process in self.all)


def session(process: psutil.Process) -> int:
    try:
        return os.getsid(process.pid)
    except OSError:
        return 0


# Kills --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kill:
    """SIGKILL for one rank at a moment; for "training", `steps` steps after the first of the incarnation."""

    moment: str
    rank: int
    steps: int = 0

    def due(self, scene: Scene, began_at: int | None) -> bool:
        if self.moment == "saving":  # the shortest moment: look for it first
            return scene.saving() and "ready after" in scene.said()
        said = scene.said()
        ready = "ready after" in said
        match self.moment:
            case "starting":
                return not said
            case "joining":
                return bool(said) and "data " not in said
            case "preparing":
                return "batch " in said and not ready
            case "before the first save":
                return ready and scene.step() > 0 and not scene.checkpoints()
            case "training":
                return began_at is not None and scene.step() >= began_at + self.steps
            case "evaluating":
                # The last entry is the training step before an evaluation: runs under test have epochs of eight steps
                last = json.dumps(scene.metrics()[-1:])
                return ready and bool(re.search(r'"step": (8|16|24|32|40), .*train/loss', last))
        raise AssertionError(self.moment)


EARLY = ("starting", "joining", "preparing")
LATER = ("training", "evaluating", "saving")


def random_kills(rng: random.Random, count: int, world_size: int) -> list[Kill]:
    """Every fourth comes before the first checkpoint, every fourth while one is written, the others at any moment.

    Those before the first checkpoint are delivered first.
    """
    turns = ("before the first save", "saving", rng.choice(EARLY), rng.choice(LATER))
    kills = [Kill(turns[i % 4], rng.randrange(world_size), rng.randint(1, 5)) for i in range(count)]
    return sorted(kills, key=lambda kill: kill.moment != "before the first save")


def deliver(kills: Sequence[Kill], scene: Scene, world_size: int) -> int:
    """Kill one after another, each when its moment has come. Returns how many, before the job ended. The survivors of
    each must blame nobody but the rank that was killed.

    Rank 0 writes what is looked at, so it is stopped for the look: the moment is not over when the signal arrives.
    """
    for number, kill in enumerate(kills):
        ranks, began_at = scene.ranks(), None
        while True:
            if not scene.running():
                return number
            if len(ranks) < world_size:
                time.sleep(0.02)
                ranks = scene.ranks()
                continue
            if kill.moment == "training" and began_at is None and "ready after" in scene.said():
                began_at = scene.step()
            sizes = scene.log_sizes()
            if kill.due(scene, began_at) and _kill_if_due(kill, ranks, scene, began_at):
                break
            # Looking costs time that the ranks need
            time.sleep(0.003 if kill.moment == "saving" else 0.02)
        scene.next_incarnation(ranks)
        said = scene.written_since(sizes)
        assert {int(rank) for rank in re.findall(r": rank (\d+) on", said)} <= {kill.rank}, f"{kill}\n{said}"
    return len(kills)


def _kill_if_due(kill: Kill, ranks: Ranks, scene: Scene, began_at: int | None) -> bool:
    try:
        suspend(ranks[0])
        due = kill.due(scene, began_at)
        if due:
            ranks[kill.rank].kill()
        if kill.rank != 0 or not due:
            ranks[0].resume()
    except psutil.NoSuchProcess:
        return False
    return due
