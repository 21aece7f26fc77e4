"""What the configurations that ship reach. How the program is started: tests/workloads/test_workloads.py."""

from pathlib import Path

import pytest

from tests.rigs.fork_server import Forks
from tests.rigs.jobs import ROOT, result


# The defaults: tests/promises/test_demo.py
@pytest.mark.parametrize(("file", "steps", "accuracy"), [("tiny", 22 * 5, 0.95), ("digits", 22 * 20, 0.97)])
def test_configuration_that_ships_learns_the_digits(
    forks: Forks, tmp_path: Path, file: str, steps: int, accuracy: float
) -> None:
    """Two ranks. Measured: tiny 0.972, digits 0.989; a single one of the 359 test images counts 0.003."""
    forks.ends(
        "train", "--config", ROOT / f"train/configs/{file}.yaml", "--run-dir", tmp_path, world_size=2, timeout_s=800
    )
    found = result(next(tmp_path.glob("*/result.json")).parent)
    assert found["step"] == steps
    assert found["metrics"]["accuracy"] >= accuracy
