"""Somebody's script, unchanged and mounted, on two containers by SCRIPT: the weights that torchrun's variables lead to.

Slurm runs the others on two nodes, tests/commands/test_foreign.py on one.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rigs.containers import Project, project
from tests.rigs.foreign_scripts import FOLDER, Once, expected, result_of
from tests.rigs.fork_server import Forks

pytestmark = [pytest.mark.usefixtures("image"), pytest.mark.timeout(1800)]


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Project]:
    with project(tmp_path, CODE=str(FOLDER), RANKUP_UID="54321", RANKUP_GID="54321") as made:
        # As on the host: the number of threads changes the last bits of sums
        one = "environment: {OMP_NUM_THREADS: 1}"
        made.override(f"services: {{node0: {{{one}}}, node1: {{{one}}}}}")
        yield made


def test_compose_runs_two_ranks_of_a_script_on_each_node(
    nodes: Project, once: Once, forks: Forks, tmp_path: Path
) -> None:
    nodes.up(SCRIPT="/code/ddp_local_rank.py", NPROC="2")
    assert nodes.codes() == [0, 0], nodes.logs()
    assert "local rank 1 is rank 3" in nodes.logs()
    assert result_of(nodes.logs()) == expected("ddp_local_rank", once, forks, tmp_path, nproc=4)
