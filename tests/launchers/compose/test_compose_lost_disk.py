"""Two containers without a shared disk: node 0's goes with its disk, and the run goes on to the undisturbed weights."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launchers.compose.test_compose_kills import JOB
from tests.rigs.containers import Project, digest_by_torchrun, project

pytestmark = [pytest.mark.usefixtures("image"), pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    return digest_by_torchrun(tmp_path_factory.mktemp("undisturbed"), JOB)


@pytest.fixture(params=["copies", "mirror"])
def nodes(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Project]:
    """Each node has a disk of its own; with "mirror" node 0 sees one more, and node 1's is lost with node 0's."""
    own, mirror = tmp_path / "node1", tmp_path / "mirror"
    for folder in (own, mirror):
        folder.mkdir()
        os.chown(folder, 1000, 1000)
    args = JOB + (" --mirror /mirror" if request.param == "mirror" else "")
    with project(tmp_path, ARGS=args) as made:
        made.override(
            f"services: {{node1: {{volumes: ['{own}:/app/runs']}}, node0: {{volumes: ['{mirror}:/mirror']}}}}"
        )
        yield made


def lose(nodes: Project, *lost: str) -> None:
    """Remove these containers and their disks, without a word to anybody in them."""
    nodes.compose("kill", *lost)
    nodes.compose("rm", "--force", *lost)
    shutil.rmtree(nodes.runs / "job")


def test_node_0_and_its_disk_are_lost_alone_and_then_with_node_1(nodes: Project, undisturbed: str) -> None:
    nodes.up()
    nodes.wait_for_step("job", 300)
    lose(nodes, "node0")
    nodes.up()
    nodes.wait_for_step("job", 600)
    assert ", rescued by rank 1 on node1; no finished step was lost" in nodes.logs()
    lose(nodes, "node0", "node1")
    if "--mirror" in nodes.env["ARGS"]:
        shutil.rmtree(nodes.folder / "node1" / "job")
    nodes.up()
    assert nodes.codes() == [0, 0], nodes.logs()
    said = "fetched step-" if "--mirror" in nodes.env["ARGS"] else "the second copy on node1 (rank 1): node0 (rank 0)"
    assert said in nodes.logs()
    assert nodes.result("job")["digest"] == undisturbed
