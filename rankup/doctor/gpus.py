"""Are the GPUs of this machine sound? Asked of NVML, the driver's library, by nvidia-ml-py, before a job holds them.

Nothing is measured and no GPU is used: NVML says what the driver knows already. On a machine without NVIDIA's driver
all of this says nothing.
"""

import importlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from rankup.agent.limits import read
from rankup.doctor.report import NOTE, OK, UNFIT, WARNING, Finding
from rankup.env.rank_env import ranges

FASTEST = 0  # the state of performance P0: a GPU with nothing to do leaves it, and lowers its link's speed on purpose
# What NVML wants done before a GPU is used again: NVML_GPU_RECOVERY_ACTION_*. With 3, to drain the links to its peers,
# the GPU itself still computes
RECOVERY = {
    1: "a reset (nvidia-smi -r, with no process on it)", 2: "a restart of the machine",
    4: "its jobs drained and a reset (nvidia-smi -r)", 5: "the IMEX domain recovered", 6: "a reset of its bus",
    7: "a restart of the whole system",
}
DRAIN_LINKS = 3
RESET = "Reset it when no job needs it: nvidia-smi -r."
SLOWEST = "all ranks wait for the slowest at every step."
Problem = tuple[str, str, str, str]  # level, what is seen, why it matters, what to do


def gpus(
    local_rank: int | None, *, environ: Mapping[str, str] = os.environ, nvml: Any = None, root: Path = Path("/")
) -> Iterator[Finding]:
    """The health of the GPUs that this process may use: all of them, or that of `local_rank` among several ranks.

    `environ`, `nvml` (in place of pynvml) and `root` are for tests.
    """
    nvml = nvml or importlib.import_module("pynvml")  # slow: only where it is asked
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        # A container that was given no GPU of its machine has no such file
        if error.value == nvml.NVML_ERROR_LIBRARY_NOT_FOUND and Path(root, "dev/nvidiactl").exists():
            missing = "this container lacks the driver's library NVML (NVIDIA_DRIVER_CAPABILITIES must have utility)"
            yield Finding("gpus", NOTE, f"their health can't be asked for: {missing}")
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


def driver_version(root: Path = Path("/")) -> str:
    """The version of NVIDIA's kernel driver, such as 570.124.06, also in a container; "" where there is none."""
    found = re.search(r"\b\d{3,}\.\d+(?:\.\d+)?\b", read(root / "proc/driver/nvidia/version"))
    return found[0] if found else ""


def _places(nvml: Any, local_rank: int | None, environ: Mapping[str, str]) -> list[str]:
    """The numbers or UUIDs of the GPUs to look at."""
    named = environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        places = [str(index) for index in range(nvml.nvmlDeviceGetCount())]
    else:
        # CUDA counts the fastest first, NVML by the slot: the same where all of a machine are of one kind
        places = [place.strip() for place in named.split(",") if place.strip() not in ("", "-1", "NoDevFiles")]
    return [places[local_rank]] if local_rank is not None and local_rank < len(places) else places


def _look(nvml: Any, place: str) -> tuple[int, str, list[Problem]]:
    """nvidia-smi's number of a GPU, its name, and what is wrong with it. Raises NVMLError where it does not answer."""
    handle = nvml.nvmlDeviceGetHandleByIndex(int(place)) if place.isdigit() else nvml.nvmlDeviceGetHandleByUUID(place)
    is_part = place.startswith("MIG-")  # who computes on other parts of it is not this process's matter
    if is_part:
        handle = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)

    def ask(name: str, *more: Any) -> Any:
        """NVML's answer, None where this GPU, driver or package does not know it."""
        try:
            return getattr(nvml, name)(handle, *more)
        except AttributeError:
            return None
        except nvml.NVMLError as error:
            if error.value in (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_RESET_REQUIRED):
                raise
            return None

    problems = [*_memory(nvml, ask), *_speed(nvml, ask), *([] if is_part else _others(ask))]
    return nvml.nvmlDeviceGetIndex(handle), str(ask("nvmlDeviceGetName")), problems


