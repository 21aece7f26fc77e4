"""Are the GPUs of this machine sound? Asked of NVML, the driver's library, by nvidia-ml-py, before a job holds them.

Nothing is measured and no GPU is used: NVML says what the driver knows already. On a machine without NVIDIA's driver
all of this says nothing.
"""

import importlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from rankup.env.rank_env import RankEnv, ranges
from train.process.findings import NOTE, OK, UNFIT, WARNING, Finding
from train.process.limits import read

STAGE = "gpus"
FASTEST = 0  # the state of performance P0: a GPU with nothing to do leaves it, and lowers its link's speed on purpose
REPLACE = "Take this node out of the job, and have the GPU replaced."
# What NVML wants done before a GPU is used again: NVML_GPU_RECOVERY_ACTION_*. With 3, to drain the links to its peers,
# the GPU itself still computes
RECOVERY = {
    1: "a reset (nvidia-smi -r, with no process on it)", 2: "a restart of the machine",
    4: "its jobs drained and a reset (nvidia-smi -r)", 5: "the IMEX domain recovered", 6: "a reset of its bus",
    7: "a restart of the whole system",
}
DRAIN_LINKS = 3


@dataclass(frozen=True, slots=True)
class _Gpu:
    """One GPU. `index`: NVML's and nvidia-smi's number. `is_part`: this process is given a part of it (MIG)."""

    index: int
    handle: Any
    is_part: bool = False


class _Lost(Exception):
    """NVML finds the GPU, but no answer comes from it."""


def gpus(
    launch: RankEnv, *, environ: Mapping[str, str] = os.environ, nvml: Any = None, root: Path = Path("/")
) -> Iterator[Finding]:
    """The health of the GPUs that this process may use: all of them where it is alone, its own among several ranks.

    `environ`, `nvml` (in place of pynvml) and `root` are for tests.
    """
    nvml = nvml or importlib.import_module("pynvml")  # slow: only where it is asked
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        # A container that was given no GPU of its machine has no such file
        if error.value == nvml.NVML_ERROR_LIBRARY_NOT_FOUND and Path(root, "dev/nvidiactl").exists():
            missing = "this container lacks the driver's library NVML (NVIDIA_DRIVER_CAPABILITIES must have utility)"
            yield Finding(STAGE, NOTE, f"their health can't be asked for: {missing}")
        if error.value in (nvml.NVML_ERROR_LIBRARY_NOT_FOUND, nvml.NVML_ERROR_DRIVER_NOT_LOADED):
            return  # no NVIDIA driver
        yield Finding(
            STAGE, UNFIT, f"the driver does not work: {error}", "no process can use a GPU.",
            "After an update of the driver restart the machine: the kernel still has the old one loaded.",
        )
        return
    try:
        yield from _check(nvml, launch, environ)
    finally:
        nvml.nvmlShutdown()


def driver_version(root: Path = Path("/")) -> str:
    """The version of NVIDIA's kernel driver, such as 570.124.06, also in a container; "" where there is none."""
    found = re.search(r"\b\d{3,}\.\d+(?:\.\d+)?\b", read(root / "proc/driver/nvidia/version"))
    return found[0] if found else ""


def _check(nvml: Any, launch: RankEnv, environ: Mapping[str, str]) -> Iterator[Finding]:
    lost, own = _visible(nvml, launch, environ)
    found: dict[Finding, list[int]] = {}
    for gpu in own:
        try:
            problems = [*_memory(nvml, gpu), *_speed(nvml, gpu), *([] if gpu.is_part else _others(nvml, gpu))]
        except _Lost as error:
            problems = [_lost(str(error))]
        for problem in problems:
            found.setdefault(problem, []).append(gpu.index)
    for index, why in lost:
        found.setdefault(_lost(why), []).append(index)
    # One finding for all GPUs that have it: eight of them get hot together
    for problem, indexes in found.items():
        yield replace(problem, seen=f"GPU {ranges(indexes)}: {problem.seen}")
    if not found and own:
        names = sorted({str(_ask(nvml, "nvmlDeviceGetName", gpu)) for gpu in own})
        count = "1 healthy" if len(own) == 1 else f"{len(own)} healthy"
        yield Finding(STAGE, OK, f"{count}: {', '.join(names)}, driver {nvml.nvmlSystemGetDriverVersion()}")


def _visible(nvml: Any, launch: RankEnv, environ: Mapping[str, str]) -> tuple[list[tuple[int, str]], list[_Gpu]]:
    """The GPUs that do not answer, with the driver's words, and those that do; only those this process may use."""
    named = environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        places: list[str] = [str(index) for index in range(nvml.nvmlDeviceGetCount())]
    else:
        # CUDA counts the fastest first, NVML by the slot: the same where all of a machine are of one kind
        places = [place.strip() for place in named.split(",") if place.strip() not in ("", "-1", "NoDevFiles")]
    if launch.world_size > 1 and launch.local_rank < len(places):
        places = [places[launch.local_rank]]
    lost, own = [], []
    for number, place in enumerate(places):
        try:
            own.append(_open(nvml, place))
        except nvml.NVMLError as error:
            if error.value in (nvml.NVML_ERROR_INVALID_ARGUMENT, nvml.NVML_ERROR_NOT_FOUND):
                break  # no such GPU: CUDA too takes those before it alone
            lost.append((int(place) if place.isdigit() else number, str(error)))
    return lost, own


def _open(nvml: Any, place: str) -> _Gpu:
    """The GPU of a number or a UUID. Raises NVMLError."""
    is_part = place.startswith("MIG-")
    handle = nvml.nvmlDeviceGetHandleByIndex(int(place)) if place.isdigit() else nvml.nvmlDeviceGetHandleByUUID(place)
    if is_part:
        handle = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
    return _Gpu(nvml.nvmlDeviceGetIndex(handle), handle, is_part)


