"""The example test of tests/README.md passes."""

from pathlib import Path
from typing import Any

from tests.project.test_docs import fences
from tests.rigs.fork_server import Forks
from tests.rigs.jobs import ROOT


def test_example_of_the_page_passes(forks: Forks, tmp_path: Path) -> None:
    (code,) = (text for language, text in fences((ROOT / "tests" / "README.md").read_text()) if language == "python")
    names: dict[str, Any] = {}
    exec(code, names)
    names["test_killed_rank_costs_no_finished_step"](forks, tmp_path)
