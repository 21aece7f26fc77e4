"""One job in real containers: the nodes' rights and files, and that they get the same weights as the host."""

import json
import re
import secrets
import subprocess
import tomllib
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from rankup.files import IN_IMAGE
from tests.rigs.containers import Project, clean_environment, digest_by_forks, docker, project, wait_for
from tests.rigs.fork_server import Forks
from tests.rigs.jobs import ROOT
from tests.rigs.listings import workload

pytestmark = [pytest.mark.usefixtures("image"), pytest.mark.timeout(1800)]
# A job with everything that could make two runs differ: dropout, augmentation, and batches prepared by workers
JOB = "--dataset digits --model mlp --dropout 0.2 --augment --num-workers 1 --max-steps 60 --name job"
# A job of nothing but steps, 10,000 in each epoch
LONG = "--dataset fake --fake-samples 20000 --batch-size 2 --model mlp --epochs 100 --log-every-steps 1 --name long"
USER = {"RANKUP_UID": "54321", "RANKUP_GID": "54322"}


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Project]:
    with project(tmp_path, ARGS=JOB, **USER) as made:
        yield made


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """Three nodes that have trained to the end. test_compose_kills.py has two nodes."""
    line = {"ARGS": f"{JOB} --batch-size 66", "NNODES": "3", "COMPOSE_PROFILES": "3"}
    with project(tmp_path_factory.mktemp("trained"), **line, **USER) as made:
        made.add("compose.nodes.yaml")
        made.up()
        assert made.codes("node0", "node1", "node2") == [0, 0, 0], made.logs()
        yield made


def test_three_nodes_train_to_the_weights_of_the_host(trained: Project, forks: Forks, tmp_path: Path) -> None:
    outcome = trained.result("job")
    assert outcome["hosts"] == ["node0", "node1", "node2"]
    assert outcome["digest"] == digest_by_forks(forks, tmp_path, f"{JOB} --batch-size 66", nproc=3)
    # All files belong to the user given to compose, although the engine created runs/ as root
    written = [path.stat() for path in (trained.runs, *trained.runs.rglob("*"))]
    assert {(about.st_uid, about.st_gid) for about in written} == {(54321, 54322)}
    said = trained.logs()
    assert "epoch 2" in said
    assert "Warning" not in said


def test_node_runs_own_code_with_no_more_rights_than_training_needs(
    nodes: Project, tmp_path: Path
) -> None:
    """The code is mounted, so no image is built."""
    (tmp_path / "throws.py").write_text(workload("train/workloads/README.md"))
    mount = f"volumes: ['{tmp_path}/throws.py:{IN_IMAGE}/throws.py:ro']"
    nodes.override(f"services: {{node0: {{{mount}}}, node1: {{{mount}}}}}")
    nodes.up(ARGS="--workload throws:build --epochs 100000 --batch-size 64 --name throws --options.width 32")
    wait_for("two lines of progress", lambda: nodes.logs().count("samples/s") >= 2, log=nodes.logs)
    assert nodes.state("node0")["Status"] == "running"
    assert "data   throws, 2,000 + 501 samples" in nodes.logs()

    host = nodes.inspect("node1")["HostConfig"]
    assert host["ReadonlyRootfs"]
    assert host["CapDrop"] == ["ALL"]
    assert host["Init"]
    assert host["SecurityOpt"] == ["no-new-privileges:true"]
    assert host["RestartPolicy"]["Name"] == "on-failure"
    assert host["RestartPolicy"]["MaximumRetryCount"] > 0
    limits = "grep -E 'CapEff|NoNewPrivs|Max open' /proc/1/status /proc/1/limits"
    inside = f"touch {IN_IMAGE}/x /opt/x 2>&1; id -u; {limits}; df -m /dev/shm"
    said = docker("exec", f"{nodes.name}-node1-1", "sh", "-c", inside)
    assert said.count("Read-only file system") == 2
    assert "54321" in said
    assert "CapEff:\t0000000000000000" in said
    assert "NoNewPrivs:\t1" in said
    assert "1024" in said  # MB of shared memory


def test_dockerfile_of_three_lines_builds_on_the_image(tmp_path: Path, image: str) -> None:
    context = tmp_path / "mine"
    context.mkdir()
    (context / "throws.py").write_text(workload("train/workloads/README.md"))
    lines = f'FROM {image}\nCOPY throws.py ./\nCMD ["train", "--workload", "throws:build", "--max-steps", "5"]\n'
    name = f"rankup-test-{secrets.token_hex(4)}:mine"
    try:
        (context / "Dockerfile").write_text(lines)
        docker("build", "-q", "-t", name, str(context), DOCKER_BUILDKIT="1")
        said = docker("run", "--rm", "--network", "none", name)
        assert "data   throws" in said
        assert "finished after " in said
    finally:
        docker("rmi", "-f", name)


def test_board_shows_a_run_only_on_loopback(trained: Project) -> None:
    trained.add("compose.board.yaml")
    trained.up("board", BOARD_PORT="0")
    port = trained.compose("port", "board", "6006", BOARD_PORT="0").strip()
    assert port.startswith("127.0.0.1:")

    def shown() -> bool:
        try:
            with urllib.request.urlopen(f"http://{port}/data/runs", timeout=20) as answer:
                return any("job" in run for run in json.load(answer))
        except OSError:
            return False

    wait_for("the run on the board", shown, log=trained.logs)


def test_compile_works_in_the_image_with_a_compiler(nodes: Project, tmp_path: Path) -> None:
    env = clean_environment({"TARGET": "compile"})
    done = subprocess.run(
        [ROOT / "docker" / "image.sh"], env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    # One node is enough, because all nodes compile the same code. These settings save time: no programs that only test
    # the CPU, no parallel compile processes, each of which imports torch, and no precompiled headers of torch, which
    # take three times as long as everything that this job compiles
    settings = {"VEC_ISA_OK": 1, "COMPILE_THREADS": 1, "CPP_CACHE_PRECOMPILE_HEADERS": 0}
    (tmp_path / "settings.env").write_text("".join(f"TORCHINDUCTOR_{name}={on}\n" for name, on in settings.items()))
    image = {"IMAGE": "rankup:compile", "TMP": "exec,mode=1777,size=2g"}
    alone = {"NNODES": "1", "ENV_FILE": str(tmp_path / "settings.env"), **image}
    nodes.up("node0", ARGS=JOB.replace("--max-steps 60", "--max-steps 2 --compile"), **alone)
    assert nodes.codes("node0", timeout_s=900) == [0], nodes.logs()


def test_image_has_labels_of_its_version_and_revision(image: str) -> None:
    labels = json.loads(docker("image", "inspect", "-f", "{{json .Config.Labels}}", image))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert labels["org.opencontainers.image.version"] == project["version"]
    assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?|unknown", labels["org.opencontainers.image.revision"])


def test_image_runs_alone_as_any_user(image: str) -> None:
    words = ["run", "--rm", "--network", "none", "--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL"]
    train = ["train", "--dataset", "fashion-mnist", "--max-steps", "2", "--run-dir", "/tmp/runs"]
    said = docker(*words, "--user", "77777:0", image, *train)
    assert "fashion-mnist, 60,000 + 10,000 samples" in said
    assert "finished after 2 steps" in said
