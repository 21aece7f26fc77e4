"""`job.log` reduces what each rank has seen, and its lines survive a lost rank. One rank alone can't log."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.job.test_loop import ran, said
from tests.rigs.fork_server import Forks
from tests.rigs.jobs import metrics

REDUCES = """
import os, signal, sys, torch, rankup

job, count = rankup.init("run", tensorboard=False, log_every_steps=2), {"n": 0, "best": 0.0}
job.track(count=count)
for epoch in job.epochs(2):
    for x in job.batches([1.0] * 4):
        with job.step(loss=torch.tensor(x)):
            count["n"] += 1
        if job.step_number == 5 and job.rank == int(os.environ.get("DIE", -1)) and not os.path.exists("died"):
            open("died", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
    seen = [*job.eval_batches(range(10 + epoch))]  # rank 0 gets four samples, rank 2 only three
    right = sum(x % 3 == 0 for x in seen)
    result = job.log(accuracy=(torch.tensor(right), len(seen)), odd=torch.tensor(float(job.rank)), same=0.1)
    with job.change():
        count["best"] = max(count["best"], result["accuracy"])
    job.log(prefix="test", accuracy=(job.rank, 0))
if job.is_main:
    print("digest", count, result)
job.finish()
"""


def evaluations(folder: Path) -> list[dict[str, Any]]:
    lines = [{name: value for name, value in line.items() if name != "time"} for line in metrics(folder / "run")]
    return [line for line in lines if not any(name.startswith("train/") for name in line)]


@pytest.mark.parametrize("die", [0, 2])
def test_log_sums_pairs_averages_numbers_and_loses_no_line(
    die: int, forks: Forks, tmp_path: Path
) -> None:
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    whole = ran(forks, tmp_path / "whole", REDUCES, ranks=3)
    (tmp_path / "killed" / "script.py").write_text(REDUCES)
    killed = forks.ends("launch", "--nproc=3", "script.py", cwds=[tmp_path / "killed"], env={"DIE": str(die)})
    assert "no finished step was lost" in killed
    assert said(killed) == said(whole) == str({"n": 8, "best": 0.4}) + " " + str(
        {"accuracy": 4 / 11, "odd": 1.0, "same": 0.1}
    )
    assert evaluations(tmp_path / "whole") == evaluations(tmp_path / "killed") == [
        {"step": step, **values} for step, right in ((4, 0.4), (8, 4 / 11))
        for values in ({"eval/accuracy": right, "eval/odd": 1.0, "eval/same": 0.1}, {"test/accuracy": None})
    ]
    (state,) = (tmp_path / "killed").glob("run/checkpoints/step-00000008/state.json")
    assert json.loads(state.read_text())["metrics"].keys() == {
        "eval/accuracy", "eval/odd", "eval/same", "test/accuracy"
    }


@pytest.mark.parametrize(("rank", "when"), [(0, "last"), (2, "step")])
def test_log_on_one_rank_alone_is_refused_before_another_step(
    rank: int, when: str, forks: Forks, tmp_path: Path
) -> None:
    """The other ranks wait for the logging rank in a save, or in the exchange of a step's values."""
    output = ran(forks, tmp_path, f"""
import rankup
job, count = rankup.init("run", log_every_steps=4), {{"n": 0}}
job.track(count=count)
def log(now):
    if now == "{when}" and job.rank == {rank}:
        job.log(accuracy=0.5)
for epoch in job.epochs(2):
    for x in job.batches([1] * 10):
        with job.step(loss=x):
            count["n"] += 1
        print("step", job.step_number)
        if job.step_number == 11:
            log("step")
log("last")
job.finish()
""", ranks=3, code=2)
    refused = rf"error: log: job.log must be called on all ranks, got a call on rank {rank} \(\S+\) while rank \d "
    assert len(re.findall(refused, output)) == 1, output
    assert "Call it on all ranks, not below `if job.is_main`" in output
    assert not any("eval/accuracy" in line for line in metrics(tmp_path / "run"))


@pytest.mark.parametrize(("call", "why"), [
    ("job.log(prefix='train', x=1)", 'prefix must be a word other than "train" and "job", got "train"'),
    ("job.log(prefix=3, x=1)", 'prefix must be a word other than "train" and "job", got "3"'),
    ("job.log(x=10**400)", "job.log: x must be a number, got int"),
    ("import torch\njob.log(x=torch.tensor(1j))", "job.log: x must be a number, got Tensor"),
    ("job.log(**{f'x{job.rank}': 1})", "the names must be the same on all ranks, got [0, 'eval'] ['x0'] on rank 0"),
    ("job.log(x=(1, 2) if job.rank else 1)", "each as a number or as a pair"),
    ("job.log(x=(1, 2, 3))", "job.log: x must be a number, got tuple"),
])
def test_log_of_other_values_on_each_rank_is_refused(call: str, why: str, forks: Forks, tmp_path: Path) -> None:
    assert why in ran(forks, tmp_path, f"import rankup\njob = rankup.init('run')\n{call}\n", ranks=2, code=2)
