"""Containers are killed, stopped and cut off. All rejoin, and the weights are those of an undisturbed run."""

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rigs.containers import Project, digest_by_forks, docker, project, wait_for
from tests.rigs.foreign_scripts import Once
from tests.rigs.fork_server import Forks
from tests.rigs.jobs import changes

pytestmark = [pytest.mark.usefixtures("image"), pytest.mark.timeout(1800)]
STEPS = 400
JOB = (
    f"--dataset digits --model mlp --dropout 0.2 --augment --batch-size 64 --max-steps {STEPS} --name job "
    "--save-every-steps 10 --log-every-steps 5 --step-timeout-s 60"
)
SLOW = f"{JOB} --workload slow_steps:build"
ROUNDS = int(os.environ.get("RANKUP_RUNS", "1"))


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Project]:
    with project(tmp_path, ARGS=SLOW) as made:
        made.slow()
        yield made


@pytest.fixture(scope="module")
def undisturbed(once: Once, forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of the same job without any kill."""
    return once("compose", lambda: digest_by_forks(forks, tmp_path_factory.mktemp("undisturbed"), JOB))


@pytest.mark.slow
@pytest.mark.parametrize("number", range(ROUNDS))
def test_killed_rank_or_container_comes_back_and_changes_no_weight(
    number: int, nodes: Project, undisturbed: str
) -> None:
    """A round has four kills, in random order and at random steps: a rank of each node, and each node."""
    chance = random.Random(number)
    kills = [(kind, node) for kind in ("rank", "container") for node in ("node1", "node0")]
    chance.shuffle(kills)
    nodes.up()
    for part, (kind, node) in enumerate(kills):
        step = chance.randrange(part * 70 + 5, part * 70 + 65)  # a third of the steps is left, as a kill may be late
        nodes.wait_for_step("job", max(1, step - 50))
        (nodes.kill_rank if kind == "rank" else nodes.kill_container)(node, step=step)
    assert nodes.codes() == [0, 0], nodes.logs()
    assert nodes.result("job")["digest"] == undisturbed
    said = nodes.logs()
    # The first kill may come before the first checkpoint
    assert said.count("resumed from step") >= len(kills) - 1, said
    # A rank that was killed, or that lost its killed peer, restarts inside its container
    assert [nodes.inspect(node)["RestartCount"] for node in ("node0", "node1")] == [1, 1], said


def test_stop_leaves_a_checkpoint_and_up_resumes_to_the_same_weights(nodes: Project, undisturbed: str) -> None:
    """The files belong to the owner of runs/, whose uid may differ from the image's, for example after `make demo`."""
    (nodes.runs / "job").mkdir(parents=True)
    for folder in (nodes.runs, nodes.runs / "job"):
        folder.chmod(0o755)
        os.chown(folder, 4242, 4343)
    nodes.up()
    nodes.wait_for_step("job", 100)
    nodes.stop()  # in the container init is root, and the rank is not
    assert nodes.codes() == [143, 143], nodes.logs()
    assert "SIGTERM: saved at step" in nodes.logs()
    nodes.up()
    assert nodes.codes() == [0, 0], nodes.logs()
    assert nodes.result("job")["digest"] == undisturbed
    left = [nodes.runs, *nodes.runs.rglob("*")]
    assert {(path.stat().st_uid, path.stat().st_gid) for path in left} == {(4242, 4343)}


def test_node_cut_off_the_network_is_named_and_rejoins(
    nodes: Project, undisturbed: str
) -> None:
    # Keep the long join timeout: if a start took longer, two nodes that keep restarting might never meet
    phases = "--step-timeout-s 10 --eval-timeout-s 10 --save-timeout-s 10"  # the cut may come in any of these phases
    nodes.up(ARGS=SLOW.replace("--step-timeout-s 60", phases))
    nodes.wait_for_step("job", 70)
    network, container = f"{nodes.name}_default", f"{nodes.name}-node1-1"
    docker("network", "disconnect", network, container)
    wait_for("node1 named", lambda: "rank 1 on node1" in nodes.compose("logs", "node0"), log=nodes.logs)
    # node1 cannot reach node0, and ends at its own deadline
    wait_for("node1's own end", lambda: "rank 0 on node0" in nodes.compose("logs", "node1"), log=nodes.logs)
    docker("network", "connect", "--alias", "node1", network, container)
    assert nodes.codes() == [0, 0], nodes.logs()
    assert nodes.result("job")["digest"] == undisturbed


def test_two_of_three_nodes_continue_without_node_0_and_readmit_it(tmp_path: Path) -> None:
    """The job has a secret. It trains until the test stops it."""
    job = SLOW.replace(f"--max-steps {STEPS}", "--epochs 1000")
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef")
    secret.chmod(0o600)
    os.chown(secret, 1000, 1000)  # the user of the nodes if root starts them
    with project(tmp_path, add="--nodes 2:3 train/main.py train", ARGS=job, RANKUP_SECRET_FILE=str(secret)) as made:
        made.slow("node0", "node1", "node2")
        made.up()

        def ranks() -> list[int]:
            return [number for _, number in changes(made.runs / "job")]

        made.wait_for_step("job", 50)
        # Node 2 may come seconds later, and the others then begin without it
        wait_for("three nodes", lambda: ranks()[-1] == 3, log=made.logs)
        made.compose("kill", "node0")
        wait_for("a step of two nodes", lambda: ranks()[-2:] == [3, 2], log=made.logs)
        made.compose("start", "node0")
        wait_for("a step of three nodes", lambda: ranks()[-3:] == [3, 2, 3], log=made.logs)
        made.stop()
        assert made.codes("node0", "node1", "node2") == [143] * 3, made.logs()
