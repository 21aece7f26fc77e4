"""Measure what a large plain state costs: seconds and memory of a resume, and seconds of a rescue.

    python bench/large_state.py --megabytes 100 1000 --ranks 2 4

For each size and number of ranks this trains two steps of SGD with momentum, and resumes four times: twice for the
time, once while the memory of all ranks is watched, and once after a rank was killed. The table has the seconds in
`rankup.init` and `job.track`, each from the last rank's begin to the last rank's end, without those in which the ranks
connect; the seconds that one process takes to read and hash the same files, which are in the page cache (of both the
better of two); the largest growth of the ranks' memory, and of the machine's shared memory, beside the state itself, in
multiples of the state (files of the disk do not count); and the seconds from the kill to a whole rescue.

A virtual machine may get its memory from its host only at the first touch, which takes up to 2 s a GB. After its start,
fill and free its memory once before you measure.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.machine import conditions, markdown_table
from tests.rigs.jobs import ROOT

SCRIPT = """
import json, os, signal, time
import torch, rankup
marks = []
mark = lambda: marks.append([time.monotonic(), time.process_time()])
mark()
job = rankup.init("runs/RUN", tensorboard=False, save_every_steps=0, compare_every_steps=0)
mark()
torch.set_num_threads(1)
layers = int(os.environ["LAYERS"])
model = torch.nn.Sequential(*[torch.nn.Linear(2048, 3200, bias=False) for _ in range(layers)])  # 25 MiB each
optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
mark()
job.track(model=model, optimizer=optimizer)
mark()
with open(f"ranks-{job.rank}.json", "w") as file:
    json.dump(marks, file)
if os.environ.get("HOLD"):
    while os.path.exists("hold"):
        time.sleep(0.05)
