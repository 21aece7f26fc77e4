"""Ranks that stay: real processes that import torch once and then run one job after another.

A process needs about five seconds of CPU before its first step, most of it imports. Tests of what is computed, not of how
it is started, take their ranks from here: `pool.train(2, "--precision", "bf16")` is `main(["train", ...])` in two
processes with the five variables set. A process in which anything failed is replaced.
"""

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from jobs import ROOT, environment, free_port, rank_env

# A process ends by os._exit and closes nothing before: not an error where it goes on with the next job
WARNINGS = "error,ignore::ResourceWarning"


@dataclass(frozen=True)
class Outcome:
    """How a job ended: each rank's exit code and what it printed."""

    codes: list[int]
    outputs: list[str]

    @property
    def output(self) -> str:
        return "\n".join(self.outputs)


class Pool:
    """Up to four ranks; a job takes the first `world_size` of them."""

    def __init__(self) -> None:
        self._ranks: dict[int, _Rank] = {}
        self._threads = ThreadPoolExecutor(8)

    def run(self, world_size: int, *arguments: str | Path, timeout_s: float = 120) -> Outcome:
        """`rankup ARGUMENTS` on that many ranks, whatever its end."""
        answers = self._ask(world_size, {"arguments": [str(word) for word in arguments]}, timeout_s)
        return Outcome([answer["code"] for answer in answers], [answer["output"] for answer in answers])

    def train(self, world_size: int, *arguments: str | Path, timeout_s: float = 120) -> Outcome:
        """`rankup train ARGUMENTS`, which must succeed."""
        outcome = self.run(world_size, "train", *arguments, timeout_s=timeout_s)
        assert outcome.codes == [0] * world_size, outcome.output
        return outcome

    def call(self, world_size: int, function: str, *values: Any, timeout_s: float = 120) -> list[Any]:
        """`module:function(*values)` on each rank, with the five variables set; what they return, by rank."""
        answers = self._ask(world_size, {"function": function, "values": values}, timeout_s)
        for rank, answer in enumerate(answers):
            assert answer["code"] == 0, f"rank {rank}:\n{answer['output']}"
        return [answer["value"] for answer in answers]

    def close(self) -> None:
        for rank in self._ranks.values():
            rank.kill()
        self._threads.shutdown()

    def _ask(self, world_size: int, job: dict[str, Any], timeout_s: float) -> list[dict[str, Any]]:
        for number in range(world_size):
            if number not in self._ranks:
                self._ranks[number] = _Rank()
        port = free_port()
        waiting = []
        for number in range(world_size):
            env = rank_env(number, world_size, port) if world_size > 1 else {}
            self._ranks[number].send({**job, "env": env})
            waiting.append(self._threads.submit(self._ranks[number].answer))
        deadline = time.monotonic() + timeout_s
        try:
            answers = [future.result(max(0.1, deadline - time.monotonic())) for future in waiting]
        except TimeoutError:
            outputs = [self._ranks.pop(number).kill() for number in range(world_size)]
            raise AssertionError(f"the job did not end within {timeout_s} s:\n" + "\n".join(outputs)) from None
        for number, answer in enumerate(answers):
            if not answer["clean"]:
                self._ranks.pop(number).kill()
        return answers


class _Rank:
    """One process of the pool, as the test sees it."""

    def __init__(self) -> None:
        answers, theirs = os.pipe()
        env = environment({"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "PYTHONWARNINGS": WARNINGS})
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(theirs)], env=env, cwd=ROOT,
            stdin=subprocess.PIPE, pass_fds=(theirs,), start_new_session=True, text=True,
        )  # fmt: skip
        os.close(theirs)
        self.answers: IO[str] = os.fdopen(answers)
        handle, name = tempfile.mkstemp(prefix="rank-output-")
        os.close(handle)
        self.output = Path(name)

    def send(self, job: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({**job, "output": str(self.output)}) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """The next answer; a process that ended instead, as a deadline ends one, answers with its code."""
        line = self.answers.readline()
        answer = json.loads(line) if line else {"code": self.process.wait(), "clean": False}
        return {**answer, "output": self.output.read_text(encoding="utf-8")}

    def kill(self) -> str:
        """End the process; what it had printed."""
        self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        self.process.stdin.close()
        printed = self.output.read_text(encoding="utf-8")
        self.output.unlink()
        return printed


@contextmanager
def pool_of_ranks() -> Iterator[Pool]:
    pool = Pool()
    try:
        yield pool
    finally:
        pool.close()


# In the process of a rank -------------------------------------------------------------------------------------


def serve(answers: IO[str]) -> None:
    """Run the jobs that come on stdin, until it ends."""
    import torch.distributed as dist

    clean = dict(os.environ)
    for line in sys.stdin:
        job = json.loads(line)
        os.environ.clear()
        os.environ.update(clean | job["env"])
        with open(job["output"], "w", encoding="utf-8") as file, _output_to(file):
            code, value = _run(job)
        answer = {"code": code, "value": value, "clean": code == 0 and not dist.is_initialized()}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _run(job: dict[str, Any]) -> tuple[int, Any]:
    if "arguments" in job:
        from train.main import main

        return main(job["arguments"]), None
    module, _, name = job["function"].partition(":")
    try:
        return 0, getattr(importlib.import_module(module), name)(*job["values"])
    except BaseException:
        import traceback

        traceback.print_exc()
        return 1, None


@contextmanager
def _output_to(file: IO[str]) -> Iterator[None]:
    """What this process prints, C++ included, goes to `file` meanwhile."""
    kept = [os.dup(number) for number in (1, 2)]
    for number in (1, 2):
        os.dup2(file.fileno(), number)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, back in zip((1, 2), kept, strict=True):
            os.dup2(back, number)
            os.close(back)


def losses(run_dir: Path) -> list[float]:
    """The loss curve of a run, one number a logged step."""
    lines: Sequence[str] = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [entry["train/loss"] for entry in map(json.loads, lines) if "train/loss" in entry]


if __name__ == "__main__":
    from train.stop import die_with_parent

    die_with_parent(os.getppid())
    serve(os.fdopen(int(sys.argv[1]), "w"))
