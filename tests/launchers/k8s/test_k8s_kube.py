"""k8s/kube.sh runs the right commands in the right order. kind, minikube, docker and kubectl are stand-ins here."""

import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.rigs.jobs import ROOT
from tests.rigs.kube import IMAGE

# Each stand-in appends its command to $CALLS. kubectl prints the states in $STATES in turn, then repeats the last one.
TOOL = '#!/bin/bash\necho "$(basename "$0") $*" >> "$CALLS"\n'
KIND = 'if [[ $* == "get clusters" ]]; then cat "$CLUSTERS"; fi\n'
MINIKUBE = 'if [[ $* == *status ]]; then grep -qx "$2" "$CLUSTERS"; fi\n'
DOCKER = 'if [[ $1 == image ]]; then [[ $* == *"$THERE"* ]]; fi\n'
KUBECTL = r"""
case "$*" in
  *"version --client"*) echo "Client Version: v1.32.4" ;;
  *"get crd"*) test -e "$CRD" ;;
  *"get pods"*--sort-by*) state=$(head -1 "$STATES"); echo "${state#*|}" ;;
  *"get "*conditions*) state=$(head -1 "$STATES"); echo "${state%%|*}"
    if (($(wc -l < "$STATES") > 1)); then sed -i 1d "$STATES"; fi ;;
  *logs*) echo "log of ${*: -1}" ;;
esac
"""


@dataclass
class Tools:
    """Stand-ins for the four tools, in a folder that comes first in PATH."""

    folder: Path
    env: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, text in {"kind": KIND, "minikube": MINIKUBE, "docker": DOCKER, "kubectl": KUBECTL}.items():
            (self.folder / name).write_text(TOOL + text)
            (self.folder / name).chmod(0o755)
        files = {name: str(self.folder / f"{name.lower()}.txt") for name in ("CALLS", "CLUSTERS", "STATES", "CRD")}
        self.env = {**files, "THERE": IMAGE, "POLL_S": "0.01"}
        (self.folder / "clusters.txt").write_text("another\n")
        self.states("Created Running|u1 rankup-master-0 Running", "Created Succeeded|u1 rankup-master-0 Succeeded")

    def states(self, *lines: str) -> None:
        (self.folder / "states.txt").write_text("".join(f"{line}\n" for line in lines))

    def run(self, *words: str, **env: str) -> "subprocess.CompletedProcess[str]":
        path = f"{self.folder}:{os.environ['PATH']}"
        clean = {k: v for k, v in os.environ.items() if k not in ("FILE", "CLUSTER", "IMAGE")}
        return subprocess.run(
            [ROOT / "k8s" / "kube.sh", *words], env={**clean, **self.env, "PATH": path, **env}, capture_output=True,
            text=True, timeout=240, check=False,
        )

    def calls(self) -> list[str]:
        """Return the commands that were run, except queries."""
        path = self.folder / "calls.txt"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line for line in lines if not any(word in line for word in ("get ", "version", "inspect", " status"))]


@pytest.fixture
def tools(tmp_path: Path) -> Tools:
    return Tools(tmp_path)


def test_kube_kind_creates_a_cluster_and_follows_the_job(tools: Tools) -> None:
    done = tools.run("kind")
    assert done.returncode == 0, done.stderr
    steps = ["kind create cluster --name rankup", f"kind load docker-image {IMAGE} --name rankup",
             "apply --server-side -k", "apply -f k8s/volume.yaml", "apply -f k8s/pytorchjob.yaml",
             "logs --follow rankup-master-0"]
    calls = [call for call in tools.calls() if "rollout" not in call]
    assert len(calls) == len(steps), calls
    assert all(step in call for step, call in zip(steps, calls, strict=True)), calls
    # No command reaches the user's own cluster
    assert all("--context kind-rankup" in call for call in calls if call.startswith("kubectl"))
    assert "log of rankup-master-0" in done.stdout
    assert "the job has finished" in done.stdout
    # A second run creates nothing again
    (tools.folder / "clusters.txt").write_text("rankup\n")
    (tools.folder / "crd.txt").touch()
    (tools.folder / "calls.txt").unlink()
    assert tools.run("kind").returncode == 0
    assert not [call for call in tools.calls() if "create cluster" in call or "--server-side" in call]


def test_kube_minikube_has_its_own_profile_and_a_job_needs_no_operator(tools: Tools) -> None:
    tools.states("Complete|u1 rankup-0-x7k2p Succeeded")
    done = tools.run("minikube", FILE="job", CLUSTER="mine", IMAGE="own:1", THERE="own:1")
    assert done.returncode == 0, done.stderr
    start, load, *applied = [call for call in tools.calls() if "logs" not in call]
    assert (start, load) == ("minikube -p mine start", "minikube -p mine image load own:1")
    assert applied == [f"kubectl --context mine apply -f k8s/{file}.yaml" for file in ("volume", "job")]


def test_kube_says_that_a_job_failed(tools: Tools) -> None:
    tools.states("Created|u1 rankup-master-0 Pending", "Created Failed|u1 rankup-master-0 Failed")
    done = tools.run("logs")
    assert done.returncode == 1
    assert "log of rankup-master-0" in done.stdout  # although kube.sh never saw it running
    assert "the job failed" in done.stderr


def test_kube_follows_the_new_pod_after_a_lost_one(tools: Tools) -> None:
    tools.states(
        "Running|u1 rankup-master-0 Running", "Restarting|u1 rankup-master-0 Failed", "Restarting|",
        "Restarting|u2 rankup-master-0 Pending", "Running|u2 rankup-master-0 Running",
        "Succeeded|u2 rankup-master-0 Succeeded",
    )
    done = tools.run("logs")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("log of rankup-master-0") == 2


@pytest.mark.parametrize(
    ("words", "env", "said"),
    [
        (["kind"], {"IMAGE": "none:1"}, "no image none:1: make image"),
        (["kind"], {"FILE": "gpus"}, "FILE must be pytorchjob, job"),
        (["delete"], {"FILE": "volume"}, "FILE must be pytorchjob, job"),
        (["kind"], {"FILE": "trainjob"}, "does not support trainjob"),
        ([], {}, "usage:"),
    ],
)
def test_kube_refuses_a_mistake_with_the_reason(tools: Tools, words: list[str], env: dict[str, str], said: str) -> None:
    done = tools.run(*words, **env)
    assert done.returncode == 2
    assert said in done.stderr
    assert not [call for call in tools.calls() if " apply " in call or " delete " in call]


def test_kube_delete_leaves_the_volume(tools: Tools) -> None:
    assert tools.run("delete").returncode == 0
    (call,) = tools.calls()
    assert "kubectl delete -f k8s/pytorchjob.yaml" in call