def _ask(nvml: Any, name: str, gpu: _Gpu, *more: Any) -> Any:
    """NVML's answer, None where this GPU, driver or package does not know it. Raises _Lost."""
    try:
        return getattr(nvml, name)(gpu.handle, *more)
    except AttributeError:
        return None
    except nvml.NVMLError as error:
        if error.value in (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_RESET_REQUIRED):
            raise _Lost(str(error)) from error
        return None


def _lost(why: str) -> Finding:
    return Finding(
        STAGE, UNFIT, f"does not answer: {why}", "a rank that is given it fails, or hangs.",
        "nvidia-smi -r resets a GPU that no process uses; one that fell off the bus needs a restart of the machine.",
    )


def _memory(nvml: Any, gpu: _Gpu) -> Iterator[Finding]:
    """What the GPU's memory, and the driver after an error, say."""
    fields = _ask(nvml, "nvmlDeviceGetFieldValues", gpu, [nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])
    # A driver older than the field answers all the same, and marks the value as not supported
    action = fields[0].value.uiVal if fields is not None and fields[0].nvmlReturn == 0 else 0
    if action in RECOVERY:
        yield Finding(
            STAGE, UNFIT, f"the driver asks for {RECOVERY[action]}", "after its last error nothing computes on it.",
            "Do that before a job holds it.",
        )
    elif action == DRAIN_LINKS:
        yield Finding(
            STAGE, WARNING, "the driver asks that its links to other GPUs (NVLink) be drained",
            "after an error they are not to be relied on.", "Reset it when no job needs it: nvidia-smi -r.",
        )
    rows = _ask(nvml, "nvmlDeviceGetRemappedRows", gpu)
    if rows is not None:
        _, _, pending, failed = rows
        if failed:
            yield Finding(
                STAGE, UNFIT, "a bad row of its memory could not be replaced by a spare one",
                "errors in that row come again.", REPLACE,
            )
        elif pending:
            yield Finding(
                STAGE, WARNING, "a bad row of its memory waits to be replaced by a spare one",
                "until then the driver keeps its pages away from programs; the next error there ends one.",
                "Reset it when no job needs it: nvidia-smi -r.",
            )
    errors = _ask(
        nvml, "nvmlDeviceGetTotalEccErrors", gpu, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
    if errors:
        were = "error" if errors == 1 else "errors"
        yield Finding(
            STAGE, WARNING, f"{errors} uncorrected memory {were} (ECC) since the driver was loaded",
            "each of them ends the program that reads it.",
            "Reset it (nvidia-smi -r); if they come again, have the GPU replaced.",
        )


def _speed(nvml: Any, gpu: _Gpu) -> Iterator[Finding]:
    """What makes it slower than it should be, and with it all other ranks."""
    reasons = _ask(nvml, "nvmlDeviceGetCurrentClocksEventReasons", gpu) or 0
    hot = nvml.nvmlClocksEventReasonSwThermalSlowdown | nvml.nvmlClocksEventReasonHwThermalSlowdown
    if reasons & hot:
        yield Finding(
            STAGE, WARNING, "its clock is lowered because it is hot", "all ranks wait for the slowest at every step.",
            "Look at its fans and at the air around it (nvidia-smi -q -d TEMPERATURE,PERFORMANCE).",
        )
    elif reasons & (nvml.nvmlClocksEventReasonHwPowerBrakeSlowdown | nvml.nvmlClocksEventReasonHwSlowdown):
        yield Finding(
            STAGE, WARNING, "its clock is lowered because the power supply asks for it",
            "all ranks wait for the slowest at every step.",
            "Look at the power supplies of this machine (nvidia-smi -q -d POWER,PERFORMANCE).",
        )
    width, full = (_ask(nvml, f"nvmlDeviceGet{which}PcieLinkWidth", gpu) for which in ("Curr", "Max"))
    if width and full and width < full:
        yield Finding(
            STAGE, WARNING, f"its PCIe link has {width} of {full} lanes",
            "data reach it, and leave it for the network, that much slower.",
            "Have it seated anew, or its riser or cable changed.",
        )
    generation, best = (_ask(nvml, f"nvmlDeviceGet{which}PcieLinkGeneration", gpu) for which in ("Curr", "Max"))
    if generation and best and generation < best and _ask(nvml, "nvmlDeviceGetPerformanceState", gpu) == FASTEST:
        yield Finding(
            STAGE, WARNING, f"its PCIe link runs at generation {generation} of {best}, though the GPU is awake",
            "each generation halves the time of a transfer.", "Look at the slot's setting in the BIOS.",
        )


def _others(nvml: Any, gpu: _Gpu) -> Iterator[Finding]:
    """Programs that compute on it already. A container sees those of others without a name, or not at all."""
    running = _ask(nvml, "nvmlDeviceGetComputeRunningProcesses", gpu) or []
    told = []
    for process in running:
        if process.pid != os.getpid():
            gib = f", {process.usedGpuMemory / 2**30:.1f} GiB" if process.usedGpuMemory else ""
            told.append(f"{process.pid} ({_name(process.pid)}{gib})")
    if told:
        which = "process" if len(told) == 1 else "processes"
        yield Finding(
            STAGE, WARNING, f"is used by {which} {', '.join(told)}", "both are slower, and share its memory.",
            "End what is left of an earlier job, or name other GPUs in CUDA_VISIBLE_DEVICES.",
        )


def _name(pid: int) -> str:
    try:
        return psutil.Process(pid).name()
    except psutil.Error:
        return "not seen from here"
