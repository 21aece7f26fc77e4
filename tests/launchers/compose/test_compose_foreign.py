"""`rankup add` starts another project's unchanged script in two containers, with the same weights as under torchrun.

Slurm runs the other scripts on two nodes, and tests/commands/test_foreign.py runs them on one.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from rankup.files import IN_IMAGE
from tests.rigs.containers import Project, project
from tests.rigs.foreign_scripts import FOLDER, Once, expected, result_of
from tests.rigs.fork_server import Forks

pytestmark = [pytest.mark.usefixtures("image"), pytest.mark.timeout(1800)]


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Project]:
    user = {"RANKUP_UID": "54321", "RANKUP_GID": "54321"}
    with project(tmp_path, add="ddp_local_rank.py", where=FOLDER, **user) as made:
        # The script is mounted, so no image is built. The number of threads changes the last bits of sums, so use as
        # many as on the host
        mount = f"{FOLDER}/ddp_local_rank.py:{IN_IMAGE}/ddp_local_rank.py:ro"
        more = f"environment: {{OMP_NUM_THREADS: 1}}, volumes: ['{mount}']"
        made.override(f"services: {{node0: {{{more}}}, node1: {{{more}}}}}")
        yield made


def test_compose_runs_two_ranks_of_an_unchanged_script_on_each_node(
    nodes: Project, once: Once, forks: Forks, tmp_path: Path
) -> None:
    nodes.up(NPROC="2")
    assert nodes.codes() == [0, 0], nodes.logs()
    assert "local rank 1 is rank 3" in nodes.logs()
    assert result_of(nodes.logs()) == expected("ddp_local_rank", once, forks, tmp_path, nproc=4)
