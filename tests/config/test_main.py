"""The accuracy that shipped configurations reach. tests/workloads/test_workloads.py tests starts of the program."""

from pathlib import Path

import pytest

from tests.rigs.fork_server import Forks
from tests.rigs.jobs import ROOT, result


# tests/promises/test_demo.py tests the defaults
@pytest.mark.parametrize(("file", "steps", "accuracy"), [("tiny", 22 * 5, 0.95), ("digits", 22 * 20, 0.97)])
def test_shipped_configurations_learn_the_digits(
    forks: Forks, tmp_path: Path, file: str, steps: int, accuracy: float
) -> None:
    """Two ranks reached 0.972 with tiny and 0.989 with digits. One of the 359 test images counts 0.003."""
    forks.ends(
        "train", "--config", ROOT / f"train/configs/{file}.yaml", "--run-dir", tmp_path, world_size=2, timeout_s=800
    )
    found = result(next(tmp_path.glob("*/result.json")).parent)
    assert found["step"] == steps
    assert found["metrics"]["accuracy"] >= accuracy
