"""Logs of failed jobs, and what explain says about them.

The texts are real: recorded from small jobs of plain torch, or known_faults.toml quotes them from reports. What our own
program prints: test_explain_own.py.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rankup.explain import advice, diagnose_files, format_report
from rankup.explain.diagnosis import MAX_SEEN, MAX_UNKNOWN, diagnose
from rankup.explain.faults import FOLLOWED, HARMLESS, SUMMARY, Fault, known_faults
from tests.rigs.jobs import ROOT, environment

LOGS = Path(__file__).parent / "logs"


def named(lines: list[str]) -> list[str]:
    return [diagnosis.name for diagnosis in diagnose(lines)]


# The table ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", known_faults(), ids=lambda fault: fault.name)
def test_fault_is_found_in_its_own_example(fault: Fault) -> None:
    beside = [] if not fault.doubtful else ["RuntimeError: Rank 1 failed to pass monitoredBarrier in 2000 ms"]
    found = [diagnosis for diagnosis in diagnose([fault.example, *beside]) if diagnosis.line == 1]
    assert [diagnosis.name for diagnosis in found] == [fault.name]
    assert found[0].harmless == (fault.order == HARMLESS)
    assert found[0].remedy or found[0].harmless
    assert fault.order in (1, 2, 3, 4, 5, 6, 9)
    assert not re.search(r"[{}]", found[0].title + found[0].why + found[0].remedy)


def test_faults_of_anybodys_job_speak_of_no_setting_of_this_program() -> None:
    ours = r"this program|train:|slurm/|docker/|k8s/|--(?:run-dir|num-workers|batch-size|device|backend|data-dir)\b"
    named = [fault.name for fault in known_faults() if re.search(ours, fault.title + fault.why + fault.remedy)]
    assert named == ["unconfirmed"]


def test_strings_that_a_line_must_contain_hide_no_match_of_a_pattern() -> None:
    lines = [line for path in LOGS.glob("*.log") for line in path.read_text().splitlines()]
    lines += [fault.example for fault in known_faults()]
    for fault in known_faults():
        matched = [line for line in lines if fault.pattern and fault.pattern.search(line)]
        assert all(any(word in line for word in fault.contains) for line in matched), fault.name


# What torch said ----------------------------------------------------------------------------------------------

RECORDED = {
    "world-size-too-big": ("clients-missing", None),
    "no-such-name": ("ipv6-name", None),
    "nobody-listens": ("master-unreached", None),
    "port-taken": ("port-in-use", None),
    "duplicate-rank": ("rank-unregistered", 2),
    "no-rank-variable": ("variable-missing", None),
    "no-such-interface": ("interface", None),
    "killed-in-all-reduce": ("killed", 1),
    "exception-on-one-rank": ("", 1),
    "slow-rank": ("collective-timeout", 0),
    "monitored-barrier": ("monitored-barrier", 1),
    "models-differ": ("shapes-differ", 1),
    "nccl-without-gpu": ("no-nccl", None),
    "host-memory": ("host-memory", None),
    "weights-only": ("weights-only", None),
    "truncated-checkpoint": ("truncated-checkpoint", None),
    "empty-checkpoint": ("truncated-checkpoint", None),
    "local-rank-flag": ("local-rank-flag", None),
    "no-user-name": ("uid", None),
}


@pytest.mark.parametrize("case", RECORDED)
def test_recorded_log_has_its_root_first(case: str) -> None:
    first = diagnose_files([LOGS / f"{case}.log"])[0]
    assert (first.name, first.rank) == RECORDED[case]


def test_recorded_logs_all_have_an_expected_root() -> None:
    assert {path.stem for path in LOGS.glob("*.log")} == {*RECORDED, "healthy"}


def test_recorded_healthy_log_has_nothing_wrong() -> None:
    found = diagnose_files([LOGS / "healthy.log"])
    assert all(diagnosis.harmless for diagnosis in found)
    assert format_report(found).startswith("nothing wrong was found")


def test_exception_that_is_not_known_is_quoted_and_not_guessed_at() -> None:
    first, *rest = diagnose_files([LOGS / "exception-on-one-rank.log"])
    assert first.seen == "KeyError: 'image_17'"
    assert "not known" in first.title
    assert {diagnosis.order for diagnosis in rest} == {FOLLOWED, SUMMARY}


def test_every_line_of_the_logs_alone_names_no_other_root() -> None:
    """The patterns are not so wide that they find each other's texts."""
    for case, (name, _) in RECORDED.items():
        found = {diagnosis.name for diagnosis in diagnose_files([LOGS / f"{case}.log"]) if diagnosis.order < FOLLOWED}
        also = {"no-such-name": {"master-unreached"}, "monitored-barrier": {"collective-timeout"}}.get(case, set())
        assert found - also <= {name, ""}, case


# Order --------------------------------------------------------------------------------------------------------

