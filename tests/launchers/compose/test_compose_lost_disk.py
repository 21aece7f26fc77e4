"""Two containers share no disk. Node 0 is lost with its disk, and the run still ends with the undisturbed weights."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launchers.compose.test_compose_kills import JOB, SLOW
from tests.rigs.containers import Project, clean_environment, digest_by_forks, project
from tests.rigs.foreign_scripts import Once
from tests.rigs.fork_server import Forks
from tests.rigs.jobs import ROOT
from tests.rigs.object_store import BUCKET, S3, Door

pytestmark = [pytest.mark.usefixtures("image"), pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def undisturbed(once: Once, forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> str:
    return once("compose", lambda: digest_by_forks(forks, tmp_path_factory.mktemp("undisturbed"), JOB))


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Project]:
    """Two nodes, each with its own disk."""
    own = tmp_path / "node1"
    own.mkdir()
    os.chown(own, 1000, 1000)
    with project(tmp_path, ARGS=SLOW) as made:
        made.slow()
        made.override(f"services: {{node1: {{volumes: ['{own}:/runs']}}}}")
        yield made


def lose(nodes: Project, *lost: str) -> None:
    """Kill and remove these containers, and remove the run on node 0's disk."""
    nodes.compose("kill", *lost)
    nodes.compose("rm", "--force", *lost)
    shutil.rmtree(nodes.runs / "job")


def test_run_survives_node_0_and_its_disk_lost_alone_and_with_node_1(nodes: Project, undisturbed: str) -> None:
    nodes.up()
    nodes.wait_for_step("job", 100)
    lose(nodes, "node0")
    nodes.up()
    nodes.wait_for_step("job", 200)
    logs = nodes.logs()
    (lost,) = re.findall(r"lost a peer at step (\d+)", logs)
    # Node 1 writes no rescue of a step that is already on its disk
    from_node1 = r"resumed from step (\d+), (?:rescued by rank 1 on node1; no finished|the second copy on node1)"
    assert [int(step) >= int(lost) for step in re.findall(from_node1, logs)] == [True], logs
    lose(nodes, "node0", "node1")
    nodes.up()
    assert nodes.codes() == [0, 0], nodes.logs()
    assert re.search(r"resumed from step \d+, the second copy on node1 \(rank 1\)", nodes.logs())
    assert nodes.result("job")["digest"] == undisturbed


# A run directory in an object store -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def image_for_s3() -> str:
    name = "rankup:s3"
    build = subprocess.run(
        [ROOT / "docker" / "image.sh"], env=clean_environment({"IMAGE": name, "EXTRAS": "s3"}), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
    )
    assert build.returncode == 0, build.stdout
    return name


@pytest.fixture
def store(s3: S3) -> Iterator[Door]:
    """An S3 store at the address by which containers reach this machine."""
    # `docker network inspect` names no gateway if the engine found the bridge of an earlier engine
    shown = subprocess.check_output(["ip", "-json", "-4", "address", "show", "docker0"])
    with s3.door(json.loads(shown)[0]["addr_info"][0]["local"]) as door:
        yield door


def test_run_in_an_object_store_keeps_its_weights_and_checkpoint(
    tmp_path: Path, image_for_s3: str, store: Door, undisturbed: str
) -> None:
    """tests/places/test_remote.py tests how such a run resumes on another machine."""
    job = f"{JOB} --run-dir s3://{BUCKET}/{tmp_path.name}"
    where = {"IMAGE": image_for_s3, "ENV_FILE": str(ROOT / "docker" / "s3.env"), "ARGS": job}
    with project(tmp_path, **where, **store.env) as nodes:
        nodes.up()
        assert nodes.codes() == [0, 0], nodes.logs()
        (result,) = nodes.runs.glob("cache/runs/*/job/result.json")
        assert json.loads(result.read_text())["digest"] == undisturbed
    assert any(seen.method == "PUT" and seen.name.endswith("/manifest.json") for seen in store.seen)
