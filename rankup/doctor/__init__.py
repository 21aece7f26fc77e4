"""The doctor: is this machine, and this group of machines, fit to train? No torch here.

First what it finds, the verdict that follows from that, and how both are shown. Then the checks of one machine: limits,
memory, GPUs, disks. The limits take milliseconds to check: every training looks at them first.
"""

import contextlib
import importlib
import json
import logging
import math
import os
import resource
import shutil
import tempfile
import textwrap
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, TextIO

from rankup.agent.logs import host_name
from rankup.agent.processes import cpu_quota, memory, oom_kills, within
from rankup.env.rank_env import holders, ranges
from rankup.errors import FINISHED
from rankup.places.files import write_json

OK, NOTE, WARNING, INCOMPLETE, UNFIT = "ok", "note", "warning", "incomplete", "unfit"
# From good to bad. A check that could not be completed is worse than a warning, as nobody knows that it would pass;
# a fault that is certain is worse than both.
CODES = {OK: 0, NOTE: 0, WARNING: 10, INCOMPLETE: 30, UNFIT: 20}
_ORDER = list(CODES)
VERDICTS = {0: "fit to train", 10: "fit to train, with warnings", 20: "not fit to train", 30: "could not be completed"}
_SHOWN = {OK: "ok", NOTE: "note", WARNING: "WARNING", INCOMPLETE: "NOT DONE", UNFIT: "NOT FIT"}
MIB = 2**20
LEAST_CPU = 0.75  # of a CPU for each thread: a thread of ours waits now and then, so a little less is no loss
LEAST_MEMORY = 1024 * MIB  # for each rank: torch and the smallest model take about half of it
LEAST_SHM, SHM_PER_WORKER = 32 * MIB, 32 * MIB
LEAST_DISK = 1024 * MIB  # a few checkpoints of a middle-sized model
LEAST_FILES = 1024
DISK_S = 30.0  # a network disk may never answer,
GPU_S = 60.0  # nor a driver whose GPU hangs; one that nobody keeps loaded takes seconds for each GPU


@dataclass(frozen=True, slots=True)
class Finding:
    """What was seen in one stage, on which rank. A warning or worse also says why it matters and how to mend it."""

    stage: str
    level: str
    seen: str
    why: str = ""
    remedy: str = ""
    rank: int = 0
    host: str = ""

    @property
    def is_problem(self) -> bool:
        return self.level not in (OK, NOTE)

    def text(self, who: str = "") -> str:
        """For people, in one to three paragraphs."""
        parts = [(f"{_SHOWN[self.level]:8} {self.stage:12} ", who + self.seen)]
        if self.is_problem:
            parts += [(" " * 22 + "why:  ", self.why), (" " * 22 + "mend: ", self.remedy)]
        return "\n".join(
            textwrap.fill(text, 110, initial_indent=start, subsequent_indent=" " * len(start), break_long_words=False,
                          break_on_hyphens=False)
            for start, text in parts if text
        )


@cache
def _table() -> dict[str, dict[str, str]]:
    return tomllib.loads(Path(__file__).with_name("findings.toml").read_text(encoding="utf-8"))


def problem(name: str, **words: Any) -> Finding:
    """That entry of findings.toml, with these words."""
    entry: dict[str, Any] = {part: text.format_map(words) for part, text in _table()[name].items()}
    return Finding(**entry)


def exit_code(findings: Iterable[Finding]) -> int:
    """0 fit, 10 fit with warnings, 20 not fit, 30 could not be completed."""
    return CODES[max((finding.level for finding in findings), key=_ORDER.index, default=OK)]


