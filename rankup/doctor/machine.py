"""Checks of one machine, which need no group and no torch: limits, memory, GPUs, disks.

The limits take milliseconds to check: every training looks at them first. The doctor runs all checks.
"""

import logging
import math
import os
import resource
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from rankup.agent.limits import cpu_quota, memory_limit, oom_kills
from rankup.agent.logs import host_name
from rankup.agent.processes import within
from rankup.doctor import gpus
from rankup.doctor.report import CODES, INCOMPLETE, OK, UNFIT, VERDICTS, WARNING, Finding, Report
from rankup.errors import FINISHED

MIB = 2**20
LEAST_CPU = 0.75  # of a CPU for each thread: a thread of ours waits now and then, so a little less is no loss
LEAST_MEMORY = 1024 * MIB  # for each rank: torch and the smallest model take about half of it
LEAST_SHM, SHM_PER_WORKER = 32 * MIB, 32 * MIB
LEAST_DISK = 1024 * MIB  # a few checkpoints of a middle-sized model
LEAST_FILES = 1024
ENLARGE_SHM = "Enlarge it (docker run --shm-size=1g, shm_size in compose, an emptyDir of medium Memory at /dev/shm)"
DISK_S = 30.0  # a network disk may never answer,
GPU_S = 60.0  # nor a driver whose GPU hangs; one that nobody keeps loaded takes seconds for each GPU


def check_machine(
    report: Report, run_dir: Path, *, ranks: int, threads: int = 1, num_workers: int = 0, has_gpus: bool = True,
    local_rank: int | None = None, devices: Callable[[], Iterable[Finding]] = tuple,
) -> None:
    """Add to `report` what this process sees of its machine, each check within its time limit.

    `ranks`: on this node, with `threads` threads and `num_workers` DataLoader workers each. `local_rank`: whose GPU to
    look at, None: all. `devices`: a check of them that needs torch.
    """
    def bounded(stage: str, timeout_s: float, check: Callable[[], Iterable[Finding]], silent: str) -> None:
        found = within(timeout_s, lambda: list(check()))
        if found is None:
            remedy = "Correct that first: training would hang."
            found = [Finding(stage, INCOMPLETE, f"no answer within {timeout_s:g} s", silent, remedy)]
        report.add(*found)

    report.add(*limits(ranks=ranks, threads=threads))
    report.add(*shared_memory(num_workers=num_workers))
    if has_gpus:
        bounded("gpus", GPU_S, lambda: gpus.gpus(local_rank), "the driver of the GPUs gives no answer.")
    report.add(*devices())
    bounded("storage", DISK_S, lambda: disk(run_dir), f"{run_dir} is on a disk that does not answer.")


def preflight(run_dir: Path, *, ranks: int, log: logging.Logger) -> tuple[int, str]:
    """Before the ranks of this node start: the exit code of the doctor where it is not fit, and why; else 0.

    Without the other machines: a container that is replaced in the middle of a training finds the others at work.
    Whether the machines reach each other is checked when they meet.
    """
    report = Report(log, rank=0, world_size=1, json_out=None)
    check_machine(report, run_dir, ranks=ranks)
    code = report.end_alone()
    if code in (FINISHED, CODES[WARNING]):
        return FINISHED, ""
    return code, f"preflight on {host_name()}: {VERDICTS[code]}. No rank was started"


def limits(*, ranks: int, threads: int, root: Path = Path("/")) -> Iterator[Finding]:
    """CPUs, memory and open files that this process may use; in a container they are fewer than the machine's.

    `ranks`: on this node, with `threads` threads each. `root`: of the file system, for tests.
    """
    cpus = cpu_quota(root)
    if crowded := crowded_cpus(ranks, threads, cpus):
        yield Finding("limits", WARNING, crowded, "threads that wait for a CPU make every step of all ranks slower.")
    else:
        yield Finding("limits", OK, f"{cpus:g} CPUs for {ranks} x {threads} threads")
    memory = memory_limit(root)
    if memory is not None and memory < LEAST_MEMORY * ranks:
        yield Finding(
            "limits", WARNING, f"{memory / MIB:.0f} MiB of memory for {ranks} ranks",
            "a process that needs more is killed without a word: exit code 137, and no traceback.",
            "Allow 1 GiB a rank or more (compose: MEMORY=4g; elsewhere the memory limit of the job).",
        )
    # Without a limit the kernel counts for the whole machine: any process, at any time
    if memory is not None and (killed := oom_kills(root)):
        were = "was" if killed == 1 else "were"
        yield Finding(
            "limits", WARNING,
            f"{_processes(killed)} of this container or job {were} killed because the memory was not enough",
            "the next run of the same size ends the same way: exit code 137, and no traceback.",
            "Raise the memory limit, or use a smaller batch or fewer DataLoader workers.",
        )
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < LEAST_FILES:
        yield Finding(
            "limits", WARNING, f"only {soft} open files are allowed (ulimit -n)",
            "each connection to a rank and each batch of a DataLoader worker is one: \"Too many open files\".",
            "ulimit -n 16384 in the shell that starts it, or nofile in its limits.",
        )


