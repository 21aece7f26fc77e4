"""The doctor checks whether one machine, or a group of machines, is fit to train. No torch here.

This file has the findings, the verdict that follows from them, the report, and the checks of one machine: limits,
memory, disks. `stages` runs all checks.
"""

import contextlib
import json
import logging
import math
import os
import shutil
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

from rankup.agent.logs import host_name
from rankup.agent.operators import TOO_LATE, run
from rankup.agent.processes import cpu_quota, memory, oom_kills, within
from rankup.env.rank_env import holders, ranges
from rankup.places.files import write_json

OK, WARNING, INCOMPLETE, UNFIT = "ok", "warning", "incomplete", "unfit"
# Levels from good to bad. A check that could not be completed is worse than a warning, because it might have failed. A
# certain fault is worse than both.
CODES = {OK: 0, WARNING: 10, INCOMPLETE: 30, UNFIT: 20}
VERDICTS = {0: "fit to train", 10: "fit to train, with warnings", 20: "not fit to train", 30: "could not be completed"}
_SHOWN = {OK: "ok", WARNING: "WARNING", INCOMPLETE: "NOT DONE", UNFIT: "NOT FIT"}
MIB = 2**20
LEAST_CPU = 0.75  # CPUs per thread. Threads of rankup sometimes wait, so slightly less than one CPU costs no time
LEAST_MEMORY = 1024 * MIB  # per rank; torch and the smallest model take about half of it
LEAST_SHM, SHM_PER_WORKER = 32 * MIB, 32 * MIB
LEAST_DISK = 1024 * MIB  # a few checkpoints of a medium-sized model
DISK_S = 30.0  # limit for the disk check, because a network disk may never answer
GPU_S = 30.0  # limit for nvidia-smi, which loads the driver if nothing has


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check saw, in which stage, on which host. A warning or worse also says why it matters and what to do."""

    stage: str
    level: str
    seen: str
    why: str = ""
    remedy: str = ""
    host: str = field(default_factory=host_name)

    def text(self, who: str = "") -> str:
        """Return the finding for people, in one to three lines. `who`: a prefix that names the ranks."""
        lines = [f"{_SHOWN[self.level]:8} {self.stage:12} {who}{self.seen}"]
        more = (("why:  ", self.why), ("mend: ", self.remedy))
        lines += [" " * 22 + word + text for word, text in more if text]
        return "\n".join(lines)


TABLE = tomllib.loads(Path(__file__).with_name("findings.toml").read_text(encoding="utf-8"))


def problem(name: str, **words: Any) -> Finding:
    """Return the entry `name` of findings.toml as a finding. `words` fill its braces."""
    entry: dict[str, Any] = {part: text.format_map(words) for part, text in TABLE[name].items()}
    return Finding(**entry)


def exit_code(findings: Iterable[Finding]) -> int:
    """Return 0 for fit, 10 for fit with warnings, 20 for not fit, or 30 for could not be completed."""
    return CODES[max((finding.level for finding in findings), key=list(CODES).index, default=OK)]


class Report:
    """The findings of this rank. `json_out`: print JSON to this file instead of a table. `stage`: the current stage of
    this rank, to which a failure is assigned."""

    def __init__(self, log: logging.Logger, *, rank: int = 0, json_out: TextIO | None = None) -> None:
        self.findings: list[Finding] = []
        self.stage = "environment"
        self._log, self._rank, self._json_out, self._began_s = log, rank, json_out, time.monotonic()

    def add(self, *findings: Finding) -> None:
        """Add findings of this rank, and print them on rank 0."""
        self.findings += findings
        for finding in findings if self._json_out is None else ():
            self._log.info(finding.text())

    def end(self, gather: Callable[[Any], list[Any]] | None = None, path: Path | None = None) -> int:
        """Print the verdict and return its exit code. Without `gather` it is about this rank only. With `gather`, which
        collects a value of every rank, all ranks call this, and rank 0 writes the report to `path`."""
        found = {self._rank: self.findings}
        if gather is not None:
            gathered = gather([asdict(finding) for finding in self.findings])
            found = {rank: [Finding(**each) for each in part] for rank, part in enumerate(gathered)}
        ranks = holders((rank, finding) for rank, part in found.items() for finding in part)
        code = exit_code(ranks)
        if gather is not None and self._rank != 0:
            return code
        seconds = time.monotonic() - self._began_s
        whole = {"verdict": VERDICTS[code], "exit_code": code, "seconds": round(seconds, 2), "findings": [
            {**asdict(each), "ranks": ranks[each]} for each in ranks if each.level != OK or 0 in ranks[each]
        ]}
        if path is not None:
            with contextlib.suppress(OSError):  # `disk` has already reported a disk that can't be written
                write_json(path, whole)
        if self._json_out is not None:
            print(json.dumps(whole), file=self._json_out, flush=True)
            return code
        level = logging.WARNING if self._rank else logging.INFO  # ranks other than 0 log only warnings
        for each in ranks:
            if each.level != OK and ranks[each][0] != 0:  # `add` has already printed the findings of rank 0
                who = "" if gather is None else f"rank {ranges(ranks[each])} on {each.host}: "
                self._log.log(level, each.text(who))
        stages = len({each.stage for each in ranks})
        self._log.log(level, f"doctor: {VERDICTS[code]}: {stages} stages in {seconds:.1f} s")
        return code


# One machine ----------------------------------------------------------------------------------------------------------


def limits(*, ranks: int, threads: int, root: Path = Path("/")) -> Iterator[Finding]:
    """Check the CPUs and the memory that this process may use. A container may limit both.

    `ranks`: the number on this node, with `threads` threads each. `root`: root of the file system, for tests.
    """
    cpus, wanted = cpu_quota(root), ranks * threads
    if wanted > math.ceil(cpus) or wanted * LEAST_CPU > cpus:
        yield problem("cpus", ranks=ranks, threads=threads, cpus=f"{cpus:g}")
    else:
        yield Finding("limits", OK, f"{cpus:g} CPUs for {ranks} x {threads} threads")
    least = min((limit for limit, _ in memory(root)), default=None)
    if least is not None and least < LEAST_MEMORY * ranks:
        yield problem("memory", mib=least / MIB, ranks=ranks)
    # Only with a limit: otherwise the kernel counts kills of any process on the whole machine, at any time
    if least is not None and (killed := oom_kills(root)):
        yield problem("killed", count=killed)


def shared_memory(*, num_workers: int) -> Iterator[Finding]:
    """Check the free space in /dev/shm. DataLoader workers and NCCL's ranks of one node pass data through it."""
    total, _, free = shutil.disk_usage("/dev/shm")
    seen = f"/dev/shm: {free / MIB:.0f} of {total / MIB:.0f} MiB free"
    little = free < LEAST_SHM + num_workers * SHM_PER_WORKER
    yield problem("small-shm", seen=seen) if little else Finding("memory", OK, seen)


