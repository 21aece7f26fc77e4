"""--compile: the model is compiled in fact, trains as it does without, and what is missing for it is one line."""

from pathlib import Path
from typing import Any

import pytest

from tests.rigs.fork_server import Forks
from tests.rigs.jobs import metrics, result

DIGITS = ("--dataset", "digits", "--model", "mlp", "--tensorboard=false", "--limit-train", "704", "--lr", "0.02",
          "--schedule", "constant", "--warmup-steps", "5", "--log-every-steps", "1")


def say_graphs() -> None:
    """In the process of a rank: have it say before each evaluation what dynamo has captured."""
    import train.run.evaluation

    evaluate = train.run.evaluation.evaluate

    def counted(*values: Any, **named: Any) -> Any:
        from torch._dynamo.utils import counters

        print(f"graphs {counters['stats']['unique_graphs']} breaks {len(counters['graph_break'])}", flush=True)
        return evaluate(*values, **named)

    import train.loop

    train.loop.evaluate = counted  # type: ignore[assignment]


def test_compiled_model_trains_resumes_and_is_compiled_in_fact(forks: Forks, tmp_path: Path) -> None:
    line = ("train", *DIGITS, "--run-dir", tmp_path)
    for name, steps, compiled in (("eager", 10, False), ("whole", 10, True), ("parts", 6, True), ("parts", 10, True)):
        output = forks.ends(
            *line, f"--compile={str(compiled).lower()}", "--name", name, "--max-steps", str(steps), world_size=2,
            timeout_s=280, preload="tests.parallel.test_compile:say_graphs",
        )
        assert output.count(f"graphs {int(compiled)} breaks 0") == output.count("graphs ") == 2, output
    assert result(tmp_path / "whole")["digest"] == result(tmp_path / "parts")["digest"]
    eager, compiled_, parts = (
        [line["train/loss"] for line in metrics(tmp_path / name) if "train/loss" in line]
        for name in ("eager", "whole", "parts")
    )
    assert parts == compiled_
    assert compiled_ == pytest.approx(eager, rel=1e-4)


def test_compile_without_a_compiler_is_one_line(forks: Forks, tmp_path: Path) -> None:
    codes, output = forks.run("train", *DIGITS, "--compile", "--run-dir", tmp_path, env={"PATH": ""})
    assert codes == [2]
    assert "error: compile needs a C++ compiler" in output
    assert "Traceback" not in output