def shared_memory(*, num_workers: int, folder: str = "/dev/shm") -> Iterator[Finding]:
    """Room in /dev/shm, through which DataLoader workers hand over batches and nccl's ranks of one node exchange."""
    if not os.path.isdir(folder):
        return
    system = os.statvfs(folder)
    free, total = system.f_bavail * system.f_frsize, system.f_blocks * system.f_frsize
    least = LEAST_SHM + num_workers * SHM_PER_WORKER
    seen = f"{folder}: {free / MIB:.0f} of {total / MIB:.0f} MiB free"
    if free >= least:
        yield Finding("memory", OK, seen)
        return
    full = f" It is full: look what lies there (ls -la {folder}), and remove what ended jobs left."
    yield Finding(
        "memory", WARNING, seen,
        'workers end with "Bus error" or "No space left on device (28)", and nccl with "unhandled system error".',
        f"{ENLARGE_SHM}, or use no DataLoader workers.{full if total >= least else ''}",
    )


def disk(run_dir: Path) -> Iterator[Finding]:
    """Whether checkpoints can be written in the run's folder: permission and room."""
    folder = run_dir / "doctor"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
        if free < LEAST_DISK:
            yield Finding(
                "storage", WARNING, f"{folder.parent}: {free / MIB:.0f} MiB free",
                "a checkpoint that can't be written ends the training (exit code 2).",
                "Make room, or set --run-dir elsewhere.",
            )
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"seen")
            file.flush()
            os.fsync(file.fileno())
        if free >= LEAST_DISK:
            yield Finding("storage", OK, f"{folder.parent}: {free / 2**30:.1f} GiB free")
    except OSError as error:
        yield Finding(
            "storage", UNFIT, f"{error.filename or folder} can't be written: {error.strerror}",
            "logs, metrics and checkpoints go there.",
            "Set --run-dir to a directory this user owns, or change its owner.",
        )


# Before a training -------------------------------------------------------------------------------------------------


def before_training(*, ranks: int, threads: int) -> list[str]:
    """A line for each limit that will be in the way of a training with `ranks` on this node, `threads` in each."""
    found = [finding for finding in limits(ranks=ranks, threads=threads) if finding.level == WARNING]
    return [f"{each.seen}: {each.why} {each.remedy}" if each.remedy else each.seen for each in found]


def crowded_cpus(ranks: int, threads: int, cpus: float) -> str:
    """What to say if this node's ranks have more threads than `cpus`, which this process may use; "" if they do not."""
    wanted = ranks * threads
    if wanted <= math.ceil(cpus) and wanted * LEAST_CPU <= cpus:
        return ""
    if wanted == 1:
        return (
            f"1 process of 1 thread, but only {cpus:g} CPUs to use (the container's limit): it will often stand still. "
            "Allow more CPUs."
        )
    share = max(1, math.floor(cpus) // ranks)
    way_out = f"Set --num-threads {share}" if share < threads else "Start fewer processes here"
    return (
        f"{_processes(ranks)} x {threads} threads on this node, but only {cpus:g} CPUs to use (affinity, or "
        f"the container's limit): they will wait for each other. {way_out}, or allow more CPUs."
    )


def idle_devices(ranks: int | None, num_devices: int) -> list[str]:
    """Accelerators that no rank will use: so it looks when somebody gave the number of nodes for that of ranks.

    `ranks`: on this node, None where that is not known.
    """
    if ranks is None or num_devices <= ranks:
        return []
    return [
        f"{num_devices} devices on this node, but only {_processes(ranks)}: {num_devices - ranks} will stay idle. "
        f"Start {num_devices} (launch --nproc {num_devices}, torchrun --nproc-per-node {num_devices}), or show fewer "
        "in CUDA_VISIBLE_DEVICES."
    ]


def _processes(count: int) -> str:
    return "1 process" if count == 1 else f"{count} processes"