class Report:
    """The findings of this rank. `facts`: what else the JSON has. `json_out`: takes the JSON in place of the table."""

    def __init__(self, log: logging.Logger, *, rank: int = 0, json_out: TextIO | None = None, **facts: Any) -> None:
        self.findings: list[Finding] = []
        self.facts = facts
        self._log, self._rank, self._json_out, self._began_s = log, rank, json_out, time.monotonic()

    def add(self, *findings: Finding) -> None:
        """Keep findings of this rank, and print them on rank 0."""
        for finding in findings:
            self.findings.append(replace(finding, rank=self._rank, host=host_name()))
            if self._json_out is None:
                self._log.info(finding.text())

    def end(self, gather: Callable[[Any], list[Any]] | None = None, path: Path | None = None) -> int:
        """Print the verdict and return its exit code: of this rank alone, or of all ranks where `gather` gives the
        value of each. Then every rank calls it, and rank 0 writes the report to `path`."""
        findings = self.findings
        if gather is not None:
            gathered = gather([asdict(finding) for finding in findings])
            findings = [Finding(**finding) for part in gathered for finding in part]
        code = exit_code(findings)
        if gather is not None and self._rank != 0:
            return code
        ranks = holders((finding.rank, replace(finding, rank=0)) for finding in findings)
        stages = list(dict.fromkeys(finding.stage for finding in ranks))
        worst_first = sorted(ranks, key=lambda each: (stages.index(each.stage), -_ORDER.index(each.level)))
        seconds = time.monotonic() - self._began_s
        whole = {"verdict": VERDICTS[code], "exit_code": code, **self.facts, "seconds": round(seconds, 2), "findings": [
            {**asdict(each), "ranks": ranks[each]} for each in worst_first if each.is_problem or 0 in ranks[each]
        ]}
        if path is not None:
            with contextlib.suppress(OSError):  # a disk that can't be written has its own finding
                write_json(path, whole)
        if self._json_out is not None:
            print(json.dumps(whole), file=self._json_out, flush=True)
            return code
        level = logging.WARNING if self._rank else logging.INFO  # the log of another rank than 0 shows warnings alone
        for each in worst_first:
            if each.is_problem and ranks[each][0] != 0:  # rank 0's own were printed as they were found
                who = "" if gather is None else f"rank {ranges(ranks[each])} on {each.host}: "
                self._log.log(level, each.text(who))
        seen = [each.level for each in ranks]
        counts = ", ".join(f"{seen.count(each)} {each}" for each in (UNFIT, INCOMPLETE, WARNING) if each in seen)
        verdict = VERDICTS[code] + (f" ({counts})" if counts else "")
        self._log.log(level, f"doctor: {verdict}: {len(stages)} stages in {seconds:.1f} s")
        return code


# One machine ----------------------------------------------------------------------------------------------------------


def check_machine(
    report: Report, run_dir: Path, *, ranks: int, threads: int = 1, num_workers: int = 0, has_gpus: bool = True,
    local_rank: int | None = None,
) -> None:
    """Add to `report` what this process sees of its machine. `ranks`: on this node, with `threads` threads and
    `num_workers` DataLoader workers each. `local_rank`: whose GPU to look at, None: all."""
    report.add(*limits(ranks=ranks, threads=threads), *shared_memory(num_workers=num_workers))
    checks: list[tuple[str, float, Callable[[], Iterable[Finding]], str]] = [
        ("gpus", GPU_S, lambda: gpus(local_rank) if has_gpus else (), "the driver of the GPUs gives no answer."),
        ("storage", DISK_S, lambda: disk(run_dir), f"{run_dir} is on a disk that does not answer."),
    ]
    for stage, timeout_s, check, silent in checks:
        found = within(timeout_s, lambda check=check: [*check()])  # type: ignore[misc]
        report.add(*([problem("silent", of=stage, timeout_s=timeout_s, why=silent)] if found is None else found))


def preflight(run_dir: Path, *, ranks: int, log: logging.Logger) -> tuple[int, str]:
    """Before the ranks of this node start: the doctor's exit code where it is not fit, and why; else 0.

    Without the other machines: a container that is replaced in the middle of a training finds the others at work.
    """
    report = Report(log)
    check_machine(report, run_dir, ranks=ranks)
    code = report.end()
    if code in (FINISHED, CODES[WARNING]):
        return FINISHED, ""
    return code, f"preflight on {host_name()}: {VERDICTS[code]}. No rank was started"


def before_training(*, ranks: int | None, threads: int, devices: int) -> list[str]:
    """A line for each limit that will be in the way of a training with `threads` in each rank, and for accelerators
    that none will use. `ranks`, `devices`: on this node, None where that is not known."""
    found = [each for each in limits(ranks=ranks or 1, threads=threads) if each.level == WARNING]
    if ranks is not None and devices > ranks:  # somebody may have given the number of nodes for that of ranks
        found.append(problem("idle", devices=devices, ranks=ranks, idle=devices - ranks))
    return [f"{each.seen}: {each.why} {each.remedy}" for each in found]


