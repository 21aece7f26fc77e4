"""The doctor on one machine: its output, exit codes and JSON, and the checks that read limits from files."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from rankup.doctor import INCOMPLETE, MIB, OK, UNFIT, WARNING, Finding, exit_code, limits, shared_memory, stages
from tests.rigs.fork_server import Forks
from tests.rigs.jobs import ROOT, environment, free_port, rank_env

# Like a pod whose environment names its rank, but whose peer does not exist
LOST = rank_env(1, 2, free_port())


@pytest.mark.parametrize(("words", "env"), [([], {}), (["--alone"], LOST)])
def test_doctor_alone_checks_the_machine_and_names_what_it_skipped(
    forks: Forks, tmp_path: Path, words: list[str], env: dict[str, str]
) -> None:
    said = forks.ends("doctor", *words, "--run-dir", tmp_path, env=env, preload="tests.rigs.injected_faults:healthy")
    assert "ok       joined       a single process: nothing was checked that needs several ranks" in said
    assert "doctor: fit to train" in said
    (run,) = tmp_path.iterdir()
    assert [path.name for path in run.iterdir()] == ["doctor"]  # no file that training would take for its own
    assert json.loads((run / "doctor" / "report.json").read_text())["exit_code"] == 0


@pytest.mark.parametrize(("script", "threads", "code", "says"), [
    ("echo GPU 0: H200", 1, 0, "ok       devices      nvidia-smi lists every GPU: GPU 0: H200"),
    ("echo GPU 0: H200", 10_000, 0, "doctor: fit to train, with warnings"),
    ("echo Unable to determine the device handle; exit 15", 1, 20, "NOT FIT  devices      nvidia-smi ended with 15"),
])
def test_quick_doctor_needs_no_torch_and_asks_the_driver(
    tmp_path: Path, script: str, threads: int, code: int, says: str
) -> None:
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    words = ("doctor", "--quick", f"--run-dir={tmp_path}/runs", f"--num-threads={threads}")
    line = [sys.executable, "-m", "rankup", *words]
    done = subprocess.run(line, env=environment(env), cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stderr
    assert says in done.stdout + done.stderr


def full_disk() -> None:
    """Preloaded. Let this process print to a full disk."""
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)


def test_doctor_that_prints_to_a_full_disk_fails(forks: Forks, tmp_path: Path) -> None:
    words = ("doctor", "--alone", "--json", f"--run-dir={tmp_path}")
    said = forks.ends(*words, preload=f"{__name__}:full_disk", code=1)
    assert "No space left on device" in said


def test_doctor_under_launch_gives_the_verdict_of_all_ranks(tmp_path: Path) -> None:
    words = f"-m rankup launch --nproc=2 -m rankup doctor --run-dir {tmp_path} --json --num-threads 1000"
    line = [sys.executable, *words.split()]
    done = subprocess.run(line, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 10, done.stderr
    report = json.loads(done.stdout)  # stdout has only the JSON
    assert report["exit_code"] == 10
    # On a shared machine the link may be slow
    warnings = [told for told in report["findings"] if told["level"] == "warning"]
    (finding,) = [told for told in warnings if told["stage"] != "links"]
    assert finding["seen"].startswith("2 x 1000 threads on this node")
    assert finding["ranks"] == [0, 1]


@pytest.mark.parametrize(("env", "what"), [
    ({"RANK": "0", "WORLD_SIZE": "2"}, "but MASTER_ADDR MASTER_PORT are not set"),
    ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
     "RANK must be a whole number from 0 to 1, got '2'."),
])
def test_doctor_reports_an_incomplete_environment(forks: Forks, env: dict[str, str], what: str) -> None:
    said = forks.ends("doctor", env=env, code=20)
    assert what in " ".join(said.split())
    assert "doctor: not fit to train" in said


def test_findings_of_the_doctor_are_all_used_and_have_a_reason() -> None:
    table = tomllib.loads((ROOT / "rankup" / "doctor" / "findings.toml").read_text())
    code = "".join((ROOT / "rankup" / "doctor" / name).read_text() for name in ("__init__.py", "stages.py"))
    assert [name for name, entry in table.items() if f'"{name}"' not in code or not entry["why"]] == []
    assert {entry["level"] for entry in table.values()} == {WARNING, INCOMPLETE, UNFIT}


def test_doctor_refuses_a_folder_that_cannot_be_written(forks: Forks, tmp_path: Path) -> None:
    (tmp_path / "runs").touch()
    said = forks.ends("doctor", "--alone", "--run-dir", tmp_path / "runs", code=20)
    assert "NOT FIT  storage" in said
    assert "doctor: not fit to train: " in said


@pytest.mark.parametrize(("levels", "code"), [
    ([], 0), ([OK], 0), ([OK, WARNING], 10), ([WARNING, INCOMPLETE], 30), ([INCOMPLETE, UNFIT, WARNING], 20),
])
def test_doctor_verdict_is_the_worst_finding(levels: list[str], code: int) -> None:
    """A certain fault outranks a check that could not be made."""
    assert exit_code(Finding("x", level, "") for level in levels) == code


def test_doctor_warns_of_little_memory_and_of_earlier_kills(tmp_path: Path) -> None:
    """They are the causes of exit code 137 without a traceback."""
    for name, text in {"proc/self/cgroup": "0::/\n3:memory:/\n", "sys/fs/cgroup/memory.max": "314572800\n",
                       "sys/fs/cgroup/memory.events": "low 0\noom 3\noom_kill 2\n"}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = limits(ranks=1, threads=1, root=tmp_path)
    assert [finding.seen for finding in found if finding.level == WARNING] == [
        "300 MiB of memory for 1 ranks",
        "processes of this container or job that were killed because memory ran out: 2",
    ]


def test_doctor_wants_more_shared_memory_for_more_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: (64 * MIB, 0, 64 * MIB))
    (few,) = shared_memory(num_workers=1)
    (many,) = shared_memory(num_workers=2)
    assert (few.level, many.level) == (OK, WARNING)


def test_doctor_finds_the_odd_link_among_its_kind() -> None:
    def level(*bandwidths: float) -> str:
        links = [(each, 0, number) for number, each in enumerate(bandwidths)]
        return stages.judge(links, "between nodes", ["node"] * len(links)).level

    assert level(90e6, 90e6, 90e6) == OK
    assert level(90e6, 90e6, 90e6, 15e6) == WARNING
    assert level(9e9, 9e9, 1e9) == OK  # differs much, but is fast
    assert level(1e6) == WARNING


# On a real GPU ------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_doctor_lists_the_gpus_and_refuses_two_ranks_on_one(forks: Forks, tmp_path: Path) -> None:
    words = ("doctor", "--run-dir", tmp_path)
    output = forks.ends(*words, "--alone")
    assert f"{torch.cuda.device_count()} CUDA devices, {torch.cuda.get_device_name(0)}" in " ".join(output.split())
    output = forks.ends(*words, world_size=2, env={"CUDA_VISIBLE_DEVICES": "0"}, code=20)
    assert "must each have a device of their own, got the same GPU" in output
