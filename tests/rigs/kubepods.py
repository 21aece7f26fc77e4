"""The pods of a manifest as real containers: command, environment, user, read-only root, limits, volumes and names."""

import json
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from tests.rigs.containers import docker, rank_of, wait_for
from tests.rigs.jobs import ROOT, changes
from tests.rigs.kube import rendered
from tests.rigs.kubeflow import OWNERS, command_line, environment, pods_of, verdict

Object = dict[str, Any]
JOB = ["--name", "job", "--dataset", "digits", "--model", "mlp", "--batch-size", "96",
       "--tensorboard=false"]
SHORT = [*JOB, "--max-steps", "30"]
# Enough slow steps to be hit in the middle on any machine. The run saves often
LONG = [*JOB, "--max-steps", "1000", "--epochs", "300", "--save-every-steps", "20", "--log-every-steps", "5",
        "--evaluate-every-epochs", "20"]
SLOW = ["--workload", "slow_steps:build"]


def _size(quantity: str) -> str:
    """Return an amount of memory as the container engine writes it."""
    return quantity.replace("Gi", "g").replace("Mi", "m")


class Cluster:
    """The pods of one manifest, on a network of their own.

    A claim is a folder, an emptyDir a tmpfs, or a folder if it has no limit, a Secret or a ConfigMap a read-only folder
    of its files. The container engine acts as the kubelet, and the test decides as an operator would."""

    def __init__(self, folder: Path, what: str, settings: Sequence[str]) -> None:
        self.name = f"rankup-k8s-{secrets.token_hex(4)}"
        self.settings = list(settings)
        documents = rendered(what)
        self.pods = pods_of(documents)
        (self.owner,) = [each for each in documents if each["kind"] in OWNERS]
        self.runs, self.data = folder / "claim", folder / "data"  # of the claims
        self.config = folder / "config"  # of the only ConfigMap
        self.runs.mkdir(parents=True)
        self.runs.chmod(0o777)
        docker("network", "create", self.name)

    def container(self, index: int) -> str:
        return f"{self.name}-{index}"

    def start(self, *indices: int) -> None:
        """Start these pods (default: all) as the kubelet does."""
        for index in indices or range(len(self.pods)):
            pod = self.pods[index]
            for step in pod["spec"].get("initContainers", []):
                if step["name"] == "rankup-code":  # not the operator's, which looks up a name
                    docker("run", "--rm", *self._words(pod, index, step, step["command"]))
            main, command = pod["spec"]["containers"][0], [*command_line(pod), *self.settings]
            docker("run", "--detach", "--name", self.container(index), *self._words(pod, index, main, command))

    def _words(self, pod: Object, index: int, container: Object, command: Sequence[str]) -> list[str]:
        """Return the words of `docker run` for a container of a pod."""
        spec, user = pod["spec"], pod["spec"]["securityContext"]
        assert container["securityContext"]["readOnlyRootFilesystem"]
        names = [pod["name"], *([f"{pod['name']}.{spec['subdomain']}"] if "subdomain" in spec else [])]
        words = ["--network", self.name, *(word for name in names for word in ("--network-alias", name))]
        words += ["--hostname", pod["name"], "--user", f"{user['runAsUser']}:{user['runAsGroup']}", "--read-only"]
        words += ["--cap-drop", "ALL", "--security-opt", "no-new-privileges"]
        folder = docker("image", "inspect", "-f", "{{.Config.WorkingDir}}", container["image"]).strip()
        words += ["--volume", f"{ROOT}/tests/rigs/slow_steps.py:{folder}/slow_steps.py:ro"]
        words += ["--memory", _size(container["resources"]["limits"]["memory"])]
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        for mount in container["volumeMounts"]:
            words += self._volume(volumes[mount["name"]], mount, index)
        words += ["--workdir", container["workingDir"]] if "workingDir" in container else []
        for name, value in environment(pod).items():
            words += ["--env", f"{name}={value}"]
        return [*words, "--entrypoint", command[0], container["image"], *command[1:]]

    def _volume(self, volume: Object, mount: Object, index: int) -> list[str]:
        path, mode = mount["mountPath"], ":ro" if mount.get("readOnly") else ""
        if "persistentVolumeClaim" in volume:
            folder = self.runs if volume["name"] == "runs" else self.data
            return ["--volume", f"{folder / mount.get('subPath', '')}:{path}{mode}"]
        if "secret" in volume:
            return ["--volume", f"{self._secret(volume['secret']['defaultMode'])}:{path}:ro"]
        if "configMap" in volume or "sizeLimit" not in volume["emptyDir"]:
            folder = self.config if "configMap" in volume else self.runs.with_name(f"{volume['name']}-{index}")
            folder.mkdir(exist_ok=True)
            folder.chmod(0o777)
            return ["--volume", f"{folder}:{path}{mode}"]
        return ["--tmpfs", f"{path}:mode=1777,size={_size(volume['emptyDir']['sizeLimit'])}"]

    def _secret(self, mode: int) -> Path:
        """Write the secret as a kubelet does for a pod with an fsGroup: root owns it, and its group is the pod's."""
        file = self.runs.with_name("secret") / "secret"
        if not file.exists():
            file.parent.mkdir()
            file.write_text(secrets.token_hex(32))
            os.chown(file, 0, self.pods[0]["spec"]["securityContext"]["fsGroup"])
            file.chmod(mode)
        return file.parent

    # Containers -------------------------------------------------------------------------------------------------------

    def state(self, index: int) -> Object:
        found: Object = json.loads(docker("inspect", self.container(index)))[0]["State"]
        return found

    def address(self, index: int) -> str:
        (network,) = json.loads(docker("inspect", self.container(index)))[0]["NetworkSettings"]["Networks"].values()
        return str(network["IPAddress"])

    def log(self, index: int) -> str:
        return docker("logs", self.container(index), check=False)

    def logs(self) -> str:
        return "\n".join(self.log(index) for index in range(len(self.pods)))

    def codes(self, *indices: int) -> list[int]:
        """Wait until these pods (default: all) have ended, and return their exit codes."""
        which = indices or tuple(range(len(self.pods)))
        over = ("exited", "dead")
        wait_for(
            f"the end of pods {which}", lambda: all(self.state(index)["Status"] in over for index in which),
            timeout_s=600, log=self.logs,
        )
        return [self.state(index)["ExitCode"] for index in which]

    def replace(self, index: int) -> None:
        """Start a new pod in place of one that has ended."""
        docker("rm", self.container(index))
        self.start(index)

    def retry(self, codes: Mapping[int, int]) -> int:
        """Start new pods as the manifest's rules say. Return how many the job counts. `codes`: the code of each ended
        pod."""
        verdicts = {index: verdict(self.owner, code) for index, code in codes.items()}
        assert set(verdicts.values()) <= {"done", "new", "counted"}, f"{codes}: {verdicts}\n{self.logs()}"
        for index, decided in verdicts.items():
            if decided != "done":
                self.replace(index)
        return list(verdicts.values()).count("counted")

    def remove(self) -> None:
        for index in range(len(self.pods)):
            docker("rm", "-f", self.container(index), check=False)
        docker("network", "rm", self.name, check=False)

    # The run ----------------------------------------------------------------------------------------------------------

    def saved(self) -> list[str]:
        return sorted(path.name for path in (self.runs / "job" / "checkpoints").glob("step-*"))

    def hit(self, index: int, number: int, *, ranks: int = 2) -> None:
        """Send a signal to a pod's first process from outside, once `ranks` ranks train together and have a checkpoint.
        After `docker kill` the engine would not restart the container, as after a user's request."""
        self.processes(index, ranks=ranks)[0].send_signal(number)

    def hit_rank(self, index: int, number: int) -> None:
        """Send a signal to the rank in a pod, under the same condition as `hit`."""
        (rank,) = [process for process in self.processes(index) if rank_of(process) == index]
        rank.send_signal(number)

    def processes(self, index: int, *, ranks: int = 2) -> list[psutil.Process]:
        """Return all processes of a pod, the first one first, once `ranks` ranks train and have a checkpoint."""
        ready = f"r0/{ranks}] ready"
        wait_for(f"{ready}, a checkpoint", lambda: ready in self.log(0) and self.saved(), timeout_s=300, log=self.logs)
        return self.processes_now(index)

    def processes_now(self, index: int) -> list[psutil.Process]:
        """Return all processes of a running pod, the first one first."""
        pid = self.state(index)["Pid"]
        assert pid, self.logs()
        first = psutil.Process(pid)
        return [first, *first.children(recursive=True)]

    def scale(self, num_pods: int) -> None:
        """Set the number of pods of a PyTorchJob for the next `start`, as the command in k8s/ends.md does."""
        self.owner["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"] = num_pods
        self.pods = pods_of([self.owner])

    def stop(self, *indices: int) -> None:
        """Send SIGTERM to the first process of each pod, as the kubelet does."""
        for index in indices:
            docker("kill", "--signal", "TERM", self.container(index))

    def changes(self) -> list[int]:
        """Return how many ranks trained after each change of nodes."""
        return [number for _, number in changes(self.runs / "job")]

    def read(self, name: str) -> Object:
        """Return result.json or status.json of the run."""
        found: Object = json.loads((self.runs / "job" / name).read_text())
        return found
