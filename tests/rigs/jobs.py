"""Real jobs for tests: start ranks as processes, wait for them with a bound, and read their files."""

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
MAIN = ROOT / "train" / "main.py"
# Variables that launchers, schedulers and earlier tests may have left in the environment
FOREIGN = re.compile(
    r"^(RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|GROUP_|MASTER_|PET_|TORCHELASTIC|SLURM_|OMPI_|HOROVOD_|RANKUP_|GLOO_"
    r"|NCCL_|TP_)"
)


_given: set[int] = set()


def free_port() -> int:
    """Return a port that is free now, and that the kernel does not give to outgoing connections. A process never
    returns a port twice, because the caller may not have bound it yet, and each pytest-xdist worker has ports of its
    own."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    while True:
        port = random.randrange(10000 + worker % 16, 32000, 16)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            if port not in _given:
                _given.add(port)
                return port


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return a child's environment: no launcher's variables, one thread, one order of sets, warnings as errors."""
    clean = {k: v for k, v in os.environ.items() if not FOREIGN.match(k)}
    clean |= {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "PYTHONWARNINGS": "error", "PYTHONPATH": str(ROOT)}
    return clean | dict(extra or {})


@dataclass
class Job:
    """The processes of one job. `codes` and `outputs` are in the order in which the processes were started."""

    processes: list[subprocess.Popen[str]] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)

    def wait(self, timeout_s: float = 240) -> list[int]:
        """Wait for all processes. After the bound, kill them and fail the test with their output."""
        deadline = time.monotonic() + timeout_s
        for process in self.processes:
            try:
                out, _ = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
                self.outputs.append(out)
            except subprocess.TimeoutExpired:
                self.kill()
                rest = [p.communicate()[0] for p in self.processes[len(self.outputs) :]]
                raise AssertionError(f"the job did not end within {timeout_s} s:\n" + "\n".join(rest)) from None
        return self.codes

    @property
    def codes(self) -> list[int]:
        return [process.returncode for process in self.processes]

    @property
    def output(self) -> str:
        return "\n".join(self.outputs)

    def kill(self) -> None:
        """Kill every process with all its children, including children in other process groups."""
        for process in self.processes:
            if process.poll() is None:  # the number of a process that was waited for may belong to another process now
                for child in psutil.Process(process.pid).children(recursive=True):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        child.kill()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def start(
    *command: str | Path, env: Mapping[str, str] | None = None, cwd: Path | None = None, job: Job | None = None
) -> Job:
    """Start one process in its own session, with stdout and stderr together."""
    job = job or Job()
    job.processes.append(
        subprocess.Popen(
            [str(word) for word in command], env=environment(env), cwd=cwd or ROOT, text=True, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
    )
    return job


def rank_env(rank: int, world_size: int, port: int, **more: str) -> dict[str, str]:
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), **more,
    }


def wait_for(
    what: str, condition: Callable[[], Any], *, timeout_s: float = 300, log: Callable[[], str] = str,
    process: "subprocess.Popen[Any] | None" = None, over: Callable[[], bool] = bool,
) -> Any:
    """Return the first true value of `condition`. Fail the test with `log` after the bound, or when `process` has ended
    or `over` is true.

    Calls of `condition` take at most a tenth of the time: most start a command, which takes CPU from the job itself."""
    until_s = time.monotonic() + timeout_s
    while True:
        looked_s = time.monotonic()
        if value := condition():
            return value
        now_s = time.monotonic()
        assert now_s < until_s, f"not within {timeout_s} s: {what}\n{log()}"
        if over() or (process is not None and process.poll() is not None):
            value = condition()  # it may have become true since
            assert value, f"ended before this: {what}\n{log()}"
            return value
        time.sleep(min(0.5, max(0.01, 9 * (now_s - looked_s))))


@contextmanager
def ended(job: Job) -> Iterator[Job]:
    """Kill what is left of the job at the end of the block."""
    try:
        yield job
    finally:
        job.kill()
        for process in job.processes:
            process.wait(60)
            if process.stdout:
                process.stdout.close()


def lives(pid: int) -> bool:
    """Return whether the process runs and is no zombie. A zombie without a parent waits until process 1 reaps it."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def working_in(folder: Path) -> list[psutil.Process]:
    """Return all live processes whose current directory is `folder`, such as those of a job that was started there,
    also those whose parent has ended."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.cwd() == str(folder) and lives(process.pid):
                found.append(process)
    return found


def probe(where: str, call: int, rank: int | None = None, **order: Any) -> dict[str, str]:
    """Make that rank, or all, do something at that moment: see tests/rigs/faulting_workload.py."""
    return {"PROBE": json.dumps({"where": where, "call": call, "rank": rank, **order})}


def kill(rank: int | None, step: int) -> dict[str, str]:
    """Kill the rank in that step of each attempt (the loss of step 1 is call 3). None: any rank that gets there. A save
    under way ends first; tests/run/test_saver.py kills ranks that are writing."""
    return probe("loss", step + 2, rank, signal="SIGKILL", saved=True)


def result(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "result.json").read_text())  # type: ignore[no-any-return]


def status(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "status.json").read_text())  # type: ignore[no-any-return]


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def losses_of(run_dir: Path, *, count: int) -> list[float]:
    """Return the losses of the first `count` steps. Fail if one is missing or there twice."""
    found = [line for line in metrics(run_dir) if "train/loss" in line]
    assert [line["step"] for line in found] == list(range(1, count + 1))
    return [line["train/loss"] for line in found]


def last_step(run_dir: Path) -> int:
    """Return the last step in the metrics, whose last line may be half written."""
    try:
        return max((entry["step"] for entry in metrics(run_dir)[-3:]), default=0)
    except (OSError, ValueError):
        return 0


def changes(run_dir: Path) -> list[tuple[int, int]]:
    """Return the changes of the number of ranks so far: the step after which it changed, and the new number. The last
    line of the metrics may be half written."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    entries = [json.loads(line) for line in lines if line.endswith("\n")]
    return [(entry["step"], entry["job/ranks"]) for entry in entries if "job/ranks" in entry]


def comparable_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Return the metrics without values that depend on the clock or the machine."""
    return [{name: value for name, value in entry.items() if is_comparable(name)} for entry in metrics(run_dir)]


def outcome(run_dir: Path) -> dict[str, Any]:
    """Return what must be the same whatever happened to the run."""
    return {"digest": result(run_dir)["digest"], "metrics": comparable_metrics(run_dir)}


def is_comparable(name: str) -> bool:
    """Return whether this metric must be the same when the run is repeated."""
    return name != "time" and not name.endswith("_per_s")


def environ_of(pid: int) -> dict[str, str]:
    """Return the environment with which a process was started, or {} if it is gone. psutil would leave the file open if
    the process ends during the read, which causes a warning much later, in another test."""
    try:
        text = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return {}
    return dict(entry.split("=", 1) for entry in text.split("\0") if "=" in entry)
