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
from rankup.doctor import CODES, OK, VERDICTS, WARNING, Finding, Report, problem
from rankup.errors import FINISHED

MIB = 2**20
LEAST_CPU = 0.75  # of a CPU for each thread: a thread of ours waits now and then, so a little less is no loss
LEAST_MEMORY = 1024 * MIB  # for each rank: torch and the smallest model take about half of it
LEAST_SHM, SHM_PER_WORKER = 32 * MIB, 32 * MIB
LEAST_DISK = 1024 * MIB  # a few checkpoints of a middle-sized model
LEAST_FILES = 1024
DISK_S = 30.0  # a network disk may never answer,
GPU_S = 60.0  # nor a driver whose GPU hangs; one that nobody keeps loaded takes seconds for each GPU


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
            found = [problem("silent", of=stage, timeout_s=timeout_s, why=silent)]
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
    cpus, wanted = cpu_quota(root), ranks * threads
    if wanted > math.ceil(cpus) or wanted * LEAST_CPU > cpus:
        yield problem("cpus", ranks=ranks, threads=threads, cpus=f"{cpus:g}")
    else:
        yield Finding("limits", OK, f"{cpus:g} CPUs for {ranks} x {threads} threads")
    memory = memory_limit(root)
    if memory is not None and memory < LEAST_MEMORY * ranks:
        yield problem("memory", mib=memory / MIB, ranks=ranks)
    # Without a limit the kernel counts for the whole machine: any process, at any time
    if memory is not None and (killed := oom_kills(root)):
        yield problem("killed", count=killed)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < LEAST_FILES:
        yield problem("files", soft=soft)


def shared_memory(*, num_workers: int, folder: str = "/dev/shm") -> Iterator[Finding]:
    """Room in /dev/shm, through which DataLoader workers hand over batches and nccl's ranks of one node exchange."""
    if not os.path.isdir(folder):
        return
    system = os.statvfs(folder)
    free, total = system.f_bavail * system.f_frsize, system.f_blocks * system.f_frsize
    seen = f"{folder}: {free / MIB:.0f} of {total / MIB:.0f} MiB free"
    little = free < LEAST_SHM + num_workers * SHM_PER_WORKER
    yield problem("small-shm", seen=seen, folder=folder) if little else Finding("memory", OK, seen)


def disk(run_dir: Path) -> Iterator[Finding]:
    """Whether checkpoints can be written in the run's folder: permission and room."""
    folder = run_dir / "doctor"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"seen")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        yield problem("no-disk", folder=error.filename or folder, error=error.strerror)
        return
    seen = f"{run_dir}: {free / 2**30:.1f} GiB free"
    little = free < LEAST_DISK
    yield problem("little-disk", folder=run_dir, mib=free / MIB) if little else Finding("storage", OK, seen)


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
            yield problem("driver", error=error)
        return
    # CUDA counts the fastest first, NVML by the slot: the same where all of a machine are of one kind
    every = ",".join(str(index) for index in range(nvml.nvmlDeviceGetCount()))
    places = [place.strip() for place in environ.get("CUDA_VISIBLE_DEVICES", every).split(",")]  # numbers or UUIDs
    if local_rank is not None and local_rank < len(places):
        places = [places[local_rank]]
    names, found = [], []
    for place in places:
        try:
            by = nvml.nvmlDeviceGetHandleByIndex if place.isdigit() else nvml.nvmlDeviceGetHandleByUUID
            handle = by(int(place) if place.isdigit() else place)
            names.append(str(nvml.nvmlDeviceGetName(handle)))
            found += _problems(nvml, handle)
        except nvml.NVMLError as error:
            if error.value in (nvml.NVML_ERROR_INVALID_ARGUMENT, nvml.NVML_ERROR_NOT_FOUND):
                break  # no such GPU: CUDA too takes those before it alone
            found.append(problem("lost", gpu=place, more=error))
    yield from found
    if names and not found:
        kinds, driver = ", ".join(sorted({*names})), nvml.nvmlSystemGetDriverVersion()
        yield Finding("gpus", OK, f"{len(names)} healthy: {kinds}, driver {driver}")
    nvml.nvmlShutdown()


def _problems(nvml: Any, handle: Any) -> list[Finding]:
    """What is wrong with a GPU. Raises NVMLError where it does not answer."""
    def ask(name: str, *more: Any) -> Any:
        """NVML's answer, None where this GPU or driver does not know it."""
        try:
            return getattr(nvml, f"nvmlDeviceGet{name}")(handle, *more)
        except nvml.NVMLError as error:
            if error.value in (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_RESET_REQUIRED):
                raise
            return None

    gpu, found = nvml.nvmlDeviceGetIndex(handle), []  # nvidia-smi's number
    *_, pending, failed = ask("RemappedRows") or (0, 0)
    if pending or failed:
        found.append(problem("row-failed" if failed else "row-pending", gpu=gpu))
    if errors := ask("TotalEccErrors", nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC):
        found.append(problem("ecc", gpu=gpu, more=errors))
    reasons = ask("CurrentClocksEventReasons") or 0
    if reasons & (nvml.nvmlClocksEventReasonSwThermalSlowdown | nvml.nvmlClocksEventReasonHwThermalSlowdown):
        found.append(problem("hot", gpu=gpu))
    elif reasons & (nvml.nvmlClocksEventReasonHwPowerBrakeSlowdown | nvml.nvmlClocksEventReasonHwSlowdown):
        found.append(problem("power", gpu=gpu))
    # A container may not see the programs of others
    if others := [str(each.pid) for each in ask("ComputeRunningProcesses") or [] if each.pid != os.getpid()]:
        found.append(problem("in-use", gpu=gpu, more=", ".join(others)))
    return found


# Before a training -------------------------------------------------------------------------------------------------


def before_training(*, ranks: int | None, threads: int, devices: int) -> list[str]:
    """A line for each limit that will be in the way of a training with `threads` in each rank, and for accelerators
    that none will use: so it looks when somebody gave the number of nodes for that of ranks.

    `ranks`, `devices`: on this node, None where that is not known.
    """
    found = [each for each in limits(ranks=ranks or 1, threads=threads) if each.level == WARNING]
    if ranks is not None and devices > ranks:
        found.append(problem("idle", devices=devices, ranks=ranks, idle=devices - ranks))
    return [f"{each.seen}: {each.why} {each.remedy}" for each in found]
