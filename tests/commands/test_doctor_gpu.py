"""The health of GPUs as the doctor tells it, from answers of NVML as real ones."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch

from rankup.doctor import machine, stages
from rankup.doctor.report import NOTE, OK, UNFIT, WARNING, Finding, exit_code
from tests.rigs.fork_server import Forks
from tests.rigs.nvml import H100, Driver


def found(driver: Driver, local_rank: int | None = None, **environ: str) -> list[Finding]:
    told = list(machine.gpus(local_rank, environ=environ, nvml=driver))
    assert not driver.is_open
    return told


def test_healthy_gpus_are_one_line() -> None:
    (finding,) = found(Driver(*[H100] * 8))
    assert (finding.level, finding.stage) == (OK, "gpus")
    assert finding.seen == "8 healthy: NVIDIA H100 80GB HBM3, driver 570.124.06"


@pytest.mark.parametrize(
    ("answers", "level", "seen"),
    [
        ({"nvmlDeviceGetRemappedRows": (0, 3, 0, 1)}, UNFIT,
         "GPU 1: a bad row of its memory could not be replaced by a spare one"),
        ({"nvmlDeviceGetRemappedRows": (0, 1, 1, 0)}, WARNING,
         "GPU 1: a bad row of its memory waits to be replaced by a spare one"),
        ({"nvmlDeviceGetTotalEccErrors": 2}, WARNING,
         "GPU 1: uncorrected memory errors (ECC) since the driver was loaded: 2"),
        ({"nvmlDeviceGetCurrentClocksEventReasons": pynvml.nvmlClocksEventReasonHwSlowdown
          | pynvml.nvmlClocksEventReasonHwThermalSlowdown}, WARNING,
         "GPU 1: its clock is lowered because it is hot"),
        ({"nvmlDeviceGetCurrentClocksEventReasons": pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown}, WARNING,
         "GPU 1: its clock is lowered because the power supply asks for it"),
        ({"nvmlDeviceGetComputeRunningProcesses": [SimpleNamespace(pid=7), SimpleNamespace(pid=os.getpid())]}, WARNING,
         "GPU 1: is used by other processes: 7"),
        ({"lost": pynvml.NVML_ERROR_UNKNOWN}, UNFIT, "GPU 1: does not answer: Unknown Error"),
        ({"nvmlDeviceGetTotalEccErrors": pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)}, UNFIT,
         "GPU 1: does not answer: GPU is lost"),
    ],
)
def test_one_bad_gpu_among_good_ones_is_named(answers: dict[str, Any], level: str, seen: str) -> None:
    (finding,) = found(Driver(H100, H100 | answers, H100))
    assert (finding.level, finding.seen) == (level, seen)
    assert finding.why
    assert finding.remedy


def test_a_fault_that_several_gpus_have_is_told_once() -> None:
    hot = H100 | {"nvmlDeviceGetCurrentClocksEventReasons": pynvml.nvmlClocksEventReasonSwThermalSlowdown}
    (finding,) = found(Driver(hot, H100, hot, hot))
    assert finding.seen == "GPU 0, 2-3: its clock is lowered because it is hot"


def test_work_under_the_power_limit_is_no_fault() -> None:
    busy = {"nvmlDeviceGetCurrentClocksEventReasons": pynvml.nvmlClocksEventReasonSwPowerCap}
    assert [finding.level for finding in found(Driver(H100 | busy))] == [OK]


def test_what_a_gpu_does_not_know_is_no_fault() -> None:
    """A consumer's card has neither ECC nor row remapping."""
    without = pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
    card = {name: without for name in H100 if name.startswith("nvmlDevice")}
    assert [finding.level for finding in found(Driver(card | {"nvmlDeviceGetName": "RTX"}))] == [OK]