kill = os.environ.get("KILL") and not os.path.exists("killed")
for step in job.steps(6 if kill is not None else 2):
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    job.gather(0)
    with job.step():
        optimizer.step()
    if kill and step == 3:
        job.gather(0)
        if job.rank == job.world_size - 1:
            with open("killed", "w") as file:
                file.write(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
job.finish()
"""


def launch(
    folder: Path, run: str, ranks: int, layers: int, *, watch: bool = False, **more: str
) -> dict[str, float]:
    """Run the script. Return the seconds and all ranks' CPU seconds in `rankup.init` and `job.track`, and the peak of
    all ranks' memory in bytes."""
    script = folder / "train.py"
    script.write_text(SCRIPT.replace("RUN", run))
    for old in folder.glob("ranks-*.json"):
        old.unlink()
    if watch:
        (folder / "hold").touch()
        more["HOLD"] = "1"
    line = [sys.executable, "-m", "rankup", "launch", f"--nproc={ranks}", "--max-restarts=1", str(script)]
    env = {"PYTHONPATH": str(ROOT), **os.environ, "LAYERS": str(layers), **more}
    job = subprocess.Popen(line, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    peak, ended = 0, threading.Event()

    def sample() -> None:
        nonlocal peak
        there = False
        while not (there or ended.wait(0.05)):
            there = len([*folder.glob("ranks-*.json")]) == ranks  # they hold what they have until the next look is over
            peak = max(peak, shared_memory() + sum(map(memory_of, descendants(job.pid))))
        (folder / "hold").unlink(missing_ok=True)

    sampler = threading.Thread(target=sample)
    if watch:
        sampler.start()
    output, _ = job.communicate()
    ended.set()
    if job.returncode:
        raise RuntimeError(output)
    if watch:
        sampler.join()
    each = [json.loads(path.read_text()) for path in folder.glob("ranks-*.json")]
    (folder / "output.txt").write_text(output)
    # By mark, of all ranks: a rank that is early only waits for the others
    wall_s = [max(times) for times in zip(*[[wall_s for wall_s, _ in marks] for marks in each], strict=True)]
    cpu_s = [sum(times) for times in zip(*[[cpu_s for _, cpu_s in marks] for marks in each], strict=True)]
    return {"init_s": wall_s[1] - wall_s[0], "track_s": wall_s[3] - wall_s[2], "peak": peak,
            "init_cpu_s": cpu_s[1] - cpu_s[0], "track_cpu_s": cpu_s[3] - cpu_s[2]}


def descendants(pid: int) -> list[int]:
    found, left = [], [pid]
    while left:
        one = left.pop()
        try:
            children = [each for task in Path(f"/proc/{one}/task").iterdir()
                        for each in (task / "children").read_text().split()]
        except OSError:
            continue
        found += [one]
        left += map(int, children)
    return found


def memory_of(pid: int) -> int:
    """Return a process's own memory in bytes, without shared memory and without files of a disk."""
    try:
        rows = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(row.split()[1]) * 1024 for row in rows if row.startswith("Pss_Anon"))


def shared_memory() -> int:
    """Return the machine's shared memory in bytes. A rank's own figures lack pages of a memory file that it has written
    but not mapped."""
    rows = Path("/proc/meminfo").read_text().splitlines()
    return next(int(row.split()[1]) * 1024 for row in rows if row.startswith("Shmem:"))


def read_and_hash(copy: Path) -> tuple[float, float]:
    """Return the seconds and the CPU's seconds that one process takes to read and hash the files of a copy."""
    began_s, used_s = time.perf_counter(), time.process_time()
    for path in copy.iterdir():
        with path.open("rb") as file:
            hashlib.file_digest(file, "sha256")
    return time.perf_counter() - began_s, time.process_time() - used_s


def rescue_s(folder: Path, run: str, ranks: int, layers: int) -> float:
    """Return the seconds from the kill of a rank to the whole rescue in this node's memory."""
    ended, found = threading.Event(), [0.0]

    def look() -> None:
        while not ended.wait(0.01):
            if not found[0] and (about := folder / "runs" / run / "run.json").exists():
                own = f"rankup-{os.getuid()}/{json.loads(about.read_text())['run']}"
                new = [*Path("/dev/shm").glob(f"{own}/step-*/manifest.json")]
                found[0] = new[0].stat().st_mtime if new else 0.0

    looker = threading.Thread(target=look)
    looker.start()
    try:
        launch(folder, run, ranks, layers, KILL="1")
    finally:
        ended.set()
        looker.join()
    return found[0] - float((folder / "killed").read_text())


def measure(ranks: int, megabytes: int, folder: Path) -> dict[str, Any]:
    layers = max(1, round(megabytes * 1e6 / (2 * 2048 * 3200 * 4)))
    state = 2 * layers * 2048 * 3200 * 4
    fresh = launch(folder, "a", ranks, layers)
    base = launch(folder, "b", ranks, layers, watch=True)
    shutil.rmtree(folder / "runs" / "b")
    copy = max((folder / "runs/a/checkpoints").glob("step-*"))
    hashed, resumed = [], []
    for _ in range(2):
        hashed.append(read_and_hash(copy))
        again = launch(folder, "a", ranks, layers)
        resumed.append([again[f"init{s}"] + again[f"track{s}"] - fresh[f"init{s}"] for s in ("_s", "_cpu_s")])
    hashed_s, hashed_cpu_s = map(min, zip(*hashed, strict=True))
    resume_s, cpu_s = map(min, zip(*resumed, strict=True))
    peak = launch(folder, "a", ranks, layers, watch=True)
    shutil.rmtree(folder / "runs" / "a")
    rescued = rescue_s(folder, "c", ranks, layers)
    # The fresh run's optimizer has no state yet, which is half of the state
    growth = (peak["peak"] - base["peak"]) / state - ranks / 2
    return {"ranks": ranks, "state, MB": round(state / 1e6), "read and hash, s": hashed_s, "resume, s": resume_s,
            "of it": resume_s / hashed_s, "CPU s of all ranks, of the hash's": cpu_s / hashed_cpu_s, "growth": growth,
            "rescue, s": rescued}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, nargs="+", default=[100, 1000])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--folder", default=None, help="where the runs are written")
    options = parser.parse_args()
    rows = []
    for megabytes in options.megabytes:
        for ranks in options.ranks:
            with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                rows.append(measure(ranks, megabytes, Path(folder)))
            print(rows[-1], file=sys.stderr, flush=True)
    print(f"{conditions()}\n")
    print("\n".join(markdown_table([*rows[0]], [
        [f"{value:.2f}" if isinstance(value, float) else str(value) for value in row.values()] for row in rows])))


if __name__ == "__main__":
    main()
