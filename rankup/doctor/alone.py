"""What the doctor asks of one machine, and the check before its ranks start. No torch here."""

import logging
from collections.abc import Callable, Iterable
from pathlib import Path

from rankup.agent.logs import host_name
from rankup.agent.processes import within
from rankup.doctor import gpus, machine
from rankup.doctor.report import CODES, INCOMPLETE, VERDICTS, WARNING, Finding, Report
from rankup.errors import FINISHED

NAME_S, DISK_S = 10.0, 30.0  # a resolver and a network disk may never answer,
GPU_S = 60.0  # nor a driver whose GPU hangs; one that nobody keeps loaded takes seconds for each GPU


def check_machine(
    report: Report, run_dir: Path, *, ranks: int, threads: int = 1, num_workers: int = 0, has_gpus: bool = True,
    local_rank: int | None = None, devices: Callable[[], Iterable[Finding]] = tuple,
) -> None:
    """Add to `report` what this process sees of its machine, each check within its time limit.

    `ranks`: on this node, with `threads` threads and `num_workers` DataLoader workers each. `local_rank`: whose GPU to
    look at, None: all. `devices`: a check of them that needs torch.
    """
    _bounded(report, "names", NAME_S, machine.own_name, "the resolver of this machine gives no answer.")
    report.add(*machine.limits(ranks=ranks, threads=threads))
    report.add(*machine.shared_memory(num_workers=num_workers))
    if has_gpus:
        _bounded(report, "gpus", GPU_S, lambda: gpus.gpus(local_rank), "the driver of the GPUs gives no answer.")
    report.add(*devices())
    silent = f"{run_dir} is on a disk that does not answer."
    _bounded(report, "storage", DISK_S, lambda: machine.disk(run_dir), silent)


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


def _bounded(
    report: Report, stage: str, timeout_s: float, check: Callable[[], Iterable[Finding]], silent: str
) -> None:
    found = within(timeout_s, lambda: list(check()))
    if found is None:
        remedy = "Correct that first: training would hang."
        found = [Finding(stage, INCOMPLETE, f"no answer within {timeout_s:g} s", silent, remedy)]
    report.add(*found)
