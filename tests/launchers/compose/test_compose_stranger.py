"""Repositories of users in real containers, with nothing of rankup but its wheel. `rankup add` writes files, compose
builds the image and trains, and so do the pods of the manifest. A rank is killed each time, and the weights equal those
of the same script on this machine."""

import os
import re
import secrets
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.rigs import own_venv, repositories
from tests.rigs.containers import Project, docker, rank_of
from tests.rigs.jobs import ROOT, environment, wait_for
from tests.rigs.kubepods import Cluster

pytestmark = [pytest.mark.usefixtures("image"), pytest.mark.timeout(1800)]
BASE = """FROM rankup:runtime
USER 0:0
RUN python -m pip uninstall -q -y rankup && rm -rf ./*
ENV PYTHONPATH=
"""


@pytest.fixture(scope="module")
def base(image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An image with Python, pip and torch, and without rankup."""
    folder = tmp_path_factory.mktemp("base")
    (folder / "Dockerfile").write_text(BASE)
    name = f"rankup-test-base:{secrets.token_hex(4)}"
    docker("build", "-q", "-t", name, folder)
    yield name
    docker("rmi", "-f", name, check=False)


@pytest.fixture(scope="module")
def rankup(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Path:
    """The command `rankup` of an environment that has the wheel and its dependencies."""
    return own_venv.own_venv(tmp_path_factory.mktemp("user") / "venv", wheel) / "rankup"


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("index")
    shutil.copy(wheel, folder)
    with repositories.index(folder) as address:
        yield address


class Stranger(Project):
    """A user's repository with what `rankup add` wrote there."""

    def __init__(self, folder: Path, base: str, index: str) -> None:
        super().__init__(folder)
        (folder / "pip.conf").write_text(f"[global]\nno-index = true\nfind-links = {index}\n")
        (folder / "uv.toml").write_text(f'no-index = true\nfind-links = ["{index}"]\n')
        self.env |= {"PIP_CONF": str(folder / "pip.conf"), "UV_CONF": str(folder / "uv.toml"), "BASE_IMAGE": base}
        self.files = ["-f", str(folder / "compose.yaml")]
        self.override("services: {prepare: {build: {network: host}}}")  # the index is on this machine's loopback

    def compose(self, *words: str, check: bool = True, timeout_s: float = 400, **env: str) -> str:
        options = ["--env-file", os.devnull, "--project-directory", str(self.folder), "-p", self.name, *self.files]
        return docker("compose", *options, *words, check=check, timeout_s=timeout_s, **{**self.env, **env})

    def remove(self) -> None:
        images = self.compose("config", "--images", check=False).split()
        super().remove()
        docker("rmi", "-f", *images, check=False)


def logs_of_pods(made: repositories.Repository, folder: Path) -> str:
    """Train in the pods of the repository's manifest, and kill the last rank on the way. Returns their logs."""
    (manifest,) = (path for path in (made.folder / "k8s").iterdir() if path.name != "volume.yaml")
    pods = Cluster(folder, str(manifest), [])
    try:
        if (made.folder / "points").exists():
            shutil.copytree(made.folder / "points", pods.data / "points")
        pods.start()
        wait_for("step 20", lambda: "step 20" in pods.log(0), timeout_s=300, log=pods.logs)
        last = next(each for each in pods.processes_now(made.nodes - 1) if rank_of(each) is not None)
        last.send_signal(signal.SIGKILL)
        assert pods.codes() == [0] * made.nodes, pods.logs()
        assert f"rank {made.nodes - 1} on {pods.pods[-1]['name']} ended with 137" in pods.logs(), pods.logs()
        return pods.logs()
    finally:
        pods.remove()


@pytest.mark.parametrize("make", [repositories.one_gpu, repositories.package, repositories.own_loop])
def test_compose_stranger_trains_loses_a_rank_and_ends_with_the_weights_of_this_machine(
    make: Callable[[Path, str], repositories.Repository], tmp_path: Path, rankup: Path, base: str, index: str
) -> None:
    made = make(tmp_path / "mine", index)
    line = f"{rankup} add compose k8s --image rankup-test:{secrets.token_hex(4)} {made.options} {made.script}"
    subprocess.run(line.split(), cwd=made.folder, env=environment({"PYTHONPATH": ""}), check=True)
    nodes = Stranger(made.folder, base, index)
    last = made.nodes - 1
    try:
        nodes.compose("build")
        nodes.up()
        wait_for("step 20", lambda: "step 20" in nodes.logs(), log=nodes.logs)
        nodes.ranks(f"node{last}")[0].send_signal(signal.SIGKILL)
        assert nodes.codes(*[f"node{number}" for number in range(made.nodes)]) == [0] * made.nodes, nodes.logs()
        logs = nodes.logs()
        on_pods = logs_of_pods(made, tmp_path / "pods")
    finally:
        nodes.remove()
    assert f"rank {last} on node{last} ended with 137" in logs, logs
    digests = re.findall(r"digest (\w+) extra-word", logs)
    (made.folder / "extra.py").write_text('WORD = "extra-word"\n')
    line = f"{rankup} launch --nproc {made.nodes} --name here {made.script}"
    here = subprocess.run(
        line.split(), cwd=made.folder, env=environment({"PYTHONPATH": f"{made.folder}:{made.folder}/src"}), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=True,
    )
    assert digests == re.findall(r"digest (\w+) extra-word", here.stdout)
    assert digests == re.findall(r"digest (\w+) extra-word", on_pods)
    assert len(digests) == 1


def test_compose_example_repository_trains_from_a_copy_elsewhere(
    tmp_path: Path, rankup: Path, base: str, index: str
) -> None:
    """tests/files/ shows that `rankup add` writes its files today. rankup comes from the index."""
    for name in ("mine", "here"):
        shutil.copytree(ROOT / "train" / "examples" / "repository", tmp_path / name)
    (tmp_path / "mine" / "train.py").chmod(0o600)  # as with umask 077; in the image another user reads it
    nodes = Stranger(tmp_path / "mine", base, index)
    try:
        nodes.compose("build")
        nodes.up()
        assert nodes.codes() == [0, 0], nodes.logs()
    finally:
        nodes.remove()
    here = [rankup, "launch", "--nproc", "2", "train.py"]
    subprocess.run(here, cwd=tmp_path / "here", env=environment({"OMP_NUM_THREADS": "1"}), check=True)
    one, other = (torch.load(tmp_path / name / "runs" / "ddp.pt") for name in ("mine", "here"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert one.keys() == other.keys()
