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
from rankup.doctor.report import OK, UNFIT, WARNING, Finding
from rankup.env.rank_env import ranges

RESET = "Reset it when no job needs it: nvidia-smi -r."
SLOWEST = "all ranks wait for the slowest at every step."
Problem = tuple[str, str, str, str]  # level, what is seen, why it matters, what to do


def gpus(local_rank: int | None, *, environ: Mapping[str, str] = os.environ, nvml: Any = None) -> Iterator[Finding]:
    """The health of the GPUs that this process may use: all of them, or that of `local_rank` among several ranks.

    `environ` and `nvml` (in place of pynvml) are for tests.
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
        places = [place for place in places if not place.startswith("MIG-")]  # a part of a GPU: the node's admin looks
    return [places[local_rank]] if local_rank is not None and local_rank < len(places) else places


def _look(nvml: Any, place: str) -> tuple[int, str, list[Problem]]:
    """nvidia-smi's number of a GPU, its name, and what is wrong with it. Raises NVMLError where it does not answer."""
    handle = nvml.nvmlDeviceGetHandleByIndex(int(place)) if place.isdigit() else nvml.nvmlDeviceGetHandleByUUID(place)

    def ask(name: str, *more: Any) -> Any:
        """NVML's answer, None where this GPU, driver or package does not know it."""
        try:
            return getattr(nvml, f"nvmlDeviceGet{name}")(handle, *more)
        except AttributeError:
            return None
        except nvml.NVMLError as error:
            if error.value in (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_RESET_REQUIRED):
                raise
            return None

    return nvml.nvmlDeviceGetIndex(handle), str(ask("Name")), list(_problems(nvml, ask))


def _problems(nvml: Any, ask: Callable[..., Any]) -> Iterator[Problem]:
    _, _, pending, failed = ask("RemappedRows") or (0, 0, 0, 0)
    if failed:
        row = "a bad row of its memory could not be replaced by a spare one"
        yield UNFIT, row, "errors in that row come again.", "Take this node out of the job, and have the GPU replaced."
    elif pending:
        until = "until then the driver keeps its pages away from programs; the next error there ends one."
        yield WARNING, "a bad row of its memory waits to be replaced by a spare one", until, RESET
    if errors := ask("TotalEccErrors", nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC):
        seen = f"{errors} uncorrected memory {'error' if errors == 1 else 'errors'} (ECC) since the driver was loaded"
        again = "Reset it (nvidia-smi -r); if they come again, have the GPU replaced."
        yield WARNING, seen, "each of them ends the program that reads it.", again
    reasons = ask("CurrentClocksEventReasons") or 0
    if reasons & (nvml.nvmlClocksEventReasonSwThermalSlowdown | nvml.nvmlClocksEventReasonHwThermalSlowdown):
        look = "Look at its fans and at the air around it (nvidia-smi -q -d TEMPERATURE,PERFORMANCE)."
        yield WARNING, "its clock is lowered because it is hot", SLOWEST, look
    elif reasons & (nvml.nvmlClocksEventReasonHwPowerBrakeSlowdown | nvml.nvmlClocksEventReasonHwSlowdown):
        look = "Look at the power supplies of this machine (nvidia-smi -q -d POWER,PERFORMANCE)."
        yield WARNING, "its clock is lowered because the power supply asks for it", SLOWEST, look
    # A container sees the programs of others without a name, or not at all
    others = [each for each in ask("ComputeRunningProcesses") or [] if each.pid != os.getpid()]
    if others:
        told = ", ".join(f"{each.pid} ({_name(each.pid)}{_gib(each.usedGpuMemory)})" for each in others)
        remedy = "End what is left of an earlier job, or name other GPUs in CUDA_VISIBLE_DEVICES."
        seen = f"is used by {'process' if len(others) == 1 else 'processes'} {told}"
        yield WARNING, seen, "both are slower, and share its memory.", remedy


def _gib(used: int | None) -> str:
    return f", {used / 2**30:.1f} GiB" if used else ""


def _name(pid: int) -> str:
    try:
        return psutil.Process(pid).name()
    except psutil.Error:
        return "not seen from here"
