"""The comparison: what ran, what could not, what is written, and going on after a stop."""

import json
import shutil
from itertools import groupby
from pathlib import Path
from typing import Any

import psutil
import pytest
from PIL import Image

from tests.rigs.fork_server import Forks
from tests.rigs.legible import assert_legible
from train.commands.compare import VARIANTS, _find_obstacle
from train.commands.compare_report import bar_chart, format_comparison, sum_up
from train.main import main
from train.process.figures import COLOUR, WIDTH, draw_bars, new_figure

WITHOUT_GPUS = "tests.commands.test_compare:without_gpus"
LINE = ("compare", "--dataset", "digits", "--model", "mlp", "--max-steps", "4")


def run(step_s: list[float], images: float, variant: str = "ddp") -> dict[str, Any]:
    return {"variant": variant, "repeat": 0, "per_s": images, "step_s": step_s, "epoch_s": 100 / images,
            "peak_memory_mb": 7, "metrics": {"accuracy": 0.5}}


def test_comparison_sums_up_runs_by_their_definition() -> None:
    runs = [run([0.1] * 10, 10), run([0.3] * 9 + [5.0], 30), run([0.2] * 10, 20), run([1.0], 40, variant="none")]
    rows = sum_up(runs, ["none", "ddp"])
    assert (rows["ddp"]["runs"], rows["ddp"]["per_s"], rows["ddp"]["epoch_s"]) == (3, 20, 5)
    assert (rows["ddp"]["step_median_ms"], rows["ddp"]["step_p95_ms"]) == (200, 300)
    assert (rows["none"]["relative"], rows["ddp"]["relative"]) == (1, 0.5)
    assert sum_up(runs, ["ddp"])["ddp"]["relative"] is None


def test_comparison_table_has_a_row_for_each_variant_and_the_reasons() -> None:
    variants = sum_up([run([0.1], 10)], ["ddp"])
    conditions = {"torch": "2", "commit": ""}
    outcome = {"variants": variants, "missing": {"dp": "No GPU."}, "conditions": conditions, "unit": "texts"}
    text = format_comparison(outcome)
    assert text.startswith("| variant | texts/s | step, median |")
    header, rule, row, *_ = text.splitlines()
    assert header.count("|") == rule.count("|") == row.count("|")
    assert "- dp: not here. No GPU.\n- torch 2\n" in text


def test_chart_has_bars_as_long_as_their_values(tmp_path: Path) -> None:
    bar_chart({"whole": 100.0, "half": 50.0}, "title", path=tmp_path / "chart.png")
    blue = bytes.fromhex(COLOUR[1:])
    with Image.open(tmp_path / "chart.png") as image:
        assert image.width == WIDTH
        pixels = image.convert("RGB").tobytes()
    rows = [pixels[start : start + 3 * WIDTH] for start in range(0, len(pixels), 3 * WIDTH)]
    lengths = [sum(row[x : x + 3] == blue for x in range(0, len(row), 3)) for row in rows]
    longest = max(lengths)
    assert longest > 300
    # The title is on top, then the whole, then the half
    assert [length for length, _ in groupby(lengths) if length > 100] == [longest, pytest.approx(longest / 2, abs=3)]


@pytest.mark.parametrize("count", [1, 12])
def test_chart_is_legible_with_any_names(count: int) -> None:
    title = "images/s, 60 steps, 3 runs each, 2 processes (none: 1), on a machine whose name is very long"
    with new_figure(120 + 60 * count) as figure:
        draw_bars(figure, [(f"tuned by hand, in memory {n}", 10.0**n, f"{10**n:,}") for n in range(count)], title)
        found = assert_legible(figure)
    assert {"tuned by hand, in memory 0", "1"} <= set(found)


def without_gpus() -> None:
    from train.commands import compare

    compare._output_of = lambda program, *arguments: ""


