"""The exit codes and messages of `make up`, mostly with nodes that only sleep and exit."""

import os
import re
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rigs.containers import clean_environment, docker, wait_for
from tests.rigs.jobs import ROOT

pytestmark = [pytest.mark.usefixtures("image"), pytest.mark.timeout(900)]

# It takes the place of `python -m rankup launch`. "1:5:171,0" means that node 1 works for 5 s and ends with 171, and
# after its restart with 0. runs/ counts the starts.
NODE = """#!/bin/sh
for spec in "$@"; do [ "${spec%%:*}" = "$RANK" ] && own=${spec#*:}; done
times=$(cat "runs/$RANK" 2> /dev/null || echo 0)
echo $((times + 1)) > "runs/$RANK"
codes=$(echo "${own#*:}" | tr , ' ')
set -- $codes
if [ "$times" -lt $# ]; then shift "$times"; else shift $(($# - 1)); fi
sleep "${own%%:*}"
echo "$(hostname) leaves with $1"
exit "$1"
"""


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory, image: str) -> Iterator[str]:
    """An image whose nodes sleep and exit as ARGS tells them."""
    context = tmp_path_factory.mktemp("stub")
    (context / "python").write_text(NODE)
    (context / "rankup").mkdir()
    shutil.copy(ROOT / "rankup" / "errors.py", context / "rankup")  # up.sh asks errors.py which exit code counts
    (base,) = re.findall(r"(?m)^ARG BASE_IMAGE=(.+)", (ROOT / "docker/Dockerfile").read_text())
    base = (ROOT / ".env").read_text().partition("BASE_IMAGE=")[2].partition("\n")[0] or base
    (context / "Dockerfile").write_text(
        f"FROM {base}\nWORKDIR /stub\nRUN mkdir -m 1777 /runs && ln -s /runs runs\n"
        "COPY --chmod=755 python /usr/local/bin/\nCOPY rankup ./rankup\n"
    )
    name = f"rankup-test-stub:{secrets.token_hex(4)}"
    docker("build", "-q", "-t", name, context, DOCKER_BUILDKIT="1")
    yield name
    docker("rmi", "-f", name)


class Clone:
    """A copy of the checkout, in which `make up` runs as a given user."""

    def __init__(self, folder: Path, image: str) -> None:
        self.folder, self.image = folder / "clone", image
        self.folder.mkdir()
        for name in ("compose.yaml", "docker", "Makefile", "pyproject.toml"):
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, self.folder / name, ignore=shutil.ignore_patterns("*.whl"))
            else:
                shutil.copy(source, self.folder / name)
        self.project = f"rankup-test-{secrets.token_hex(4)}"

    def start(self, args: str, *, uid: int = 0, **env: str) -> "subprocess.Popen[str]":
        group = subprocess.run(["stat", "-c", "%g", "/var/run/docker.sock"], capture_output=True, text=True, check=True)
        who = ["setpriv", f"--reuid={uid}", f"--regid={uid}", f"--groups={group.stdout.strip()}"] if uid else []
        own = {"COMPOSE_PROJECT_NAME": self.project, "IMAGE": self.image, "ARGS": args, "HOME": str(self.folder), **env}
        return subprocess.Popen(
            [*who, self.folder / "docker" / "up.sh"], env=clean_environment(own), text=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )

    def up(self, args: str, *, uid: int = 0, timeout_s: float = 400, **env: str) -> tuple[int, str]:
        """Run `make up`. Return its exit code and output."""
        process = self.start(args, uid=uid, **env)
        try:
            said, _ = process.communicate(timeout=timeout_s)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        return process.returncode, said

    def wait_for_nodes(self) -> None:
        wait_for("both nodes at work", lambda: all((self.folder / "runs" / node).exists() for node in "01"))

    def starts(self, node: int) -> int:
        return int((self.folder / "runs" / str(node)).read_text())

    def environment(self, node: int) -> str:
        return docker("inspect", "-f", "{{.Config.Env}}", f"{self.project}-node{node}-1")

    def remove(self) -> None:
        words = ["compose", "--project-directory", self.folder, "-p", self.project, "-f", self.folder / "compose.yaml"]
        docker(*words, "down", "--volumes", "--remove-orphans", "--timeout", "0", check=False)