def limits(*, ranks: int, threads: int, root: Path = Path("/")) -> Iterator[Finding]:
    """CPUs, memory and open files that this process may use; in a container they are fewer than the machine's.

    `ranks`: on this node, with `threads` threads each. `root`: of the file system, for tests.
    """
    cpus, wanted = cpu_quota(root), ranks * threads
    if wanted > math.ceil(cpus) or wanted * LEAST_CPU > cpus:
        yield problem("cpus", ranks=ranks, threads=threads, cpus=f"{cpus:g}")
    else:
        yield Finding("limits", OK, f"{cpus:g} CPUs for {ranks} x {threads} threads")
    least = min((limit for limit, _ in memory(root)), default=None)
    if least is not None and least < LEAST_MEMORY * ranks:
        yield problem("memory", mib=least / MIB, ranks=ranks)
    # Without a limit the kernel counts for the whole machine: any process, at any time
    if least is not None and (killed := oom_kills(root)):
        yield problem("killed", count=killed)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < LEAST_FILES:
        yield problem("files", soft=soft)


def shared_memory(*, num_workers: int) -> Iterator[Finding]:
    """Room in /dev/shm, through which DataLoader workers hand over batches and nccl's ranks of one node exchange."""
    folder = "/dev/shm"
    if os.path.isdir(folder):
        total, _, free = shutil.disk_usage(folder)
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
    else:
        little, seen = free < LEAST_DISK, f"{run_dir}: {free / 2**30:.1f} GiB free"
        yield problem("little-disk", folder=run_dir, mib=free / MIB) if little else Finding("storage", OK, seen)


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
    names, found = list[str](), list[Finding]()
    for place in places:
        try:
            by_index, by_uuid = nvml.nvmlDeviceGetHandleByIndex, nvml.nvmlDeviceGetHandleByUUID
            handle = by_index(int(place)) if place.isdigit() else by_uuid(place)
            names.append(str(nvml.nvmlDeviceGetName(handle)))
            found += _problems(nvml, handle)
        except nvml.NVMLError as error:
            if error.value in (nvml.NVML_ERROR_INVALID_ARGUMENT, nvml.NVML_ERROR_NOT_FOUND):
                break  # no such GPU: CUDA too takes those before it alone
            found.append(problem("lost", gpu=place, more=error))
    if names and not found:
        kinds, driver = ", ".join(sorted({*names})), nvml.nvmlSystemGetDriverVersion()
        found = [Finding("gpus", OK, f"{len(names)} healthy: {kinds}, driver {driver}")]
    nvml.nvmlShutdown()
    yield from found


def _problems(nvml: Any, handle: Any) -> Iterator[Finding]:
    """What is wrong with a GPU. Raises NVMLError where it does not answer."""
    def ask(name: str, *more: Any) -> Any:
        """NVML's answer, None where this GPU or driver does not know it."""
        try:
            return getattr(nvml, f"nvmlDeviceGet{name}")(handle, *more)
        except nvml.NVMLError as error:
            if error.value in (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_RESET_REQUIRED):
                raise
            return None

    gpu = nvml.nvmlDeviceGetIndex(handle)  # nvidia-smi's number
    *_, pending, failed = ask("RemappedRows") or (0, 0)
    if pending or failed:
        yield problem("row-failed" if failed else "row-pending", gpu=gpu)
    if errors := ask("TotalEccErrors", nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC):
        yield problem("ecc", gpu=gpu, more=errors)
    # Heat, or a power supply that asks for it. The power limit alone is normal under load
    slowed = (nvml.nvmlClocksEventReasonSwThermalSlowdown | nvml.nvmlClocksEventReasonHwThermalSlowdown
              | nvml.nvmlClocksEventReasonHwPowerBrakeSlowdown | nvml.nvmlClocksEventReasonHwSlowdown)
    if (ask("CurrentClocksEventReasons") or 0) & slowed:
        yield problem("throttled", gpu=gpu)
    # A container may not see the programs of others
    if others := [str(each.pid) for each in ask("ComputeRunningProcesses") or [] if each.pid != os.getpid()]:
        yield problem("in-use", gpu=gpu, more=", ".join(others))
