"""The doctor in two containers."""

import json
import re
from pathlib import Path

import pytest

from tests.rigs.containers import Project, project, warned

pytestmark = [pytest.mark.usefixtures("image"), pytest.mark.timeout(1200)]


def words(made: Project) -> str:
    """The logs without line breaks and prefixes: a long line is wrapped."""
    return " ".join(made.logs().replace("\x1b[2K", "").replace("[doctor0 r0/2]", "").split())


def test_compose_doctor_finds_two_containers_fit(tmp_path: Path) -> None:
    with project(tmp_path, ARGS="--name job", RANKUP_UID="54321", RANKUP_GID="54321") as made:
        made.add("compose.doctor.yaml")
        made.up("doctor0", "doctor1")
        codes = made.codes("doctor0", "doctor1")
        said = words(made)
    report = json.loads((made.runs / "job" / "doctor" / "report.json").read_text())
    assert warned(report) == []
    assert codes == [report["exit_code"]] * 2, said
    assert "all 2 ranks: 0 on doctor0; 1 on doctor1" in said
    assert re.search(r"between nodes: slowest \S+ .B/s, ranks 0 on doctor0 and 1 on doctor1;", said), said


def test_compose_doctor_names_the_container_that_has_too_little(tmp_path: Path) -> None:
    with project(tmp_path, ARGS="--name job") as made:
        made.add("compose.doctor.yaml")
        made.override("services: {doctor1: {mem_limit: 700m, memswap_limit: 700m, shm_size: 16mb, cpus: 0.4}}")
        made.up("doctor0", "doctor1")
        codes = made.codes("doctor0", "doctor1")
        said = words(made)
    assert codes == [10, 10], said
    for warning in (
        "limits rank 1 on doctor1: 700 MiB of memory for 1 ranks",
        "limits rank 1 on doctor1: 1 process x 1 threads on this node, but only 0.4 CPUs to use",
        "memory rank 1 on doctor1: /dev/shm: 16 of 16 MiB free",
    ):
        assert f"WARNING {warning}" in said
    report = json.loads((made.runs / "job" / "doctor" / "report.json").read_text())
    assert len(warned(report)) == 3, report
    assert "doctor: fit to train, with warnings (" in said
