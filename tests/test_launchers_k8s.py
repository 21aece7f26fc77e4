"""The pods of k8s/ as real containers: their commands, environment, user, read-only root, limits and names, trained and killed.
What a cluster decides of an exit code is decided here, by the rules that k8s/README.md states."""

import json
import os
import secrets
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from containers import digest_by_torchrun, docker, wait_for
from kube import rendered
from kubeflow import command_line, environment, pods_of

pytestmark = pytest.mark.timeout(600)
Object = dict[str, Any]
JOB = ["--name", "job", "--dataset", "digits", "--model", "mlp", "--batch-size", "96"]
SHORT = [*JOB, "--max-steps", "30"]
# Long enough to be hit in the middle, whatever else the machine does: it is asked to save often
LONG = [*JOB, "--max-steps", "600", "--epochs", "100", "--save-every-steps", "20", "--log-every-steps", "5"]


class Cluster:
    """The pods of one manifest, on a network of their own; each claim is a folder, and so is each emptyDir that is not tmpfs."""

    def __init__(self, folder: Path, what: str, settings: list[str]) -> None:
        self.name = f"rankup-k8s-{secrets.token_hex(4)}"
        self.folder, self.settings = folder, settings
        self.pods = pods_of(rendered(what))
        self.runs = folder / "claim"
        self.runs.mkdir(mode=0o777)
        self.runs.chmod(0o777)
        docker("network", "create", self.name)

    def container(self, index: int) -> str:
        return f"{self.name}-{index}"

    def start(self, index: int) -> None:
        """One pod, as the kubelet starts it."""
        pod, spec = self.pods[index], self.pods[index]["spec"]
        (container,), user = spec["containers"], spec["securityContext"]
        assert container["securityContext"]["readOnlyRootFilesystem"]
        limits = container["resources"]["limits"]
        names = [pod["name"], *([f"{pod['name']}.{spec['subdomain']}"] if "subdomain" in spec else [])]
        words = ["--network", self.name, *(word for name in names for word in ("--network-alias", name))]
        words += ["--hostname", pod["name"], "--user", f"{user['runAsUser']}:{user['runAsGroup']}", "--read-only"]
        words += ["--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--memory", limits["memory"].replace("Gi", "g")]
        for volume in spec["volumes"]:
            (mount,) = [each["mountPath"] for each in container["volumeMounts"] if each["name"] == volume["name"]]
            if "persistentVolumeClaim" in volume:
                words += ["--volume", f"{self.runs}:{mount}"]
            else:
                size = volume["emptyDir"]["sizeLimit"].replace("Gi", "g").replace("Mi", "m")
                words += ["--tmpfs", f"{mount}:mode=1777,size={size}"]
        for name, value in environment(pod).items():
            words += ["--env", f"{name}={value}"]
        program, *arguments = self.command(pod)
        words += ["--entrypoint", program, container["image"], *arguments]
        docker("run", "--detach", "--name", self.container(index), *words)

    def command(self, pod: Object) -> list[str]:
        """The pod's own words, with a job that takes seconds behind them."""
        return [*command_line(pod), *self.settings]

    def start_all(self) -> None:
        for index in range(len(self.pods)):
            self.start(index)

    def state(self, index: int) -> Object:
        found: Object = json.loads(docker("inspect", self.container(index)))[0]["State"]
        return found

    def ended(self, index: int) -> bool:
        return bool(self.state(index)["Status"] == "exited")

    def logs(self) -> str:
        return "\n".join(docker("logs", self.container(index), check=False) for index in range(len(self.pods)))

    def codes(self) -> list[int]:
        """Wait until all pods have ended; their exit codes."""
        indices = range(len(self.pods))
        wait_for("the end of all pods", lambda: all(map(self.ended, indices)), timeout_s=240, log=self.logs)
        return [self.state(index)["ExitCode"] for index in indices]

    def retry(self, codes: list[int]) -> None:
        """What the operator's ExitCode and the Job's rules come to: a new pod from 128 on, and nothing after a permanent code."""
        assert not [code for code in codes if 0 < code < 128], self.logs()
        for index, code in enumerate(codes):
            if code >= 128:
                docker("rm", self.container(index))
                self.start(index)

    def step(self) -> int:
        try:
            lines = (self.runs / "job" / "metrics.jsonl").read_text().splitlines()
            return max((json.loads(line)["step"] for line in lines[-3:]), default=0)
        except (OSError, ValueError):
            return 0

    def saved(self) -> list[str]:
        return sorted(path.name for path in (self.runs / "job" / "checkpoints").glob("step-*"))

    def wait_for_save(self) -> None:
        """Until the run is under way and has a checkpoint."""
        wait_for("a checkpoint", lambda: self.saved() and self.step() >= 20, timeout_s=240, log=self.logs)

    def digest(self) -> str:
        digest: str = json.loads((self.runs / "job" / "result.json").read_text())["digest"]
        return digest

    def remove(self) -> None:
        for index in range(len(self.pods)):
            docker("rm", "-f", self.container(index), check=False)
        docker("network", "rm", self.name, check=False)


@pytest.fixture
def clusters(tmp_path: Path, image: str) -> Iterator[Any]:
    """Makes a Cluster; whatever happens, no container and no network of it is left."""
    made: list[Cluster] = []

    def make(what: str, settings: list[str]) -> Cluster:
        folder = tmp_path / f"cluster-{len(made)}"
        folder.mkdir()
        made.append(Cluster(folder, what, settings))
        assert all(pod["spec"]["containers"][0]["image"] == image for pod in made[-1].pods)
        return made[-1]

    yield make
    for cluster in made:
        cluster.remove()


@pytest.fixture(scope="module")
def digest_of_short(tmp_path_factory: pytest.TempPathFactory) -> str:
    return digest_by_torchrun(tmp_path_factory.mktemp("torchrun"), " ".join(SHORT))


@pytest.mark.parametrize("what", ["pytorchjob.yaml", "job.yaml", "trainjob.yaml"])
def test_k8s_pods_train_to_the_digest_of_torchrun(what: str, clusters: Any, digest_of_short: str) -> None:
    cluster = clusters(what, SHORT)
    cluster.start_all()
    assert cluster.codes() == [0, 0], cluster.logs()
    assert cluster.digest() == digest_of_short


def test_k8s_pod_that_is_killed_is_retried_and_resumes_to_the_same_digest(clusters: Any, tmp_path: Path) -> None:
    cluster = clusters("pytorchjob.yaml", LONG)
    cluster.start_all()
    cluster.wait_for_save()
    os.kill(cluster.state(1)["Pid"], signal.SIGKILL)
    codes = cluster.codes()
    assert codes == [171, 137], cluster.logs()
    assert cluster.saved()
    cluster.retry(codes)
    assert cluster.codes() == [0, 0], cluster.logs()
    assert cluster.digest() == digest_by_torchrun(tmp_path / "torchrun", " ".join(LONG))


def test_k8s_mistake_ends_every_pod_with_2_and_is_not_retried(clusters: Any) -> None:
    cluster = clusters("pytorchjob.yaml", [*SHORT, "--lr", "-1"])
    cluster.start_all()
    assert cluster.codes() == [2, 2], cluster.logs()
