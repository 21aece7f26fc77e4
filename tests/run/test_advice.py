"""Advice on settings: from what it is, when it speaks, and that a run with it ends with the same bits as without.

What a measurement gives depends on the machine, so the tests move the bound above which a gain is worth a line.
"""

import random
import re
import threading
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn

from rankup.group import group
from rankup.seeds import random_state_kept
from tests.rigs.fork_server import Forks
from tests.rigs.jobs import result
from tests.rigs.recording_workload import records
from train.config import Config
from train.data import TensorSamples
from train.run import advice
from train.run.advice import on_setting, on_workers
from train.workloads import Workload

# With all that the measurement could change: random numbers, and the buffers of batch norms
TRAIN = ("train", "--dataset", "fake", "--fake-samples", "256", "--batch-size", "16", "--limit-eval", "16",
         "--tensorboard=false", "--image-size", "32", "--model", "mobilenet_v3_small", "--dropout", "0.2")
MEASURED = r"\d[\d.]* m?s"  # seconds, where more threads than CPUs meet a busy machine


# Lines ----------------------------------------------------------------------------------------------------------------


def test_a_setting_is_advised_by_what_whole_steps_would_gain() -> None:
    """Forward and backward get four times as fast, the other half of the step stays as long as it is."""
    (line,) = on_setting("--precision bf16", "It rounds.", 0.02, {"own": 0.01, "bf16": 0.0025}, "bf16")
    assert line == (
        "--precision bf16 would gain 1.6x here (measured: forward and backward in 2.5 ms in place of 10 ms, in steps "
        "of 20 ms). It rounds."
    )
    assert not list(on_setting("--precision bf16", "", 0.02, {"own": 0.01, "bf16": 0.009}, "bf16"))
    (line,) = on_setting("--x", "y", 12.0, {"own": 1.2345, "faster": 0.0123456}, "faster")
    assert "forward and backward in 12.3 ms in place of 1.23 s, " in line
    assert not list(on_setting("--precision bf16", "", 0.01, {"own": 0.01, "bf16": 0.02}, "bf16"))


@pytest.mark.parametrize(
    ("num_workers", "wait_s", "free", "wanted"),
    [
        (0, 0.06, 8, 2),  # 60 ms to prepare for 40 ms of computing
        (0, 0.09, 3, 3),  # nine would be enough
        (0, 0.09, 0, None),
        (0, 0.005, 8, None),
        (2, 0.05, 8, 4),
        (2, 0.0, 8, None),
    ],
)
def test_workers_are_advised_where_steps_wait_for_data_and_cpus_are_free(
    num_workers: int, wait_s: float, free: int, wanted: int | None
) -> None:
    found = list(on_workers(num_workers, step_s=0.1, wait_s=wait_s, free=free))
    assert [re.findall(r"--num-workers (\d+) may gain", line) for line in found] == ([[str(wanted)]] if wanted else [])


# Runs -----------------------------------------------------------------------------------------------------------------


def always() -> None:
    """In the process of a rank: everything is worth a line, on a CPU that has bf16, beside idle ones."""
    advice.LEAST_GAIN = 1e-9
    advice.has_bf16 = lambda device: True
    group.cpu_quota = lambda: 6.0


def train(forks: Forks, run: Path, *arguments: str, preload: str = "always", world_size: int = 1) -> list[str]:
    """What was advised."""
    output = forks.ends(
        *TRAIN, "--name", run.name, "--run-dir", run.parent, *arguments, world_size=world_size,
        preload=f"tests.run.test_advice:{preload}",
    )
    return re.findall(r"advice: (.*)", output)


@pytest.mark.parametrize("world_size", [1, 2])
def test_advice_is_measured_and_changes_no_bit(forks: Forks, tmp_path: Path, world_size: int) -> None:
    lines = train(forks, tmp_path / "with", "--max-steps", "24", world_size=world_size)
    threads = 6 // world_size
    assert len(lines) == 2, lines
    for line, setting in zip(lines, ("--precision bf16", f"--num-threads {threads}"), strict=True):
        assert re.fullmatch(
            rf"{setting} would gain [\d.]+x here \(measured: forward and backward in {MEASURED} in place of "
            rf"{MEASURED}, in steps of {MEASURED}\)\. .*", line,
        )
    assert not train(forks, tmp_path / "without", "--max-steps", "24", "--no-advice", world_size=world_size)
    assert result(tmp_path / "with")["digest"] == result(tmp_path / "without")["digest"]
    # The rest of the run, and runs that are over before it could help, hear nothing
    assert not train(forks, tmp_path / "with", "--max-steps", "48", world_size=world_size)
    assert not train(forks, tmp_path / "short", "--max-steps", "20", world_size=world_size)


def test_advice_on_what_is_set_already_is_not_given(forks: Forks, tmp_path: Path) -> None:
    """Bounded by what the machine has, too: nothing is said of more threads than CPUs."""
    lines = train(forks, tmp_path / "run", "--max-steps", "24", "--precision", "bf16", "--num-threads", "6")
    assert not lines


def test_data_that_are_waited_for_are_a_reason_for_workers(forks: Forks, tmp_path: Path) -> None:
    lines = train(forks, tmp_path / "run", "--max-steps", "24", "--in-memory", "never")
    assert re.match(r"--num-workers \d may gain up to [\d.]+x here: steps wait \d+% of their time for data", lines[0])


def locked(config: Config) -> Workload:
    """A workload whose model can't be copied."""
    model = nn.Linear(4, 2)
    model.lock = threading.Lock()  # type: ignore[assignment]
    samples = TensorSamples(torch.randn(64, 4), torch.zeros(64, dtype=torch.int64))
    return Workload(
        model=model, train=samples, evaluation=samples,
        loss=lambda model, batch: model(batch[0]).square().mean(),
        evaluate=lambda model, batch: {"count": torch.tensor(len(batch[0]))},
    )


def test_model_that_cannot_be_measured_trains_on(forks: Forks, tmp_path: Path) -> None:
    own = ("--workload", "tests.run.test_advice:locked", "--batch-size", "8", "--max-steps", "24")
    assert not train(forks, tmp_path / "run", *own)


def test_code_of_others_is_not_run_on_one_rank_of_several(forks: Forks, tmp_path: Path) -> None:
    """Its loss may exchange something with the other ranks, which would wait for each other for ever."""
    own = ("--workload", "tests.rigs.recording_workload:build", "--options.record", str(tmp_path / "record"),
           "--max-steps", "24")
    assert not train(forks, tmp_path / "run", *own, world_size=2)
    losses = records(tmp_path / "record", "loss")
    assert [len(rank) for rank in losses] == [25, 25]  # the warm-up's, and one a step


# What it needs --------------------------------------------------------------------------------------------------------


def test_random_state_is_kept() -> None:
    def draw() -> tuple[float, ...]:
        return float(torch.rand(())), random.random(), float(numpy.random.rand())

    torch.manual_seed(1)
    random.seed(1)
    numpy.random.seed(1)
    with random_state_kept(torch.device("cpu")):
        first = draw()
    assert draw() == first

