"""`make compare` lists the variants that ran and those that could not, with the reason, and writes its files."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.compare import main, sum_up

Compare = Callable[..., dict]


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Compare:
    def run(*words: str) -> dict:
        line = ("compare.py", "--repeats", "1", "--output", str(tmp_path), "--dataset", "digits", *words)
        monkeypatch.setattr("sys.argv", [*line])
        main()
        found = json.loads((tmp_path / "compare.json").read_text())
        assert capsys.readouterr().out.count("\n| ") == len(found["variants"]) + 2  # with the header
        return found

    return run


def test_variants_of_other_launchers_are_compared(compare: Compare, tmp_path: Path) -> None:
    if shutil.which("mpirun") is None:
        pytest.skip("no mpirun here: apt install openmpi-bin")
    chosen = ["ddp-torchrun", "ddp-mpirun"]
    found = compare("--only", ",".join(chosen), "--steps", "3", "--model", "mlp")
    assert (found["missing"], found["unit"]) == ({}, "images")
    assert [run["world_size"] for run in found["runs"]] == [2, 2]
    assert len({run["digest"] for run in found["runs"]}) == 1
    assert all(len(run["step_ms"]) == 2 for run in found["runs"])
    assert all(f">{name}</text>" in (tmp_path / "compare.svg").read_text() for name in chosen)


def test_variant_that_cannot_run_or_fails_is_listed_with_its_reason(
    compare: Compare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = compare("--only", "none,ddp-mpirun", "--batch-size", "5000")
    assert found["variants"] == {}
    assert found["missing"]["ddp-mpirun"] == "No mpirun of Open MPI. On Debian and Ubuntu: sudo apt install openmpi-bin"
    assert "batch_size must be at most the number of training samples" in found["missing"]["none"]


def test_comparison_has_the_medians_of_its_runs() -> None:
    def run(step_ms: list[float], per_s: float, variant: str = "ddp") -> dict:
        return {"variant": variant, "per_s": per_s, "step_ms": step_ms, "peak_memory_mb": 7, "accuracy": 0.5}

    runs = [run([100] * 10, 10), run([300] * 9 + [5000], 30), run([200] * 10, 20), run([1000], 40, variant="none")]
    rows = sum_up(runs)
    assert (rows["ddp"]["runs"], rows["ddp"]["per_s"]) == (3, 20)
    assert (rows["ddp"]["median_ms"], rows["ddp"]["p95_ms"]) == (200, 300)
    assert (rows["none"]["relative"], rows["ddp"]["relative"]) == (1, 0.5)
    assert sum_up(runs[:3])["ddp"]["relative"] is None
