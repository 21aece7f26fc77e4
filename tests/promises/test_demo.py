"""`make demo` starts two torchrun agents on loopback. If one agent fails, no process stays behind."""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rankup.places.files import write_json
from tests.rigs.jobs import ROOT, Job, ended, environment, metrics, result, start, status, wait_for

TINY = ["--dataset", "digits", "--model", "mlp", "--epochs", "1", "--batch-size", "64", "--step-timeout-s", "60"]
ENDLESS = [*TINY, "--epochs", "100000"]


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the files that the demo needs. All tests share it, because four processes compile each new copy."""
    folder = tmp_path_factory.mktemp("clone")
    shutil.copy(ROOT / "Makefile", folder)
    for name in ("rankup", "train"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.fixture
def clone(copied: Path) -> Iterator[Path]:
    """The copy of the project, with an empty runs/."""
    yield copied
    for name in ("runs", "bin"):
        shutil.rmtree(copied / name, ignore_errors=True)


@contextlib.contextmanager
def endless(clone: Path, *, trained: int) -> Iterator[Job]:
    """Start a demo that never finishes. Yield its job once metrics.jsonl has more than `trained` bytes."""
    # torchrun itself may warn
    env = {
        "PYTHONPATH": str(clone),
        "PYTHONWARNINGS": "",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    metrics = clone / "runs/demo/metrics.jsonl"
    with ended(start("bash", clone / "train/demo.sh", *ENDLESS, env=env, cwd=clone)) as job:
        # The line "ready after" would be too early: before the first step there is nothing to save
        wait_for("steps", lambda: metrics.exists() and metrics.stat().st_size > trained, process=job.processes[0])
        yield job


def run_with_torchrun(clone: Path, script: str) -> "subprocess.CompletedProcess[str]":
    """Run the demo with this shell script in place of torchrun."""
    fake = clone / "bin/torchrun"
    fake.parent.mkdir()
    fake.write_text(f"#!/bin/sh\n{script}\n")
    fake.chmod(0o755)
    env = environment({"PYTHONPATH": str(clone), "PYTHONWARNINGS": ""})
    env["PATH"] = f"{fake.parent}:{Path(sys.executable).parent}:{env['PATH']}"
    return subprocess.run(
        ["bash", "train/demo.sh", *TINY], cwd=clone, env=env, timeout=240, capture_output=True, text=True
    )


def tree_of(job: Job) -> list[psutil.Process]:
    return psutil.Process(job.processes[0].pid).children(recursive=True)


def agents_of(job: Job) -> dict[str, psutil.Process]:
    """Return the two agents by node rank."""
    found = {}
    for child in tree_of(job):
        with contextlib.suppress(psutil.NoSuchProcess):  # demo.sh's own `sleep` may have ended
            words = child.cmdline()
            if "--node-rank" in words:
                found[words[words.index("--node-rank") + 1]] = child
    return found


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_demo_trains_fashion_mnist_to_90_percent_in_2_epochs_and_ends_with_the_table(clone: Path) -> None:
    """Run `make demo` in the user's own venv. Its settings are the defaults, except for the third epoch. It reached
    0.904. test_parity.py tests that two agents give the weights of two ranks started by hand."""
    env = {"PYTHONPATH": str(clone), "PYTHONWARNINGS": "", "MAKEFLAGS": "", "MAKELEVEL": ""}
    words = ("make", "demo", f"VENV={sys.prefix}", "ARGS=")  # not the ARGS that `make unit` passes to pytest
    with ended(start(*words, env=env, cwd=clone)) as job:
        assert job.wait(2000) == [0], job.output
    assert "data   fashion-mnist, 60,000 + 10,000 samples" in job.output
    shown = result(clone / "runs/demo")
    rows = ("accuracy", "images/s", "seconds", "world size      2", "outputs         runs/demo/", shown["digest"][:16])
    assert [row for row in rows if row not in job.output] == []
    evaluations = [line["eval/accuracy"] for line in metrics(clone / "runs/demo") if "eval/accuracy" in line]
    assert len(evaluations) == 2
    assert evaluations[-1] >= 0.90
    assert shown["metrics"]["accuracy"] == evaluations[-1]


@pytest.mark.parametrize(("state", "fresh"), [("finished", True), ("stopped", False), ("failed", False)])
def test_demo_starts_fresh_only_after_a_run_that_finished(clone: Path, state: str, fresh: bool) -> None:
    write_json(clone / "runs/demo/status.json", {"state": state})
    ran = run_with_torchrun(clone, 'echo "$@"')
    assert ran.returncode == 0
    assert ran.stdout.count("--fresh") == (2 if fresh else 0)


def test_demo_saves_when_interrupted_then_resumes_and_fails_when_an_agent_is_killed(clone: Path) -> None:
    """The signal is that of Ctrl-C or of a terminal that closes. The signal and the killed agent are random."""
    with endless(clone, trained=0) as demo:
        os.killpg(demo.processes[0].pid, random.choice((signal.SIGINT, signal.SIGHUP)))
        assert demo.wait() != [0]
    assert "SIGTERM: saved at step" in demo.output
    summary = status(clone / "runs/demo")
    assert (summary["state"], [end["code"] for end in summary["ranks"].values()]) == ("stopped", [143, 143])
    assert "resumed from step-" not in demo.output
    with endless(clone, trained=(clone / "runs/demo/metrics.jsonl").stat().st_size) as demo:
        tree, node = tree_of(demo), random.randrange(2)
        agents = agents_of(demo)
        assert sorted(agents) == ["0", "1"]
        agents[str(node)].kill()
        assert demo.wait()[0] not in (0, None), demo.output
    assert "resumed from step-" in demo.output
    assert f"rank {node}" in demo.output
    assert psutil.wait_procs(tree, timeout=60)[1] == []


def test_demo_fails_when_an_agent_cannot_start(clone: Path) -> None:
    """Otherwise the other agent would wait a quarter of an hour."""
    ran = run_with_torchrun(clone, f'[ "$4" = 1 ] && exit 7; exec {Path(sys.executable).parent}/torchrun "$@"')
    assert ran.returncode not in (0, None), ran.stdout