def test_gpus_that_this_process_may_not_use_are_not_asked() -> None:
    lost = {"lost": pynvml.NVML_ERROR_GPU_IS_LOST}
    driver = Driver(H100, lost, H100, lost)
    assert found(driver, CUDA_VISIBLE_DEVICES="2, 0")[0].seen.startswith("2 healthy")
    assert found(driver, CUDA_VISIBLE_DEVICES="GPU-2")[0].seen.startswith("1 healthy")
    assert found(driver, CUDA_VISIBLE_DEVICES="0,7,2")[0].seen.startswith("1 healthy")  # as CUDA does
    assert found(driver, CUDA_VISIBLE_DEVICES="") == found(driver, CUDA_VISIBLE_DEVICES="-1") == []
    assert found(driver, 1)[0].seen == "GPU 1: does not answer: GPU is lost"
    assert found(driver, 1, CUDA_VISIBLE_DEVICES="0,2")[0].seen.startswith("1 healthy")


def test_a_driver_that_was_updated_under_the_kernel_is_unfit() -> None:
    (finding,) = found(Driver(broken=pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH))
    assert exit_code([finding]) == 20
    assert "version mismatch" in finding.seen


def test_a_machine_without_a_driver_is_passed_over_in_silence() -> None:
    assert found(Driver(broken=pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)) == []


def test_the_drivers_version_is_read_without_a_package(tmp_path: Path) -> None:
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    text = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.158.01  Release Build  (dvs-builder@U22)\n"
    (tmp_path / "proc/driver/nvidia/version").write_text(text)
    assert stages.driver_version(tmp_path) == "570.158.01"
    assert stages.driver_version(tmp_path / "elsewhere") == ""


def test_ranks_with_two_drivers_are_warned_and_with_two_kinds_of_gpu_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "driver_version", lambda: "570.124.06")

    def gather(own: dict[str, str]) -> list[dict[str, str]]:
        return [own, own, own | {"GPU driver": "535.104.12", "GPU": "NVIDIA A100-SXM4-80GB"}]

    group = SimpleNamespace(gather=gather, rank=0, device=torch.device("cpu"))
    driver, kind = stages.versions(group)  # type: ignore[arg-type]
    assert (driver.level, driver.seen) == (WARNING, "GPU driver differs: 570.124.06 on 0-1, 535.104.12 on 2")
    assert kind.level == NOTE
    assert kind.seen.startswith("GPU differs: none on 0-1, NVIDIA A100-SXM4-80GB on 2; weights are the same to the bit")


# The whole doctor -----------------------------------------------------------------------------------------------------


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
def test_doctor_alone_lists_the_gpus(forks: Forks, tmp_path: Path) -> None:
    codes, output = forks.run("doctor", *JOB, "--run-dir", str(tmp_path))
    assert codes[0] in (0, 10), output
    assert f"{torch.cuda.device_count()} CUDA devices, {torch.cuda.get_device_name(0)}" in " ".join(output.split())


@pytest.mark.gpu
def test_doctor_tells_the_health_of_the_gpus(forks: Forks, tmp_path: Path) -> None:
    codes, output = forks.run("doctor", "--alone", *JOB, "--run-dir", str(tmp_path))
    said = [" ".join(line.partition("] ")[2].split()) for line in output.splitlines()]
    assert codes[0] in (0, 10, 20), output
    # A healthy machine: one line for all. Another: at least one that names a GPU
    assert any(line.startswith(("ok gpus", "WARNING gpus GPU", "NOT FIT gpus GPU")) for line in said), output


@pytest.mark.gpu
def test_doctor_refuses_two_ranks_on_one_gpu(forks: Forks, tmp_path: Path) -> None:
    one = {"CUDA_VISIBLE_DEVICES": "0"}
    codes, output = forks.run("doctor", *JOB, "--run-dir", str(tmp_path), world_size=2, env=one)
    assert codes == [20, 20], output
    assert "2 processes on this node, but 1 CUDA devices are visible" in " ".join(output.split())


@pytest.mark.gpu
def test_doctor_on_two_gpus_look_at_nccl(forks: Forks, tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    codes, output = forks.run("doctor", *JOB, "--run-dir", str(tmp_path), world_size=2)
    assert codes in ([0, 0], [10, 10]), output
    assert "all_reduce, broadcast and all_gather give the right numbers" in " ".join(output.split())