@pytest.mark.parametrize("signal", ["SIGTERM", "SIGKILL"])
def test_comparison_runs_what_it_can_and_goes_on_where_it_was_cut_off(
    forks: Forks, tmp_path: Path, signal: str
) -> None:
    line = (*LINE, "--only", "none,ddp,dp", "--repeats", "1", "--run-dir", tmp_path)
    folder = tmp_path / "compare"
    with forks.running(*line, preload=WITHOUT_GPUS) as job:
        job.wait_until((folder / "compare.json").exists, "the first run", timeout_s=240)
        family = psutil.Process(job.processes[0].pid).children(recursive=True)
        job.processes[0].signal(signal)
        assert job.wait(240)[0] in (143, 0, -9), job.output
        assert psutil.wait_procs(family, timeout=60)[1] == []
    first = json.loads((folder / "compare.json").read_text())["runs"][0]
    codes, output = forks.run(*line, timeout_s=280, preload=WITHOUT_GPUS)
    assert codes == [0], output
    outcome = json.loads((folder / "compare.json").read_text())
    assert outcome["runs"][0] == first
    assert [run["variant"] for run in outcome["runs"]] == ["none", "ddp"]
    assert [run["world_size"] for run in outcome["runs"]] == [1, 2]
    assert all(len(run["step_s"]) == 3 for run in outcome["runs"])
    assert outcome["variants"]["ddp"]["peak_memory_mb"] > 50
    assert set(outcome["missing"]) == {"dp"}
    assert (folder / "compare.md").read_text() == format_comparison(outcome)
    assert (folder / "compare.png").exists()
    codes, output = forks.run(*line, "--lr", "0.01")
    assert codes == [2], output
    assert "holds a comparison under other conditions" in output


# ddp-torchrun: below, where it is killed
@pytest.mark.parametrize("variant", ["ddp-torch-launch", "ddp-mpirun"])
def test_variant_that_others_start_is_compared_over_texts(forks: Forks, tmp_path: Path, variant: str) -> None:
    if variant == "ddp-mpirun" and shutil.which("mpirun") is None:
        pytest.skip("no mpirun here: apt install openmpi-bin")
    codes, output = forks.run(
        "compare", "--workload", "text", "--max-steps", "3", "--only", variant, "--repeats", "1", "--run-dir", tmp_path,
        timeout_s=280, env={"PYTHONWARNINGS": ""},
    )
    assert codes == [0], output
    outcome = json.loads((tmp_path / "compare" / "compare.json").read_text())
    assert outcome["missing"] == {}
    assert [run["world_size"] for run in outcome["runs"]] == [2]
    assert outcome["unit"] == "texts"
    assert "| variant | texts/s |" in output


@pytest.mark.parametrize("variant", ["ddp-torchrun", "ddp-mpirun"])
def test_variant_that_others_start_ends_with_a_comparison_that_is_killed(
    forks: Forks, tmp_path: Path, variant: str
) -> None:
    if variant == "ddp-mpirun" and shutil.which("mpirun") is None:
        pytest.skip("no mpirun here: apt install openmpi-bin")
    line = (*LINE[:-1], "100000", "--only", variant, "--repeats", "1", "--run-dir", tmp_path)
    with forks.running(*line, env={"PYTHONWARNINGS": ""}) as job:
        rows = tmp_path / "compare" / "runs" / f"{variant}-0" / "metrics.jsonl"
        job.wait_until(lambda: rows.exists() and rows.stat().st_size, "steps", timeout_s=240)
        family = psutil.Process(job.processes[0].pid).children(recursive=True)
        job.processes[0].signal("SIGKILL")
        assert len(family) >= 3  # the program that started them, and two ranks
        assert psutil.wait_procs(family, timeout=60)[1] == []
        job.wait()


def test_mpirun_that_is_missing_is_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert _find_obstacle("mpirun") == "No mpirun of Open MPI. On Debian and Ubuntu: sudo apt install openmpi-bin"


def test_variant_that_fails_is_listed_with_its_reason(forks: Forks, tmp_path: Path) -> None:
    codes, output = forks.run(
        *LINE, "--only", "none", "--repeats", "2", "--batch-size", "5000", "--run-dir", tmp_path, timeout_s=240
    )
    assert codes == [0], output
    outcome = json.loads((tmp_path / "compare" / "compare.json").read_text())
    assert len(outcome["runs"]) == 1  # not tried again
    assert "batch_size must be at most the number of training samples" in outcome["missing"]["none"]


@pytest.mark.parametrize(
    ("words", "message"),
    [(("--only", "none,dpp"), f'--only must be of {", ".join(VARIANTS)}, got "dpp".'),
     (("--repeats", "0"), "--repeats must be >= 1"), (("--processes", "1"), "--processes must be >= 2, got 1.")],
)
def test_comparison_of_nothing_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["compare", *words]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "runs" / "compare").exists()