def gpus() -> Iterator[Finding]:
    """Check that the driver answers for each GPU of NVIDIA. Needs no torch, and takes no memory of a GPU."""
    if shutil.which("nvidia-smi") is None:
        yield Finding("devices", OK, "no nvidia-smi on this machine")
        return
    code, said = run("nvidia-smi -L", limit_s=GPU_S)
    seen = f"did not answer within {GPU_S:g} s" if code == TOO_LATE else f"ended with {code}: {said}"
    yield problem("lost-gpu", what=seen) if code else Finding("devices", OK, f"nvidia-smi lists every GPU: {said}")


def quick(run_dir: Path, report: "Report", *, num_threads: int, num_workers: int) -> int:
    """Run the checks that need neither torch nor other ranks, for --health-check. Warnings are fit, with code 0."""
    report.add(*limits(ranks=1, threads=num_threads), *shared_memory(num_workers=num_workers))
    seen = within(DISK_S, lambda: [*disk(run_dir)])
    report.add(*(seen or [problem("silent-disk", folder=run_dir, timeout_s=DISK_S)]), *gpus())
    code = report.end()
    return 0 if code == CODES[WARNING] else code


def disk(run_dir: Path) -> Iterator[Finding]:
    """Check that checkpoints can be written into the run's folder: permission and free space."""
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
