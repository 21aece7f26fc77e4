"""Checks of one machine, which need no group and no torch: limits, memory, GPUs, disks.

The limits take milliseconds to check: every training looks at them first. The doctor runs all checks.
"""

import importlib
import logging
import math
import os
import resource
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rankup.agent.limits import cpu_quota, memory_limit, oom_kills
from rankup.agent.logs import host_name
from rankup.agent.processes import within
from rankup.doctor.report import CODES, INCOMPLETE, OK, UNFIT, VERDICTS, WARNING, Finding, Report
from rankup.env.rank_env import ranges
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
Problem = tuple[str, str, str, str]  # of a GPU: level, what is seen, why it matters, what to do


def check_machine(
    report: Report, run_dir: Path, *, ranks: int, threads: int = 1, num_workers: int = 0, has_gpus: bool = True,
    local_rank: int | None = None,
) -> None:
    """Add to `report` what this process sees of its machine, each check within its time limit.

    `ranks`: on this node, with `threads` threads and `num_workers` DataLoader workers each. `local_rank`: whose GPU to
    look at, None: all.
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
        bounded("gpus", GPU_S, lambda: gpus(local_rank), "the driver of the GPUs gives no answer.")
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
        yield Finding(
            "limits", WARNING, f"processes of this container or job killed because the memory was not enough: {killed}",
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


# GPUs ---------------------------------------------------------------------------------------------------------------


def gpus(local_rank: int | None, *, environ: Mapping[str, str] = os.environ, nvml: Any = None) -> Iterator[Finding]:
    """The health of the GPUs that this process may use: all of them, or that of `local_rank` among several ranks.

    NVML, the driver's library, says what the driver knows already: nothing is measured, and no GPU is used. Without
    NVIDIA's driver there is nothing to say. `environ` and `nvml` (in place of pynvml) are for tests.
    """
    nvml = nvml or importlib.import_module("pynvml")  # slow: only where it is asked
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        if error.value not in (nvml.NVML_ERROR_LIBRARY_NOT_FOUND, nvml.NVML_ERROR_DRIVER_NOT_LOADED):  # no driver
            yield Finding(
                "gpus", UNFIT, f"the driver does not work: {error}", "no process can use a GPU.",
                "After an update of the driver restart the machine: the kernel still has the old one loaded.",
            )
        return
    found: dict[Problem, list[int]] = {}
    names = []
    try:
        for number, place in enumerate(_places(nvml, local_rank, environ)):
            index = int(place) if place.isdigit() else number
            try:
                index, name, problems = _look(nvml, place)
                names.append(name)
            except nvml.NVMLError as error:
                if error.value in (nvml.NVML_ERROR_INVALID_ARGUMENT, nvml.NVML_ERROR_NOT_FOUND):
                    break  # no such GPU: CUDA too takes those before it alone
                remedy = "nvidia-smi -r resets a GPU that no process uses; if it fell off the bus, restart the machine."
                problems = [(UNFIT, f"does not answer: {error}", "a rank that is given it fails, or hangs.", remedy)]
            for problem in problems:
                found.setdefault(problem, []).append(index)
        # One finding for all GPUs that have it: eight of them get hot together
        for (level, seen, why, remedy), indexes in found.items():
            yield Finding("gpus", level, f"GPU {ranges(indexes)}: {seen}", why, remedy)
        if names and not found:
            kinds, driver = ", ".join(sorted({*names})), nvml.nvmlSystemGetDriverVersion()
            yield Finding("gpus", OK, f"{len(names)} healthy: {kinds}, driver {driver}")
    finally:
        nvml.nvmlShutdown()


def _places(nvml: Any, local_rank: int | None, environ: Mapping[str, str]) -> list[str]:
    """The numbers or UUIDs of the GPUs to look at."""
    named = environ.get("CUDA_VISIBLE_DEVICES")
    # CUDA counts the fastest first, NVML by the slot: the same where all of a machine are of one kind
    places = named.split(",") if named is not None else [str(index) for index in range(nvml.nvmlDeviceGetCount())]
    return [places[local_rank]] if local_rank is not None and local_rank < len(places) else places


def _look(nvml: Any, place: str) -> tuple[int, str, list[Problem]]:
    """nvidia-smi's number of a GPU, its name, and what is wrong with it. Raises NVMLError where it does not answer."""
    handle = nvml.nvmlDeviceGetHandleByIndex(int(place)) if place.isdigit() else nvml.nvmlDeviceGetHandleByUUID(place)

    def ask(name: str, *more: Any) -> Any:
        """NVML's answer, None where this GPU or driver does not know it."""
        try:
            return getattr(nvml, f"nvmlDeviceGet{name}")(handle, *more)
        except nvml.NVMLError as error:
            if error.value in (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_RESET_REQUIRED):
                raise
            return None

    return nvml.nvmlDeviceGetIndex(handle), str(ask("Name")), list(_problems(nvml, ask))


def _problems(nvml: Any, ask: Callable[..., Any]) -> Iterator[Problem]:
    *_, pending, failed = ask("RemappedRows") or (0, 0)
    if failed:
        row = "a bad row of its memory could not be replaced by a spare one"
        yield UNFIT, row, "errors in that row come again.", "Take this node out of the job, and have the GPU replaced."
    elif pending:
        until = "until then the driver keeps its pages away from programs; the next error there ends one."
        reset = "Reset it when no job needs it: nvidia-smi -r."
        yield WARNING, "a bad row of its memory waits to be replaced by a spare one", until, reset
    if errors := ask("TotalEccErrors", nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC):
        seen = f"{errors} uncorrected memory errors (ECC) since the driver was loaded"
        again = "Reset it (nvidia-smi -r); if they come again, have the GPU replaced."
        yield WARNING, seen, "each of them ends the program that reads it.", again
    slow = (
        nvml.nvmlClocksEventReasonSwThermalSlowdown | nvml.nvmlClocksEventReasonHwThermalSlowdown
        | nvml.nvmlClocksEventReasonHwPowerBrakeSlowdown | nvml.nvmlClocksEventReasonHwSlowdown
    )
    if (ask("CurrentClocksEventReasons") or 0) & slow:
        look = "Look at its fans, the air around it and the power supplies (nvidia-smi -q -d TEMPERATURE,PERFORMANCE)."
        slowest = "all ranks wait for the slowest at every step."
        yield WARNING, "its clock is lowered for heat or by the power supply", slowest, look
    # A container sees the programs of others without a name, or not at all
    if others := [str(each.pid) for each in ask("ComputeRunningProcesses") or [] if each.pid != os.getpid()]:
        remedy = "End what is left of an earlier job, or name other GPUs in CUDA_VISIBLE_DEVICES."
        seen = f"is used by {'process' if len(others) == 1 else 'processes'} {', '.join(others)}"
        yield WARNING, seen, "both are slower, and share its memory.", remedy


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
    share = max(1, math.floor(cpus) // ranks)
    way_out = f"Set --num-threads {share}" if share < threads else "Start fewer processes here"
    return (
        f"{_processes(ranks)} x {threads} threads on this node, but only {cpus:g} CPUs to use (affinity, or "
        f"the container's limit): threads will often stand still. {way_out}, or allow more CPUs."
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
