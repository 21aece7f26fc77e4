"""The health of GPUs as the doctor tells it, from answers of NVML as real ones."""

import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch

from rankup.doctor import NOTE, OK, UNFIT, WARNING, Finding, exit_code, gpus, stages
from tests.rigs.fork_server import Forks

H100 = {
    "nvmlDeviceGetName": "NVIDIA H100 80GB HBM3", "nvmlDeviceGetRemappedRows": (0, 0, 0, 0),
    "nvmlDeviceGetTotalEccErrors": 0, "nvmlDeviceGetCurrentClocksEventReasons": pynvml.nvmlClocksEventReasonGpuIdle,
    "nvmlDeviceGetComputeRunningProcesses": [],
}


class Driver:
    """NVIDIA's driver, made up below the real pynvml, on a machine with these GPUs: a dict of answers each. An answer
    that is an error is raised."""

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


def found(driver: Driver, local_rank: int | None = None, **environ: str) -> list[Finding]:
    findings = list(gpus(local_rank, environ=environ, nvml=driver))
    assert not driver.is_open
    return findings


NOT_SUPPORTED = pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


@pytest.mark.parametrize("gpu", [
    H100 | {"nvmlDeviceGetCurrentClocksEventReasons": pynvml.nvmlClocksEventReasonSwPowerCap},  # it works
    # A consumer's card has neither ECC nor row remapping
    H100 | dict.fromkeys(H100.keys() - {"nvmlDeviceGetName"}, NOT_SUPPORTED),
])
def test_healthy_gpus_are_one_line(gpu: dict[str, Any]) -> None:
    (finding,) = found(Driver(*[gpu] * 8))
    assert (finding.level, finding.stage) == (OK, "gpus")
    assert finding.seen == "8 healthy: NVIDIA H100 80GB HBM3, driver 570.124.06"


@pytest.mark.parametrize(("answers", "level", "seen"), [
    ({"nvmlDeviceGetRemappedRows": (0, 3, 0, 1)}, UNFIT,
     "GPU 1: a bad row of its memory could not be replaced by a spare one"),
    ({"nvmlDeviceGetRemappedRows": (0, 1, 1, 0)}, WARNING,
     "GPU 1: a bad row of its memory waits to be replaced by a spare one"),
    ({"nvmlDeviceGetTotalEccErrors": 2}, WARNING,
     "GPU 1: uncorrected memory errors (ECC) since the driver was loaded: 2"),
    ({"nvmlDeviceGetCurrentClocksEventReasons": pynvml.nvmlClocksEventReasonHwThermalSlowdown}, WARNING,
     "GPU 1: its clock is lowered because of heat or the power supply"),
    ({"nvmlDeviceGetComputeRunningProcesses": [SimpleNamespace(pid=7), SimpleNamespace(pid=os.getpid())]}, WARNING,
     "GPU 1: is used by other processes: 7"),
    ({"lost": pynvml.NVML_ERROR_UNKNOWN}, UNFIT, "GPU 1: does not answer: Unknown Error"),
])
def test_one_bad_gpu_among_good_ones_is_named(answers: dict[str, Any], level: str, seen: str) -> None:
    (finding,) = found(Driver(H100, H100 | answers, H100))
    assert (finding.level, finding.seen) == (level, seen)
    assert finding.why
    assert finding.remedy


def test_gpus_that_this_process_may_not_use_are_not_asked() -> None:
    lost = {"lost": pynvml.NVML_ERROR_GPU_IS_LOST}
    driver = Driver(H100, lost, H100, lost)
    assert found(driver, CUDA_VISIBLE_DEVICES="2, 0")[0].seen.startswith("2 healthy")
    assert found(driver, CUDA_VISIBLE_DEVICES="GPU-2")[0].seen.startswith("1 healthy")
    assert found(driver, CUDA_VISIBLE_DEVICES="0,7,2")[0].seen.startswith("1 healthy")  # as CUDA does
    assert found(driver, CUDA_VISIBLE_DEVICES="") == found(driver, CUDA_VISIBLE_DEVICES="-1") == []
    assert found(driver, 1)[0].seen == "GPU 1: does not answer: GPU is lost"
    assert found(driver, 1, CUDA_VISIBLE_DEVICES="0,2")[0].seen.startswith("1 healthy")


def test_a_driver_that_was_updated_under_the_kernel_is_unfit_and_none_is_passed_over() -> None:
    (finding,) = found(Driver(broken=pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH))
    assert exit_code([finding]) == 20
    assert "version mismatch" in finding.seen
    assert found(Driver(broken=pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)) == []


def test_ranks_with_two_nccls_are_warned_and_with_two_gpus_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 5))

    def gather(own: dict[str, str]) -> list[dict[str, str]]:
        return [own, own, own | {"nccl": "2.21.5", "GPU": "NVIDIA A100-SXM4-80GB"}]

    group = SimpleNamespace(gather=gather, rank=0, device=torch.device("cuda"))
    nccl, kind = stages.versions(group)  # type: ignore[arg-type]
    assert (nccl.level, nccl.seen) == (WARNING, "nccl differs: 2.27.5 on 0-1, 2.21.5 on 2")
    assert kind.level == NOTE
    assert kind.seen.startswith("GPU differs: NVIDIA H100 on 0-1, NVIDIA A100-SXM4-80GB on 2; weights are the same")


def test_doctor_with_a_broken_gpu_is_not_fit_and_on_cpus_does_not_ask(forks: Forks, tmp_path: Path) -> None:
    preload = "tests.rigs.injected_faults:broken_gpu"
    line = ("doctor", "--alone", "--run-dir", tmp_path)
    said = forks.ends(*line, preload=preload, code=20)
    assert "NOT FIT  gpus         GPU 0: does not answer: GPU is lost" in said
    said = forks.ends(*line, "--device", "cpu", preload=preload)
    assert "gpus" not in said


# On real GPUs. Written on a machine without one, and never run so far -------------------------------------------------

JOB = ["--dataset", "digits", "--model", "mlp", "--name", "run"]


@pytest.mark.gpu
def test_doctor_lists_the_gpus_with_their_health_and_refuses_two_ranks_on_one(forks: Forks, tmp_path: Path) -> None:
    (code,), output = forks.run("doctor", "--alone", *JOB, "--run-dir", tmp_path)
    assert code in (0, 10, 20), output
    assert f"{torch.cuda.device_count()} CUDA devices, {torch.cuda.get_device_name(0)}" in " ".join(output.split())
    # A healthy machine: one line for all. Another: at least one that names a GPU
    assert re.search(r"(?m)^(\[.*\] )?(ok|WARNING|NOT FIT) +gpus ", output), output
    output = forks.ends("doctor", *JOB, "--run-dir", tmp_path, world_size=2, env={"CUDA_VISIBLE_DEVICES": "0"}, code=20)
    assert "2 processes on this node, but 1 CUDA devices are visible" in " ".join(output.split())
