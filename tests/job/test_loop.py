"""A loop of a user's own keeps the promises: the digest of its weights, whoever starts and whatever ends its ranks."""

import re
import signal
import sys
import time
from pathlib import Path

import pytest

from rankup.observe.status import look
from tests.rigs.jobs import start

SCRIPT = Path(__file__).with_name("loop_script.py")
LAUNCH = [sys.executable, "-m", "rankup", "launch"]
RANKS = 3  # two sum in one order only


def launched(run_dir: Path, *, code: int = 0, ranks: int = RANKS, env: dict[str, str] | None = None) -> str:
    """What the job printed."""
    words = [*LAUNCH, "--nproc", str(ranks), str(SCRIPT), str(run_dir)]
    job = start(*words, env={"PYTHONWARNINGS": "default", **(env or {})}, cwd=run_dir.parent)
    assert job.wait() == [code], job.outputs[0]
    return job.outputs[0]


def digest(output: str) -> str:
    return next(line.split()[1] for line in output.splitlines() if line.startswith("digest "))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    return digest(launched(tmp_path_factory.mktemp("undisturbed") / "run"))


@pytest.mark.parametrize("where", ["1:13", "0:8", "2:24"])
def test_killed_rank_costs_no_finished_step_and_changes_no_bit(undisturbed: str, tmp_path: Path, where: str) -> None:
    output = launched(tmp_path / "run", env={"DIE": f"{where}:{int(signal.SIGKILL)}"})
    assert "no finished step was lost" in output
    assert digest(output) == undisturbed


def test_stopped_job_goes_on_with_the_same_bits_under_torchrun(undisturbed: str, tmp_path: Path) -> None:
    output = launched(tmp_path / "run", code=143, env={"DIE": f"0:5:{int(signal.SIGTERM)}"})
    assert "The same command goes on from it" in output
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    again = start(*torchrun, str(SCRIPT), str(tmp_path / "run"), env={"PYTHONWARNINGS": "default"}, cwd=tmp_path)
    assert again.wait() == [0], again.outputs[0]
    assert "resumed from step-" in again.outputs[0]
    assert digest(again.outputs[0]) == undisturbed


def test_slow_rank_is_named_and_status_has_speed_and_goodput(tmp_path: Path) -> None:
    job = start(*LAUNCH, "--nproc", "2", str(SCRIPT.with_name("slow_script.py")), str(tmp_path / "run"), cwd=tmp_path)
    assert job.wait() == [0], job.outputs[0]
    assert re.search(r"rank 1 \(.*\) is \d+ % slower than the other, since step \d+: compute", job.outputs[0])
    found = look(tmp_path / "run", now=time.time())
    assert (found["state"], found["step"], found["total_steps"], found["unit"]) == ("finished", 100, 100, "steps")
    assert found["per_s"] > 0
    assert found["goodput"]["share"] > 0
    assert found["metrics"].keys() >= {"train/loss", "train/steps_per_s"}