@pytest.fixture
def clone(tmp_path: Path, stub: str) -> Iterator[Clone]:
    made = Clone(tmp_path, stub)
    yield made
    made.remove()


def test_up_ends_with_0_when_all_nodes_do(clone: Clone) -> None:
    code, said = clone.up("0:8:0 1:0:0")  # long enough for `make up` to follow its log
    assert (code, "up: node0 ended with 0" in said, "up: node1 ended with 0" in said) == (0, True, True), said
    assert "node0 leaves with 0" in said.splitlines()
    # No control characters, because the output is no terminal
    assert [line for line in said.splitlines() if not line.isprintable()] == []
    # Started by root, the nodes write files as the image's own user, never as root
    left = [clone.folder / "runs", *(clone.folder / "runs").rglob("*")]
    assert len(left) > 2
    assert {path.stat().st_uid for path in left} == {1000}


@pytest.mark.parametrize(
    ("nodes", "code"),
    [
        ("0:900:0 1:1:3", 3),  # node1 fails while node0 still works
        ("0:3:5 1:0:0", 5),  # node1 succeeds first; compose alone would report 0 and stop node0
        ("0:2:171 1:1:2", 2),  # the mistake outranks the loss of a peer
    ],
)
def test_up_ends_with_the_code_of_the_node_that_failed(clone: Clone, nodes: str, code: int) -> None:
    found, said = clone.up(nodes, RESTART="on-failure:5")
    assert found == code, said
    assert "which a restart cannot fix" in said


def test_up_lets_the_engine_restart_nodes_with_codes_to_retry(clone: Clone) -> None:
    code, said = clone.up("0:0:171,0 1:0:137,171,0", RESTART="on-failure:5")
    assert code == 0, said
    assert "node0 ended with 0, 1 restarts" in said
    assert "node1 ended with 0, 2 restarts" in said


def test_up_ends_when_a_node_has_used_its_restarts(clone: Clone) -> None:
    code, said = clone.up("0:900:0 1:0:171", RESTART="on-failure:2")
    assert code == 171, said
    assert "node1 ended with 171 and is not restarted" in said
    assert clone.starts(1) == 3


def test_up_learns_how_a_node_ended_without_an_event_of_the_engine(clone: Clone, tmp_path: Path) -> None:
    path = docker_that(tmp_path, '[ "$1" != events ] || exec sleep 900')
    code, said = clone.up("0:0:0 1:0:171", RESTART="on-failure:1", PATH=path)
    assert (code, "up: node1 ended with 171, 1 restarts" in said) == (171, True), said


def test_up_does_not_take_an_engine_error_for_the_end_of_the_nodes(clone: Clone, tmp_path: Path) -> None:
    path = docker_that(tmp_path, f'if [ "$1" = inspect ] && mkdir {tmp_path}/once 2> /dev/null; then exit 1; fi')
    code, said = clone.up("0:15:5 1:900:0", PATH=path)
    assert (code, "up: node0 ended with 5" in said, (tmp_path / "once").exists()) == (5, True, True), said


def test_up_fails_when_somebody_removes_its_nodes(clone: Clone) -> None:
    process = clone.start("0:900:0 1:900:0")
    try:
        clone.wait_for_nodes()
        clone.remove()
        said, _ = process.communicate(timeout=400)
        assert process.returncode not in (0, None), said
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def docker_that(folder: Path, does_first: str) -> str:
    """Return a PATH with a `docker` that first runs this shell code, and then the real docker."""
    (folder / "bin").mkdir()
    stand_in = folder / "bin" / "docker"
    stand_in.write_text(f'#!/bin/sh\n{does_first}\nexec {shutil.which("docker")} "$@"\n')
    stand_in.chmod(0o755)
    return f"{stand_in.parent}:{os.environ['PATH']}"


