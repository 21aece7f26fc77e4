"""Advice on settings: from what it is, when it speaks, and that a run with it ends with the same bits as without.

What a measurement gives depends on the machine, so the tests move the bound above which a gain is worth a line.
"""

import re
from pathlib import Path

import pytest

from rankup.group import group
from tests.rigs.fork_server import Forks
from tests.rigs.jobs import result
from tests.rigs.recording_workload import records
from train import loop
from train.data.samples import TensorSamples
from train.run import advice
from train.run.advice import on_setting, on_workers

# With all that the measurement could change: random numbers, and the buffers of batch norms
TRAIN = ("train", "--dataset", "fake", "--fake-samples", "256", "--batch-size", "16", "--limit-eval", "16",
         "--tensorboard=false", "--image-size", "32", "--model", "mobilenet_v3_small", "--dropout", "0.2")
MEASURED = r"\d[\d.]* ms"


def test_a_setting_is_advised_by_what_it_gains() -> None:
    (line,) = on_setting("--x", "It rounds.", {"own": 1.2345, "faster": 0.0123456}, "faster")
    assert line == (
        "--x would make forward and backward 100.0 times as fast here (measured: 12.3 ms in place of 1234.5 ms). "
        "It rounds."
    )
    assert not list(on_setting("--precision bf16", "", {"own": 0.01, "bf16": 0.0095}, "bf16"))
    assert not list(on_setting("--precision bf16", "", {"own": 0.01}, "bf16"))


@pytest.mark.parametrize(("load_s", "free", "wanted"), [
    (0.06, 8, 2),  # 60 ms to prepare for 40 ms of computing
    (0.36, 3, 3),  # nine would be enough
    (0.36, 0, None),
    (0.002, 8, None),
])
def test_workers_are_advised_where_batches_take_long_and_cpus_are_free(
    load_s: float, free: int, wanted: int | None
) -> None:
    found = list(on_workers(load_s=load_s, pass_s=0.04, free=free))
    assert [re.findall(r"--num-workers (\d+) may gain", line) for line in found] == ([[str(wanted)]] if wanted else [])


def always() -> None:
    """In the process of a rank: everything is worth a line, on a CPU that has bf16, beside idle ones."""
    loop.LEAST_STEPS, advice.LEAST_GAIN, advice.LONGEST_S = 10, 1e-9, 3600.0
    advice.has_bf16 = lambda device: True
    group.cpu_quota = lambda: 4.0


def train(forks: Forks, run: Path, *arguments: str, world_size: int = 1, preload: str = "always") -> list[str]:
    """What was advised."""
    output = forks.ends(*TRAIN, "--name", run.name, "--run-dir", run.parent, *arguments, world_size=world_size,
                        preload=f"{__name__}:{preload}")
    return re.findall(r"advice: (.*)", output)


@pytest.mark.parametrize("world_size", [1, 2])
def test_advice_is_measured_and_changes_no_bit(forks: Forks, tmp_path: Path, world_size: int) -> None:
    lines = train(forks, tmp_path / "with", "--max-steps", "10", world_size=world_size)
    threads = 4 // world_size
    assert len(lines) == 2, lines
    for line, setting in zip(lines, ("--precision bf16", f"--num-threads {threads}"), strict=True):
        assert re.fullmatch(
            rf"{setting} would make forward and backward [\d.]+ times as fast here \(measured: {MEASURED} in place of "
            rf"{MEASURED}\)\. .*", line,
        )
    assert not train(forks, tmp_path / "without", "--max-steps", "10", "--no-advice", world_size=world_size)
    assert result(tmp_path / "with")["digest"] == result(tmp_path / "without")["digest"]
    # The rest of the run, and runs that are over before it could help, hear nothing
    assert not train(forks, tmp_path / "with", "--max-steps", "12", world_size=world_size)
    assert not train(forks, tmp_path / "short", "--max-steps", "5", world_size=world_size)


def from_files() -> None:
    always()
    TensorSamples.in_memory = False


def test_data_that_are_waited_for_are_a_reason_for_workers(forks: Forks, tmp_path: Path) -> None:
    more = ("--max-steps", "10", "--precision", "bf16")
    # Nothing to advise: no CPU is idle
    assert not train(forks, tmp_path / "busy", *more, "--num-threads", "4", preload="from_files")
    line = train(forks, tmp_path / "run", *more, preload="from_files")[0]
    assert re.match(r"--num-workers 1 may gain up to [\d.]+x here \(measured: preparing a batch takes ", line)


def unmeasurable() -> None:
    always()
    advice._seconds_of_a_pass = lambda *given: 1 / 0


def test_model_that_cannot_be_measured_trains_on(forks: Forks, tmp_path: Path) -> None:
    assert not train(forks, tmp_path / "run", "--max-steps", "10", preload="unmeasurable")


def test_code_of_others_is_not_run_on_one_rank_of_several(forks: Forks, tmp_path: Path) -> None:
    """Its loss may exchange something with the other ranks, which would wait for each other for ever."""
    own = ("--workload", "tests.rigs.recording_workload:build", "--options.record", str(tmp_path / "record"),
           "--max-steps", "10")
    assert not train(forks, tmp_path / "run", *own, world_size=2)
    losses = records(tmp_path / "record", "loss")
    assert [len(rank) for rank in losses] == [11, 11]  # the warm-up's, and one a step
