"""What NVIDIA's driver wrote into the kernel's log: errors of GPUs, each with a number, its Xid.

The log is read by dmesg, else by journalctl. Neither works in most containers, nor for a user without the right; then
there is one note. The numbers: NVIDIA's Xid catalog. A line stays in the log after the GPU was reset, so that no Xid
makes a machine unfit by itself.
"""

import re
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from train.process.findings import NOTE, WARNING, Finding

COMMANDS = (("dmesg",), ("journalctl", "-k", "-b", "-q", "-o", "short-monotonic"))
READ_S = 5.0
# [ 1843.308145] NVRM: Xid (PCI:0000:3b:00): 79, pid=4711, name=python, GPU has fallen off the bus.
XID = re.compile(r"^(?:\[\s*(?P<s>\d+\.\d+)\])?.*NVRM: Xid \((?:PCI:)?(?P<pci>[0-9a-fA-F:]+)[^)]*\): (?P<code>\d+)")
# Those after which NVIDIA's catalog asks for a reset, a restart or a look at the link. What is not here is mostly a
# fault of the program that ran then (13, 31, 43, 45, ...), or was mended already (63, 94)
HARDWARE = {
    48: "an uncorrected memory error", 62: "its power controller halted", 64: "a bad row of memory was not replaced",
    74: "an NVLink error", 79: "it fell off the bus", 95: "an uncontained memory error", 109: "a context switch hung",
    110: "a security fault", 119: "its firmware (GSP) did not answer", 120: "its firmware (GSP) failed",
    136: "an NVLink could not be trained", 140: "an unrecovered memory error", 143: "it could not be initialized",
    **dict.fromkeys(range(144, 151), "an NVLink error"),
}


@dataclass(frozen=True, slots=True)
class Xid:
    """One error. `pci`: such as 0000:3b:00; `age_s`: seconds ago, None where the log does not say."""

    code: int
    pci: str
    age_s: float | None


def findings(stage: str, gpus: Mapping[str, int]) -> Iterator[Finding]:
    """What the log says of this machine's GPUs since it started. `gpus`: their numbers, by their places on the bus."""
    lines = read_log()
    if lines is None:
        yield Finding(stage, NOTE, "the kernel's log can't be read here: errors of the GPUs in it (Xid) are not seen")
        return
    found: dict[tuple[int, str], list[Xid]] = {}
    for xid in xids(lines):
        found.setdefault((xid.code, xid.pci), []).append(xid)
    for (code, pci), same in found.items():
        who = f"GPU {gpus[pci]}" if pci in gpus else f"the GPU at {pci}"
        times = "once" if len(same) == 1 else f"{len(same)} times"
        seen = f"{who}: Xid {code} {times} in the kernel's log{_last(same[-1])}"
        if code in HARDWARE and pci in gpus:
            yield Finding(
                stage, WARNING, f"{seen}: {HARDWARE[code]}", "it was since this machine started, and may come again.",
                "If nobody has reset it since: nvidia-smi -r. If it comes again, take the node out of the job.",
            )
        else:
            yield Finding(stage, NOTE, seen)


def xids(lines: list[str]) -> Iterator[Xid]:
    """The errors in these lines of dmesg or journalctl, in their order."""
    now_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    for line in lines:
        if match := XID.match(line):
            age_s = max(0.0, now_s - float(match["s"])) if match["s"] else None
            yield Xid(int(match["code"]), match["pci"].lower(), age_s)


def read_log() -> list[str] | None:
    """The kernel's log since this machine started; None where nobody here may read it."""
    for command in COMMANDS:
        try:
            done = subprocess.run(command, capture_output=True, timeout=READ_S, check=False)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if done.returncode == 0 and done.stdout:
            return done.stdout.decode(errors="replace").splitlines()
    return None


def _last(xid: Xid) -> str:
    if xid.age_s is None:
        return ""
    return f", last {xid.age_s / 60:.0f} min ago" if xid.age_s < 7200 else f", last {xid.age_s / 3600:.0f} h ago"