@pytest.mark.parametrize("late_s", [0.0, 2.0], ids=["while it starts them", "later"])
def test_up_interrupted_stops_the_nodes(late_s: float, clone: Clone) -> None:
    process = clone.start("0:900:0 1:900:0")
    try:
        clone.wait_for_nodes()
        time.sleep(late_s)
        os.killpg(process.pid, signal.SIGINT)
        said, _ = process.communicate(timeout=400)
        assert process.returncode == 143, said
        assert "node0 ended with 143" in said
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def test_up_writes_the_number_of_nodes_to_env_for_plain_compose(clone: Clone) -> None:
    (clone.folder / ".env").write_text("# mine\nNNODES=\"3\"\nMINE=kept\n")
    code, said = clone.up("0:0:0 1:0:0 2:0:0")
    assert code == 0, said
    assert "node2 ended with 0" in said
    settings = (clone.folder / ".env").read_text()
    assert settings.startswith("# mine\nNNODES=\"3\"\nMINE=kept\n")
    words = ["compose", "--project-directory", clone.folder, "config", "--services"]
    assert "node2" in docker(*words, IMAGE=clone.image)
    assert "node3" not in docker(*words, IMAGE=clone.image)
    assert "node3" in docker(*words, IMAGE=clone.image, NNODES="4")


def test_up_uses_own_compose_files_and_names_nodes_missing_from_them(clone: Clone) -> None:
    mine = "services: {{node0: {{environment: {{MINE: {0}}}}}, node1: {{environment: {{MINE: {0}}}}}}}\n"
    (clone.folder / "compose.override.yaml").write_text(mine.format("by-override"))
    (clone.folder / "mine.yaml").write_text(mine.format("by-name"))
    code, said = clone.up("0:0:0 1:0:0 2:0:0", NNODES="3")
    assert code == 0, said
    assert "compose.override.yaml changes node1 and not node2" in said
    assert "MINE=by-override" in clone.environment(1)
    assert "MINE" not in clone.environment(2)
    # The user removed the file that compose reads by default: .env must not remember it
    (clone.folder / "compose.override.yaml").unlink()
    code, said = clone.up("0:0:0 1:0:0")
    assert (code, "changes node1" in said) == (0, False), said
    assert "MINE" not in clone.environment(1)
    code, said = clone.up("0:0:0 1:0:0 2:0:0", NNODES="3", COMPOSE_FILE="compose.yaml:mine.yaml")
    assert (code, "mine.yaml changes node1 and not node2" in said) == (0, True), said
    assert "MINE=by-name" in clone.environment(1)
    assert "mine.yaml" not in (clone.folder / ".env").read_text()


def test_up_refuses_more_nodes_than_compose_has(clone: Clone) -> None:
    code, said = clone.up("", NNODES="9")
    assert (code, "NNODES must be from 2 to 8, got 9" in said) == (2, True), said


def test_up_leaves_the_nodes_of_another_checkout_alone(clone: Clone) -> None:
    of = "com.docker.compose.project"
    labels = ["--label", f"{of}={clone.project}", "--label", f"{of}.working_dir=/other"]
    theirs = docker("run", "-d", "--rm", *labels, "--entrypoint", "sleep", clone.image, "300").strip()
    code, said = clone.up("0:0:0 1:0:0")
    docker("rm", "-f", theirs)
    assert (code, "a job of /other runs under the same name" in said) == (2, True), said


def test_fresh_clone_trains_and_its_user_owns_the_results(image: str) -> None:
    uid = 1234
    # Other users may not enter tmp_path
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        clone = Clone(Path(folder), image)
        try:
            for path in [clone.folder, *clone.folder.rglob("*")]:
                os.chown(path, uid, uid)
            code, said = clone.up("--dataset digits --model mlp --max-steps 10 --name job", uid=uid)
            assert code == 0, said
            left = [clone.folder / "runs", *(clone.folder / "runs").rglob("*")]
            assert len(left) > 5
            assert {path.stat().st_uid for path in left} == {uid}
        finally:
            clone.remove()
