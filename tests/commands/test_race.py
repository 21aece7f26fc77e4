"""`make race`: the entrants that need only torch run and train equally, and the table has their speeds.

The laps of Accelerate and Lightning would double the time. Their scripts are also in bench/racers/.
"""

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from bench.race import ENTRANTS, RANKUP, Lap, prepare_data, ratio, table
from bench.racers import shared
from tests.rigs import jobs
from tests.rigs.fork_server import Forks
from tests.rigs.jobs import ROOT

ALONE = [entrant for entrant in ENTRANTS if entrant.script and not entrant.package]


def lap(entrant: str, repeat: int, images_per_s: float) -> Lap:
    return {"entrant": entrant, "precision": "fp32", "processes": 2, "repeat": repeat, "images_per_s": images_per_s,
            "accuracy": 0.875, "loss": 0.5, "command_s": 3.0, "load": 1.0}


def test_race_runs_and_writes_its_results(tmp_path: Path) -> None:
    chosen = ["tutorial", RANKUP]
    line = ["--repeats", "1", "--processes", "1", "--precision", "fp32", "--random"]
    line += ["--warm-up", "10", "--steps", "30"]
    command = [sys.executable, ROOT / "bench/race.py", *line, "--only", *chosen, "--output", tmp_path]
    with jobs.ended(jobs.start(*command)) as job:
        assert job.wait(timeout_s=800) == [0], job.output
    one, other = json.loads((tmp_path / "race.json").read_text())
    assert {one["entrant"], other["entrant"]} == {*chosen}
    assert one["loss"] == pytest.approx(other["loss"], rel=1e-3)
    assert min(one["images_per_s"], other["images_per_s"]) > 0
    text = (tmp_path / "race.md").read_text()
    assert text in job.output
    assert all(f"| {name} |" in text and f"\n- {name}: " in text for name in chosen)


def test_race_entrants_train_equally_on_two_ranks(forks: Forks, tmp_path: Path) -> None:
    """30 steps are more than one epoch of the random images, so the order of the second epoch counts too. Other weights
    or another order would change the first digits of the loss. test_parity.py tests rankup's own two ranks."""
    prepare_data(tmp_path, random=True)
    task = shared.Task(str(tmp_path), 128, 10, 30, "fp32", str(tmp_path / "result.json"), "")
    losses = []
    for entrant in ALONE:
        script, own = ROOT / f"bench/racers/{entrant.script}.py", replace(task, variant=entrant.variant)
        forks.ends(script, json.dumps(asdict(own)), world_size=2, preload="tests.rigs.foreign_scripts:be_script")
        losses.append(json.loads(Path(task.result).read_text())["loss"])
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-3)


def test_race_ratios_are_medians_of_the_ratios_in_each_repeat() -> None:
    # The machine is three times as fast in the second repeat, so medians over all laps would give 1.5
    laps = [lap(RANKUP, 1, 200), lap("Lightning", 1, 100), lap(RANKUP, 2, 600), lap("Lightning", 2, 300)]
    laps += [lap(RANKUP, 3, 150), lap("Lightning", 3, 100)]
    assert ratio(laps, RANKUP, "Lightning") == 2.0
    assert ratio(laps, "nobody", "Lightning") is None
    (row,) = [line for line in table(laps, "fp32") if line.startswith("| Lightning")]
    assert row == "| Lightning | 100 (100 to 300) | 2.00 | 87.5 (87.5 to 87.5) | 3.0 |"