def _memory(nvml: Any, ask: Callable[..., Any]) -> Iterator[Problem]:
    """What the GPU's memory, and the driver after an error, say."""
    fields = ask("nvmlDeviceGetFieldValues", [nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])
    # A driver older than the field answers all the same, and marks the value as not supported
    action = fields[0].value.uiVal if fields is not None and fields[0].nvmlReturn == 0 else 0
    if action in RECOVERY:
        after = "after its last error nothing computes on it."
        yield UNFIT, f"the driver asks for {RECOVERY[action]}", after, "Do that before a job holds it."
    elif action == DRAIN_LINKS:
        links = "the driver asks that its links to other GPUs (NVLink) be drained"
        yield WARNING, links, "after an error they are not to be relied on.", RESET
    _, _, pending, failed = ask("nvmlDeviceGetRemappedRows") or (0, 0, 0, 0)
    if failed:
        row = "a bad row of its memory could not be replaced by a spare one"
        yield UNFIT, row, "errors in that row come again.", "Take this node out of the job, and have the GPU replaced."
    elif pending:
        until = "until then the driver keeps its pages away from programs; the next error there ends one."
        yield WARNING, "a bad row of its memory waits to be replaced by a spare one", until, RESET
    if errors := ask("nvmlDeviceGetTotalEccErrors", nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC):
        seen = f"{errors} uncorrected memory {'error' if errors == 1 else 'errors'} (ECC) since the driver was loaded"
        again = "Reset it (nvidia-smi -r); if they come again, have the GPU replaced."
        yield WARNING, seen, "each of them ends the program that reads it.", again


def _speed(nvml: Any, ask: Callable[..., Any]) -> Iterator[Problem]:
    """What makes it slower than it should be, and with it all other ranks."""
    reasons = ask("nvmlDeviceGetCurrentClocksEventReasons") or 0
    if reasons & (nvml.nvmlClocksEventReasonSwThermalSlowdown | nvml.nvmlClocksEventReasonHwThermalSlowdown):
        look = "Look at its fans and at the air around it (nvidia-smi -q -d TEMPERATURE,PERFORMANCE)."
        yield WARNING, "its clock is lowered because it is hot", SLOWEST, look
    elif reasons & (nvml.nvmlClocksEventReasonHwPowerBrakeSlowdown | nvml.nvmlClocksEventReasonHwSlowdown):
        look = "Look at the power supplies of this machine (nvidia-smi -q -d POWER,PERFORMANCE)."
        yield WARNING, "its clock is lowered because the power supply asks for it", SLOWEST, look
    width, full = (ask(f"nvmlDeviceGet{which}PcieLinkWidth") for which in ("Curr", "Max"))
    if width and full and width < full:
        yield (
            WARNING, f"its PCIe link has {width} of {full} lanes",
            "data reach it, and leave it for the network, that much slower.",
            "Have it seated anew, or its riser or cable changed.",
        )
    generation, best = (ask(f"nvmlDeviceGet{which}PcieLinkGeneration") for which in ("Curr", "Max"))
    if generation and best and generation < best and ask("nvmlDeviceGetPerformanceState") == FASTEST:
        seen = f"its PCIe link runs at generation {generation} of {best}, though the GPU is awake"
        yield WARNING, seen, "each generation halves the time of a transfer.", "Look at the slot's setting in the BIOS."


def _others(ask: Callable[..., Any]) -> Iterator[Problem]:
    """Programs that compute on it already. A container sees those of others without a name, or not at all."""
    told = []
    for process in ask("nvmlDeviceGetComputeRunningProcesses") or []:
        if process.pid != os.getpid():
            gib = f", {process.usedGpuMemory / 2**30:.1f} GiB" if process.usedGpuMemory else ""
            told.append(f"{process.pid} ({_name(process.pid)}{gib})")
    if told:
        yield (
            WARNING, f"is used by {'process' if len(told) == 1 else 'processes'} {', '.join(told)}",
            "both are slower, and share its memory.",
            "End what is left of an earlier job, or name other GPUs in CUDA_VISIBLE_DEVICES.",
        )


def _name(pid: int) -> str:
    try:
        return psutil.Process(pid).name()
    except psutil.Error:
        return "not seen from here"
