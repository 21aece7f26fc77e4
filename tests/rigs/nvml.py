"""A driver of NVIDIA's that is made up, below the real package pynvml: its errors, its constants, its structures."""

from typing import Any

import pynvml

H100 = {
    "nvmlDeviceGetName": "NVIDIA H100 80GB HBM3", "nvmlDeviceGetRemappedRows": (0, 0, 0, 0),
    "nvmlDeviceGetTotalEccErrors": 0, "nvmlDeviceGetCurrentClocksEventReasons": pynvml.nvmlClocksEventReasonGpuIdle,
    "nvmlDeviceGetComputeRunningProcesses": [],
}


class Driver:
    """What pynvml gives on a machine with these GPUs: a dict of answers each. An answer that is an error is raised."""

    def __init__(self, *gpus: dict[str, Any], broken: int = 0) -> None:
        self.gpus, self.broken, self.is_open = gpus, broken, False

    def __getattr__(self, name: str) -> Any:
        known = getattr(pynvml, name)  # a name that nvidia-ml-py does not have is a mistake of the program
        if not name.startswith("nvmlDevice"):
            return known

        def answer(index: int, *more: Any) -> Any:
            assert self.is_open
            found = self.gpus[index][name]
            if isinstance(found, Exception):
                raise found
            return found

        return answer

    def nvmlInit(self) -> None:
        if self.broken:
            raise pynvml.NVMLError(self.broken)
        self.is_open = True

    def nvmlShutdown(self) -> None:
        assert self.is_open
        self.is_open = False

    def nvmlSystemGetDriverVersion(self) -> str:
        return "570.124.06"

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index >= len(self.gpus):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        if "lost" in self.gpus[index]:
            raise pynvml.NVMLError(self.gpus[index]["lost"])
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        places = {f"GPU-{index}": index for index in range(len(self.gpus))}
        if uuid not in places:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return places[uuid]

    def nvmlDeviceGetIndex(self, handle: int) -> int:
        return handle