def test_doubtful_sign_alone_is_harmless_and_beside_a_failure_is_not() -> None:
    warning = "[W1121 10:02:33 socket.cpp:764] [c10d] The IPv6 network addresses of (node0, 29400) cannot be retrieved"
    assert [diagnosis.harmless for diagnosis in diagnose([warning])] == [True]
    failure = "torch.distributed.DistNetworkError: The client socket has timed out after 4000ms while trying to "
    both = diagnose([warning, f"{failure}connect to (node0, 29400)."])
    assert [diagnosis.harmless for diagnosis in both] == [False, False]


def test_chained_exception_leaves_an_earlier_one_of_the_same_rank() -> None:
    text = "Traceback (most recent call last):\nKeyError: 'a'\nall is well again\nTraceback (most recent call last):\n"
    text += "KeyError: 'b'\n\nDuring handling of the above exception, another exception occurred:\n\n"
    text += "Traceback (most recent call last):\nValueError: c\n"
    assert [diagnosis.seen for diagnosis in diagnose(text.splitlines())] == ["KeyError: 'a'", "ValueError: c"]


# Who ----------------------------------------------------------------------------------------------------------

OUCH = "CUDA out of memory"


@pytest.mark.parametrize(
    ("line", "rank", "host"),
    [
        (f"[node1 r3/4] {OUCH}", 3, "node1"),
        (f"2026-11-21T10:02:03 gpu-7 r12 {OUCH}", 12, "gpu-7"),
        (f"[default1]:{OUCH}", 1, ""),
        (f"[rank5]: {OUCH}", 5, ""),
        (f"[default0]:[rank8]: {OUCH}", 8, ""),
        (f"1: {OUCH}", 1, ""),
        (f" 2: [node2 r2/4] {OUCH}", 2, "node2"),
        (f"node1  | {OUCH}", None, "node1"),
        (f"\x1b[36mrankup-node1-1  | \x1b[0m[node1 r1/2] {OUCH}", 1, "node1"),
        (f"[pod/ddp-worker-0/pytorch] {OUCH}", None, "ddp-worker-0"),
        (f"2026-11-21T10:02:03.123456Z [pod-a r1/2] {OUCH}", 1, "pod-a"),
        (OUCH, None, ""),
    ],
)
def test_prefix_says_who_wrote_a_line(line: str, rank: int | None, host: str) -> None:
    (found,) = diagnose([line])
    assert (found.rank, found.host, found.seen) == (rank, host, OUCH)


def test_tracebacks_of_ranks_that_mix_are_told_apart() -> None:
    lines = []
    for one, two in zip(
        ["Traceback (most recent call last):", '  File "a.py", line 1', "KeyError: 'a'"],
        ["Traceback (most recent call last):", '  File "b.py", line 2', "OSError: b"],
        strict=True,
    ):
        lines += [f"[n0 r0/2] {one}", f"[n1 r1/2] {two}"]
    assert [(d.rank, d.host, d.seen) for d in diagnose(lines)] == [(0, "n0", "KeyError: 'a'"), (1, "n1", "OSError: b")]


# Files --------------------------------------------------------------------------------------------------------


def test_long_lines_and_bytes_that_are_no_text_do_no_harm(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    log.write_bytes(b"\xff\xfe\x00" + b"x" * 3_000_000 + b"\n" + OUCH.encode() + b" \xff" * 1000 + b"\n")
    (found,) = diagnose_files([log])
    assert found.name == "cuda-memory"
    assert len(found.seen) <= MAX_SEEN


def test_repeated_line_is_one_finding() -> None:
    (found,) = diagnose(OUCH for _ in range(10_000))
    assert (found.line, found.times) == (1, 10_000)


def test_network_that_nccl_took_is_told_and_no_fault() -> None:
    """Lines of real logs, of InfiniBand, EFA and of a pod that was not given its EFA devices."""
    assert named(["h:7:19 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB eth0:10.0.0.1<0>",
                  "h:7:19 [0] NCCL INFO Using network IB"]) == ["nccl-network"]
    fallen_back = ["h:152:386 [0] nccl_net_ofi_init_v6():166 NCCL WARN NET/OFI Initializing plugin failed",
                   "h:152:386 [0] NCCL INFO NET/IB : No device found.",
                   "h:152:386 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.4.51<0>",
                   "h:152:386 [0] NCCL INFO Using network Socket"]
    found = diagnose(fallen_back)
    assert {diagnosis.name for diagnosis in found} == {"nccl-efa-failed", "nccl-sockets"}
    assert all(diagnosis.harmless for diagnosis in found)
    report = format_report(found)
    assert report.startswith("nothing wrong was found")
    assert "NCCL took TCP sockets between nodes" in report


def test_endless_kinds_of_exceptions_are_bounded() -> None:
    text = (f"Traceback (most recent call last):\nKeyError: {number}\n" for number in range(3000))
    assert len(diagnose(line for lines in text for line in lines.splitlines())) == MAX_UNKNOWN


# The command --------------------------------------------------------------------------------------------------


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


def test_advice_is_one_line_and_only_on_what_is_known() -> None:
    known = advice("Traceback (most recent call last):\nRuntimeError: CUDA error: invalid device ordinal")
    assert known.startswith("this is: ")
    assert "\n" not in known
    assert advice("Traceback (most recent call last):\nKeyError: 'x'") == ""
