"""One rank of a test, started alone: its process, its output and log, and its end."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import rankup
from tests.rigs.fork_server import Forks, Job, Process
from tests.rigs.jobs import rank_env
from train import group

# Our ranks end seconds after their time to join. torch's own bounds begin at 300 s, and one side of gloo waits for five
# times its timeout
BOUND_S = 200
# Lines that torch prints if a store or a connection ends before its users do
NOISE = re.compile(r"recvValue|Broken pipe|destroy_process_group|Connection reset|Traceback|Warning|\[W\d|\[E\d")
# The smallest possible job: one step, one evaluation, one checkpoint
TINY = ("--dataset", "fake", "--fake-samples", "24", "--batch-size", "24", "--model", "mlp", "--tensorboard", "false",
        "--max-steps", "1")


class Rank(Job):
    """A rank. Its output includes its log, because another rank of its host may print an error for it."""

    def __init__(self, process: Process, log: Path) -> None:
        super().__init__([process])
        self.log = log

    @property
    def output(self) -> str:
        return super().output + (self.log.read_text() if self.log.exists() else "")


def all_said(ranks: list[Rank], code: int) -> list[str]:
    """Return the output of each rank. All must have ended with `code`."""
    codes = [rank.wait(BOUND_S) for rank in ranks]
    said = [rank.output for rank in ranks]
    assert codes == [[code]] * len(codes), "\n".join(said)
    assert not any("Traceback" in text for text in said), "\n".join(said)
    return said


class Starter:
    """Starts ranks one by one. `runs` is the folder for their run directories."""

    def __init__(self, forks: Forks, runs: Path) -> None:
        self.forks, self.runs = forks, runs
        self.started: list[Process] = []

    def __call__(
        self, rank: int, world_size: int, port: int, name: str, *arguments: str, join_s: float = 60, **env: str
    ) -> Rank:
        """Start `train` with the five variables set. `env` overrides them."""
        line = ("train", *TINY, "--join-timeout-s", str(join_s), *arguments)
        return self.command(line, name, rank=rank, env={**rank_env(rank, world_size, port), **env})

    def command(
        self, line: tuple[str, ...], name: str, *, rank: int = 0, env: dict[str, str], preload: str = ""
    ) -> Rank:
        """`preload`: by default the rank enters the machine made of namespaces that the environment names, if any."""
        preload = preload or ("tests.rigs.namespaces:enter" if "TEST_NODE_PID" in env else "")
        job = self.forks.start(*line, "--run-dir", str(self.runs), "--name", name, env=env, preload=preload)
        self.started.extend(job.processes)
        return Rank(job.processes[0], self.runs / name / "logs" / f"rank-{rank}.log")


def pull_code() -> None:
    """Call this first in a process: the program's files on rank 1's disk then differ from the imported ones."""
    if os.environ["RANK"] == "1":
        group.__file__ = os.environ["PULLED"]
        rankup.__path__.append(str(Path(group.__file__).parent))


@contextmanager
def starting(forks: Forks, runs: Path) -> Iterator[Starter]:
    """A Starter whose ranks are killed at the end of the block."""
    starter = Starter(forks, runs)
    try:
        yield starter
    finally:
        Job(starter.started).kill()
