"""k8s/: each manifest and overlay is what a cluster accepts, hardened, and runs a command that the program understands."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
from jobs import ROOT
from kube import EVERY, K8S, OVERLAYS, problems, rendered, unrestricted
from kubeflow import command_line, environment, pods_of
from torch.distributed.run import get_args_parser

from train import errors
from train.config import check_world_size, load_config, parse_args
from train.env import outside_pod, read_env
from train.main import COMMANDS, EXTRA

Object = dict[str, Any]
TRAINING = [what for what in EVERY if what not in ("overlays/board", "overlays/debug")]


def kind(what: str, kind: str) -> Object:
    (found,) = [each for each in rendered(what) if each["kind"] == kind]
    return found


def test_k8s_overlays_are_all_there() -> None:
    assert {"gpu", "elastic", "kueue", "volcano", "istio", "debug", "board"} <= set(OVERLAYS)


def test_k8s_pytorchjob_read_alone_is_what_the_overlays_build_on() -> None:
    alone, base = ({each["kind"]: each for each in rendered(what)} for what in ("pytorchjob.yaml", "base"))
    assert alone == base
    assert (K8S / "pytorchjob.yaml").resolve() == K8S / "base" / "pytorchjob.yaml"


@pytest.mark.parametrize("what", EVERY)
def test_k8s_manifests_fit_the_schemas(what: str) -> None:
    for document in rendered(what):
        assert problems(document) == []


def _set(*path: str | int, value: Any) -> Callable[[Object], None]:
    def mutate(document: Object) -> None:
        for step in path[:-1]:
            document = document[step]  # type: ignore[index]
        document[path[-1]] = value  # type: ignore[index]

    return mutate


MASTER = ("spec", "pytorchReplicaSpecs", "Master")
POD = (*MASTER, "template", "spec")
NODE = ("spec", "template", "spec", "replicatedJobs", 0)


@pytest.mark.parametrize(
    "mutate",
    [
        _set("spec", "nprocPerNode", value=1),
        _set(*POD, "containers", 0, "name", value="trainer"),
        _set(*MASTER, "replicas", value=2),
        _set("spec", "ttlSecondsAfterFinished", value=1),
        _set("spec", "runPolicy", "ttlAfterFinished", value=1),
        _set(*MASTER, "restartPolicy", value=1),
        _set(*POD, "containers", 0, "volumeMount", value=[]),
        _set(*POD, "containers", 0, "resources", "limits", value="2Gi"),
        _set(*POD, "terminationGracePeriodSeconds", value="long"),
        _set("spec", "pytorchReplicaSpecs", "Launcher", value={"replicas": 1, "template": {}}),
        _set("metadata", "name", value="1st"),
        lambda job: job["spec"].update(elasticPolicy={}) or job["spec"]["pytorchReplicaSpecs"].pop("Worker"),
    ],
)
def test_k8s_mistakes_in_a_pytorchjob_are_found(mutate: Callable[[Object], None]) -> None:
    job = copy.deepcopy(kind("pytorchjob.yaml", "PyTorchJob"))
    assert problems(job) == []
    mutate(job)
    assert problems(job) != []


@pytest.mark.parametrize(
    ("what", "of", "mutate"),
    [
        ("job.yaml", "Job", _set("spec", "completionMod", value="Indexed")),
        ("job.yaml", "Job", _set("spec", "completions", value="2")),
        ("job.yaml", "Service", _set("spec", "publishNotReadyAddresses", value="yes")),
        ("trainjob.yaml", "TrainJob", _set("spec", "trainer", "numNodes", value="2")),
        ("trainjob.yaml", "TrainJob", _set("spec", "nodes", value=2)),
        ("trainjob.yaml", "TrainingRuntime", _set(*NODE, "template", "spec", "x", value=1)),
    ],
)
def test_k8s_mistakes_in_other_objects_are_found(what: str, of: str, mutate: Callable[[Object], None]) -> None:
    document = copy.deepcopy(kind(what, of))
    mutate(document)
    assert problems(document) != []


@pytest.mark.parametrize("what", EVERY)
def test_k8s_pods_are_restricted(what: str) -> None:
    pods = pods_of(rendered(what))
    assert pods
    for pod in pods:
        # The operator's own container, without a security context: k8s/README.md says what namespaces then need
        pod["spec"]["initContainers"] = [each for each in pod["spec"].get("initContainers", []) if each["name"] != "init-pytorch"]
        assert unrestricted(pod) == []


@pytest.mark.parametrize(
    "mutate",
    [
        _set("spec", "hostNetwork", value=True),
        _set("spec", "securityContext", "runAsNonRoot", value=False),
        _set("spec", "securityContext", "runAsUser", value=0),
        _set("spec", "securityContext", "seccompProfile", value={"type": "Unconfined"}),
        _set("spec", "automountServiceAccountToken", value=True),
        _set("spec", "volumes", 0, value={"name": "tmp", "hostPath": {"path": "/tmp"}}),
        _set("spec", "containers", 0, "securityContext", value={}),
        _set("spec", "containers", 0, "securityContext", "privileged", value=True),
        _set("spec", "containers", 0, "securityContext", "readOnlyRootFilesystem", value=False),
        _set("spec", "containers", 0, "securityContext", "capabilities", "add", value=["NET_ADMIN"]),
        _set("spec", "containers", 0, "securityContext", "allowPrivilegeEscalation", value=True),
    ],
)
def test_k8s_pods_that_are_not_restricted_are_found(mutate: Callable[[Object], None]) -> None:
    pod = copy.deepcopy(pods_of(rendered("job.yaml"))[0])
    assert unrestricted(pod) == []
    mutate(pod)
    assert unrestricted(pod) != []


@pytest.mark.parametrize("what", EVERY)
def test_k8s_containers_have_limits_and_a_fixed_image(what: str) -> None:
    for pod in pods_of(rendered(what)):
        (container,) = pod["spec"]["containers"]
        for amount in ("requests", "limits"):
            assert {"cpu", "memory"} <= set(container["resources"][amount])
        assert container["image"].partition(":")[2] not in ("", "latest")
        assert container["imagePullPolicy"] == "IfNotPresent"
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        assert set(mounts.values()) == set(volumes)
        if what in TRAINING:
            assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
            assert volumes[mounts["/dev/shm"]]["emptyDir"]["sizeLimit"]


@pytest.mark.parametrize("what", TRAINING)
def test_k8s_pods_run_what_the_program_understands(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    pods = pods_of(rendered(what))
    assert len(pods) >= 2
    for rank, pod in enumerate(pods):
        words, values = command_line(pod), environment(pod)
        at = words.index("train.main") + 1
        start, words = words[:at], words[at:]
        parsed = parse_args(words, extra=EXTRA, commands=tuple(COMMANDS))
        config = load_config(parsed.settings, file=parsed.config_file, mistakes=parsed.mistakes)
        if start[0] == "torchrun":
            get_args_parser().parse_args(start[1:])
            least, most = (int(count) for count in values["PET_NNODES"].split(":"))
            assert config.batch_size % math.lcm(*range(least, most + 1)) == 0
            continue
        assert start == ["python", "-m", "train.main"]
        if parsed.command == "launch":  # told as the pod is: otherwise it would be refused
            assert not read_env(outside_pod(values, num_nodes=parsed.extra["nnodes"], nproc=parsed.extra["nproc"])).distributed
            assert (parsed.extra["nnodes"], parsed.extra["node_rank"]) == (len(pods), rank)
            check_world_size(config, parsed.extra["nproc"] * len(pods))
        else:
            launch = read_env(values)
            assert (launch.rank, launch.world_size, parsed.command) == (rank, len(pods), "train")
            check_world_size(config, launch.world_size)


@pytest.mark.parametrize("what", TRAINING)
def test_k8s_pods_of_a_job_reach_each_other_alone(what: str) -> None:
    policy = kind(what, "NetworkPolicy")["spec"]
    wanted = policy["podSelector"]["matchLabels"]
    assert policy["ingress"] == [{"from": [{"podSelector": {"matchLabels": wanted}}]}]
    for pod in pods_of(rendered(what)):
        assert wanted.items() <= pod["labels"].items()
    for pod in pods_of(rendered("overlays/board")):
        assert not wanted.items() <= pod["labels"].items()


@pytest.mark.parametrize("what", TRAINING)
def test_k8s_rank_0_has_the_volume_and_time_to_save(what: str) -> None:
    pods = pods_of(rendered(what))
    claim = kind(what, "PersistentVolumeClaim")
    volumes = {volume["name"]: volume for volume in pods[0]["spec"]["volumes"]}
    assert volumes["runs"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    for pod in pods:
        assert pod["spec"]["terminationGracePeriodSeconds"] > 60


def test_k8s_only_the_master_of_a_pytorchjob_mounts_the_volume() -> None:
    for pod in pods_of(rendered("pytorchjob.yaml"))[1:]:
        assert all("persistentVolumeClaim" not in volume for volume in pod["spec"]["volumes"])


@pytest.mark.parametrize("what", ["job.yaml", "trainjob.yaml"])
def test_k8s_job_ends_at_once_for_what_trying_again_cannot_help(what: str) -> None:
    job = kind(what, "Job")["spec"] if what == "job.yaml" else \
        kind(what, "TrainingRuntime")["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]  # fmt: skip
    codes = {value for name, value in vars(errors).items() if name.isupper() and isinstance(value, int) and 0 < value < 128}
    first, second, third = job["podFailurePolicy"]["rules"]
    (container,) = job["template"]["spec"]["containers"]
    assert first == {
        "action": "FailJob",
        "onExitCodes": {"containerName": container["name"], "operator": "In", "values": sorted(codes)},
    }
    assert second == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    stopped = {"containerName": container["name"], "operator": "In", "values": [errors.STOPPED]}
    assert third == {"action": "Ignore", "onExitCodes": stopped}
    assert job["template"]["spec"]["restartPolicy"] == "Never"
    assert job["backoffLimit"] > 0


def test_k8s_pytorchjob_decides_by_exit_codes_that_reach_the_operator() -> None:
    for what in TRAINING:
        for document in rendered(what):
            if document["kind"] == "PyTorchJob":
                policies = {each["restartPolicy"] for each in document["spec"]["pytorchReplicaSpecs"].values()}
                # torchrun turns every code into 1, which ExitCode never retries
                by_torchrun = any("torchrun" in command_line(pod) for pod in pods_of([document]))
                assert policies == ({"OnFailure"} if by_torchrun else {"ExitCode"})
                assert "backoffLimit" in document["spec"]["runPolicy"] or not by_torchrun


def test_k8s_job_counts_its_pods_once() -> None:
    job = kind("job.yaml", "Job")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    world_size = {each["name"]: each.get("value") for each in container["env"]}["WORLD_SIZE"]
    assert world_size == str(job["spec"]["completions"]) == str(job["spec"]["parallelism"])
    service = kind("job.yaml", "Service")
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert service["metadata"]["name"] == job["spec"]["template"]["spec"]["subdomain"]
    first = pods_of([job])[0]
    assert environment(first)["MASTER_ADDR"] == f"{first['name']}.{service['metadata']['name']}"
    assert service["spec"]["selector"].items() <= first["labels"].items()


def test_k8s_gpu_asks_for_as_many_devices_as_processes() -> None:
    job = kind("overlays/gpu", "PyTorchJob")
    for pod in pods_of([job]):
        (container,) = pod["spec"]["containers"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == job["spec"]["nprocPerNode"] != "1"
        assert pod["spec"]["affinity"]["podAntiAffinity"]


def test_k8s_elastic_has_no_master_and_keeps_the_least_number() -> None:
    job = kind("overlays/elastic", "PyTorchJob")["spec"]
    assert list(job["pytorchReplicaSpecs"]) == ["Worker"]
    budget = kind("overlays/elastic", "PodDisruptionBudget")["spec"]
    assert budget["minAvailable"] == job["elasticPolicy"]["minReplicas"]
    assert not any(pod["spec"].get("initContainers") for pod in pods_of(rendered("overlays/elastic")))


def test_k8s_istio_leaves_every_pod_alone() -> None:
    for replica in kind("overlays/istio", "PyTorchJob")["spec"]["pytorchReplicaSpecs"].values():
        for where in ("labels", "annotations"):
            assert replica["template"]["metadata"][where]["sidecar.istio.io/inject"] == "false"


def test_k8s_all_pods_or_none() -> None:
    kueue = kind("overlays/kueue", "PyTorchJob")
    assert kueue["metadata"]["labels"]["kueue.x-k8s.io/queue-name"]
    assert kueue["spec"]["runPolicy"]["suspend"] is True
    assert {pod["spec"]["schedulerName"] for pod in pods_of(rendered("overlays/volcano"))} == {"volcano"}


def test_k8s_board_reads_the_volume_inside_the_cluster_alone() -> None:
    assert kind("overlays/board", "Service")["spec"]["type"] == "ClusterIP"
    (pod,) = pods_of(rendered("overlays/board"))
    volumes = {each["name"]: each.get("persistentVolumeClaim") for each in pod["spec"]["volumes"]}
    claims = {name: claim["claimName"] for name, claim in volumes.items() if claim}
    assert list(claims.values()) == [kind("pytorchjob.yaml", "PersistentVolumeClaim")["metadata"]["name"]]
    assert all(mount["readOnly"] for mount in pod["spec"]["containers"][0]["volumeMounts"] if mount["name"] in claims)


def test_k8s_readme_names_every_overlay() -> None:
    text = (K8S / "README.md").read_text()
    for name in OVERLAYS:
        assert f"k8s/overlays/{name}`" in text
