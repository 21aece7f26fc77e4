"""`rankup doctor` in two containers."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.rigs.containers import project, warned

pytestmark = [pytest.mark.usefixtures("image"), pytest.mark.timeout(1200)]


def doctor(folder: Path, limits: str) -> tuple[list[int], str, dict[str, Any]]:
    """Run the doctor. Return the exit codes, the log without line breaks and prefixes, and the report."""
    with project(folder, add="train/main.py doctor", RESTART="no", ARGS="--name job") as made:
        made.override(f"services: {{node1: {{{limits}}}}}")
        made.up()
        codes = made.codes()
        said = " ".join(made.logs().replace("\x1b[2K", "").replace("[node0 r0/2]", "").split())
    return codes, said, json.loads((made.runs / "job" / "doctor" / "report.json").read_text())


def test_compose_doctor_names_the_container_with_too_few_resources(tmp_path: Path) -> None:
    codes, said, report = doctor(tmp_path, "mem_limit: 700m, memswap_limit: 700m, shm_size: 16mb, cpus: 0.4")
    assert codes == [10, 10], said
    for warning in (
        "limits rank 1 on node1: 700 MiB of memory for 1 ranks",
        "limits rank 1 on node1: 1 x 1 threads on this node, but only 0.4 CPUs to use",
        "memory rank 1 on node1: /dev/shm: 16 of 16 MiB free",
    ):
        assert f"WARNING {warning}" in said
    assert len(warned(report)) == 3, report
    assert "doctor: fit to train, with warnings: " in said
