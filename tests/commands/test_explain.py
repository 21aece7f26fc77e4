"""What `explain` finds in the lines of logs.

The texts are real: they were recorded from small jobs of plain torch, or known_faults.toml quotes them from reports.
test_explain_own.py has the output of our own program.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rankup.explain import diagnose_files, format_report
from rankup.explain.diagnosis import MAX_UNKNOWN, diagnose
from rankup.explain.faults import FAULTS, HARMLESS, Fault
from rankup.explain.logs import MAX_SEEN
from tests.rigs.jobs import ROOT, environment

LOGS = Path(__file__).parent / "logs"


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fault_is_found_in_its_own_example(fault: Fault) -> None:
    beside = [] if not fault.doubtful else ["RuntimeError: Rank 1 failed to pass monitoredBarrier in 2000 ms"]
    found = [diagnosis for diagnosis in diagnose([fault.example, *beside]) if diagnosis.line == 1]
    assert [diagnosis.name for diagnosis in found] == [fault.name]
    assert found[0].harmless == (fault.order == HARMLESS)
    assert found[0].remedy or found[0].harmless
    assert fault.order in (1, 2, 3, 4, 5, 6, 9)
    assert not re.search(r"[{}]", found[0].title + found[0].why + found[0].remedy)


def test_known_faults_mention_no_setting_of_this_program() -> None:
    ours = r"this program|train:|slurm/|docker/|k8s/|--(?:run-dir|num-workers|batch-size|device|backend|data-dir)\b"
    assert not [fault.name for fault in FAULTS if re.search(ours, fault.title + fault.why + fault.remedy)]


def test_required_words_of_a_fault_hide_no_match_of_its_pattern() -> None:
    lines = [line for path in LOGS.glob("*.log") for line in path.read_text().splitlines()]
    lines += [fault.example for fault in FAULTS]
    for fault in FAULTS:
        matched = [line for line in lines if fault.pattern.pattern and fault.pattern.search(line)]
        assert all(any(word in line for word in fault.contains) for line in matched), fault.name


def test_doubtful_line_is_harmless_unless_there_is_a_failure() -> None:
    warning = "[W1121 10:02:33 socket.cpp:764] [c10d] The IPv6 network addresses of (node0, 29400) cannot be retrieved"
    assert [diagnosis.harmless for diagnosis in diagnose([warning])] == [True]
    failure = "torch.distributed.DistNetworkError: The client socket has timed out after 4000ms while trying to "
    both = diagnose([warning, f"{failure}connect to (node0, 29400)."])
    assert [diagnosis.harmless for diagnosis in both] == [False, False]


OUCH = "CUDA out of memory"


def test_explain_survives_long_lines_and_bytes_that_are_no_text(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    log.write_bytes(b"\xff\xfe\x00" + b"x" * 3_000_000 + b"\n" + OUCH.encode() + b" \xff" * 1000 + b"\n")
    (found,) = diagnose_files([log])
    assert found.name == "cuda-memory"
    assert len(found.seen) <= MAX_SEEN


def test_repeated_line_gives_one_finding() -> None:
    (found,) = diagnose(OUCH for _ in range(10_000))
    assert found.line == 1


def test_network_of_nccl_is_reported_as_harmless() -> None:
    """These are the lines of a pod without its EFA devices."""
    found = diagnose(["h:152:386 [0] nccl_net_ofi_init_v6():166 NCCL WARN NET/OFI Initializing plugin failed",
                      "h:152:386 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.4.51<0>",
                      "h:152:386 [0] NCCL INFO Using network Socket"])
    assert {(diagnosis.name, diagnosis.harmless) for diagnosis in found} == {
        ("nccl-efa-failed", True), ("nccl-sockets", True)}
    report = format_report(found)
    assert report.startswith("nothing wrong was found")
    assert "NCCL uses TCP sockets between nodes" in report


def test_many_different_exceptions_are_bounded_and_hide_no_other_fault() -> None:
    begin, out = "[rank0]: Traceback (most recent call last):", f"[rank1]: torch.OutOfMemoryError: {OUCH}. Tried"
    lines = [line for n in range(3000) for line in (begin, f"[rank0]: KeyError: {n}", f"[rank0]: step {n} loss 0.1")]
    assert len(diagnose(line for line in lines if "loss" not in line)) == MAX_UNKNOWN
    assert diagnose([*lines, "[rank1]: Traceback (most recent call last):", out])[0].name == "cuda-memory"
    assert [each.seen for each in diagnose([*lines, begin, "[rank0]: OSError: fatal"])] == ["OSError: fatal"]


def test_explain_reads_a_file_and_standard_input(tmp_path: Path) -> None:
    def explain(*words: str, stdin: Path | None = None) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "train.main", "explain", *words]
        with open(stdin or os.devnull) as file:
            return subprocess.run(
                command, env=environment(), cwd=ROOT, stdin=file, capture_output=True, text=True, timeout=300
            )

    log, fine = tmp_path / "log", tmp_path / "fine"
    log.write_text(f"[node0 r0/2] step 5\n[rank1]: torch.OutOfMemoryError: {OUCH}. Tried to allocate 2.00 GiB.\n")
    done = explain(str(log))
    assert (done.returncode, done.stderr) == (20, "")
    assert "rank 1" in done.stdout
    assert "\n  fix   " in done.stdout
    piped = explain("-", "--json", stdin=log)
    assert (piped.returncode, json.loads(piped.stdout)[0]["rank"]) == (20, 1)
    fine.write_text("[node0 r0/2] step 5\n")
    assert explain(str(fine)).returncode == 0
    assert explain(str(fine), str(log)).returncode == 20
    missing = explain(str(tmp_path / "none"))
    assert (missing.returncode, missing.stdout) == (2, "")
    assert f"explain needs a file or folder that it can read, got {tmp_path / 'none'}: " in missing.stderr
