"""k8s/kustomization.yaml gives valid pods with the right commands for each kind of job and any mix of components."""

import re
from itertools import product
from typing import Any

import pytest
import yaml

from rankup import cli
from rankup.env.node_env import Limits, read_node_env
from tests.rigs.jobs import ROOT
from tests.rigs.kube import CLAIMS, IMAGE, K8S, TRAINING, kustomized, one, problems, rendered
from tests.rigs.kubeflow import OWNERS, command_line, environment, pods_of
from train.commands.line import parse_args
from train.config import Config, check_run, load_config

Object = dict[str, Any]
CODE = ("own", "script", "")  # these exclude each other
KINDS = ("pytorchjob", "job", "jobset")
ELASTIC = (*KINDS, *(f"{kind}+elastic" for kind in KINDS))


def mixes(kind: str) -> list[str]:
    """Return mixes of the components, each with one kind of code. All and none of the others get every kind of code."""
    chosen = list(product(*(("", name) for name in ("gpu", "fsdp", "kueue+secret"))))
    last = len(chosen) - 1
    codes = [CODE if number in (0, last) else CODE[number % 3 :][:1] for number in range(last + 1)]
    pairs = [(each, code) for each, some in zip(chosen, codes, strict=True) for code in some]
    return ["+".join(filter(None, (kind, *each, code))) for each, code in pairs]


def test_k8s_mixes_have_every_component() -> None:
    there = {path.name for path in (K8S / "components").iterdir() if path.is_dir()} - {"begin"}
    assert there == {name for kind in ELASTIC for mix in mixes(kind) for name in mix.split("+")[1:]}
    assert set(re.findall(r"# - components/(\S+) # EDIT", (K8S / "kustomization.yaml").read_text())) == there


def test_k8s_kustomization_without_components_gives_the_plain_file() -> None:
    for kind in KINDS:
        plain, mixed = ({each["kind"]: each for each in rendered(what)} for what in (f"{kind}.yaml", kind))
        assert plain == mixed


def config_of(words: list[str]) -> Config:
    """Return the program's settings for these arguments."""
    parsed = parse_args(words)
    return load_config(parsed.settings, file=parsed.options.config, mistakes=parsed.mistakes)


def check_command(pods: list[Object], what: str) -> None:
    """Check that each pod runs a valid command line of `launch` and the program, as the right node."""
    nproc = 2 if "gpu" in what else 1
    for rank, pod in enumerate(pods):
        words, values = command_line(pod), environment(pod)
        assert words[:3] == ["python", "train/main.py", "launch"]
        given = cli.COMMANDS["launch"].parse_args(words[3:])
        least, most = given.nnodes or (len(pods), len(pods))
        assert (least, most) == ((2, 4) if "elastic" in what else (2, 2))
        node = read_node_env(
            values, nproc=given.nproc, nnodes=given.nnodes and most, limits=given.nnodes and Limits(least, most)
        )
        assert (node.node_rank, node.num_nodes, node.nproc, given.join_timeout_s) == (rank, most, nproc, 900)
        assert node.master_addr.startswith(pods[0]["name"])
        if "script" in what:
            assert (given.words[0], given.name, given.work_dir) == ("/own/train.py", "rankup", "runs/files/rankup")
        else:
            assert given.words[:2] == ["train/main.py", "train"]
            config = config_of(given.words[1:])
            for count in range(least, most + 1):
                check_run(config, count * nproc)
            assert (config.device, config.parallel) == (
                "cuda" if "gpu" in what else Config().device, "fsdp" if "fsdp" in what else Config().parallel
            )


def check_pods(pods: list[Object], what: str) -> None:
    assert len(pods) >= 2
    for index, pod in enumerate(pods):
        (container,) = pod["spec"]["containers"]
        assert pod["spec"]["terminationGracePeriodSeconds"] > 60  # time to save
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        paths = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
        assert (paths["dshm"], volumes["dshm"]["emptyDir"]["medium"]) == ("/dev/shm", "Memory")
        if index == 0 or "fsdp" in what or "elastic" in what or not what.startswith("pytorchjob"):
            claim = "rankup-runs-shared" if "fsdp" in what else "rankup-runs"
            assert volumes["runs"]["persistentVolumeClaim"]["claimName"] == claim
        else:  # only rank 0 writes
            assert all("persistentVolumeClaim" not in volume for volume in volumes.values())
        file = environment(pod).get("RANKUP_SECRET_FILE", "")
        assert bool(file) == ("secret" in what)
        if file:  # with an fsGroup, a kubelet mounts it as root's file that the group can read
            assert volumes["secret"]["secret"]["defaultMode"] == 0o440
            assert file == f"{paths['secret']}/secret"
        gone = {each.pop("key"): each for each in pod["spec"]["tolerations"]}
        leaves = {"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 30}
        assert gone == dict.fromkeys(("node.kubernetes.io/unreachable", "node.kubernetes.io/not-ready"), leaves)
        if "gpu" in what:
            assert container["resources"]["limits"]["nvidia.com/gpu"] == "2"
            assert list(pod["spec"]["affinity"]) == ["podAntiAffinity"]


# The requirements of the Pod Security profile "restricted", and a read-only root
USER = {"runAsNonRoot": True, "runAsUser": 1000, "runAsGroup": 1000, "fsGroup": 1000,
        "fsGroupChangePolicy": "OnRootMismatch", "seccompProfile": {"type": "RuntimeDefault"}}
RESTRICTED = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
VOLUMES = {"configMap", "emptyDir", "persistentVolumeClaim", "secret"}


def labelled(metadata: Object) -> bool:
    return {f"app.kubernetes.io/{name}" for name in ("name", "instance", "component")} <= metadata["labels"].keys()


def selector_of(document: Object) -> dict[str, str] | None:
    """Return the labels by which an object selects pods, or None."""
    spec = document.get("spec", {})
    found = {"Service": spec.get("selector"), "NetworkPolicy": spec.get("podSelector", {}).get("matchLabels"),
             "PodDisruptionBudget": spec.get("selector", {}).get("matchLabels")}
    return found.get(document["kind"])  # type: ignore[no-any-return]


def check_taken(documents: list[Object]) -> list[Object]:
    """Check that a cluster accepts these objects, even with the profile "restricted". Return their pods."""
    pods = pods_of(documents)
    for document in documents:
        assert problems(document) == []
        assert document["kind"] == "ConfigMap" or labelled(document["metadata"])
        assert "namespace" not in document["metadata"]  # the user chooses it
        if (wanted := selector_of(document)) is not None:
            assert all(wanted.items() <= pod["labels"].items() for pod in pods)
    assert pods
    maps = {each["metadata"]["name"] for each in documents if each["kind"] == "ConfigMap"}
    for pod in pods:
        check_pod(pod, maps)
    return pods


def check_pod(pod: Object, maps: set[str]) -> None:
    spec, volumes = pod["spec"], {each["name"]: each for each in pod["spec"]["volumes"]}
    (container,) = spec["containers"]
    assert labelled(pod)
    assert (container["image"], container["imagePullPolicy"]) == (IMAGE, "IfNotPresent")
    assert (spec["securityContext"], container["securityContext"]) == (USER, RESTRICTED)
    assert spec["automountServiceAccountToken"] is False
    assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
    assert not any("hostPort" in port for port in container.get("ports", []))
    # The operator's init container has no security context: k8s/cluster.md says what namespaces then need
    assert [each for each in spec.get("initContainers", []) if each["name"] != "init-pytorch"] == []
    assert {name for volume in volumes.values() for name in volume} <= VOLUMES | {"name"}
    assert all(volume["configMap"]["name"] in maps for volume in volumes.values() if "configMap" in volume)
    assert all(volume["emptyDir"]["sizeLimit"] for volume in volumes.values() if "emptyDir" in volume)
    mounts = container["volumeMounts"]
    assert sorted(each["name"] for each in mounts) == sorted(volumes)
    assert len({each["mountPath"] for each in mounts}) == len(mounts)
    for amount in ("requests", "limits"):
        assert {"cpu", "memory"} <= container["resources"][amount].keys()
    names = [each["name"] for each in container.get("env", [])]
    assert len(set(names)) == len(names)
    assert not [name for name in names if re.search("PASSWORD|SECRET(?!_FILE)|TOKEN|KEY|CREDENTIAL", name)]
    assert container["terminationMessagePolicy"] == "FallbackToLogsOnError"
    trains = pod["labels"]["app.kubernetes.io/component"] == "training"
    # A probe would end a pod that waits for others or saves. The board has one, for its Service
    probes = {name for name in container if name.endswith("Probe")}
    assert probes == (set() if trains else {"readinessProbe"})


@pytest.mark.parametrize("what", CLAIMS)
def test_k8s_volume_claims_fit_the_schemas(what: str) -> None:
    assert [problem for document in rendered(what) for problem in problems(document)] == []


def test_k8s_board_gives_a_valid_pod() -> None:
    check_taken(rendered("board.yaml"))


def check(documents: list[Object], what: str) -> None:
    pods = check_taken(documents)
    check_pods(pods, what)
    check_command(pods, what)
    policy = next(each["spec"] for each in documents if each["kind"] == "NetworkPolicy")
    assert policy["ingress"] == [{"from": [{"podSelector": policy["podSelector"]}]}]
    (job,) = [each for each in documents if each["kind"] in OWNERS]
    if "kueue" in what:
        assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"]
        assert job["spec"].get("suspend") or job["spec"]["runPolicy"]["suspend"]
    if "gpu" in what and job["kind"] == "PyTorchJob":
        assert job["spec"]["nprocPerNode"] == "2"


@pytest.mark.parametrize("what", [what for what in TRAINING if what.endswith(".yaml")])
def test_k8s_plain_files_give_valid_pods(what: str) -> None:
    check(rendered(what), what)


@pytest.mark.parametrize("kind", ELASTIC)
def test_k8s_components_combine_in_any_mix(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for what in mixes(kind):
        check(rendered(what), what)


@pytest.mark.parametrize("kind", ["pytorchjob", "pytorchjob+elastic", "job+elastic", "jobset"])
def test_k8s_kustomization_sets_name_and_image_in_one_place(kind: str) -> None:
    """Two jobs side by side share no name, and no selector of one job selects pods of the other."""
    edits = [("app.kubernetes.io/instance: rankup", "app.kubernetes.io/instance: my-job"),
             ("newName: rankup", "newName: registry.example.org/me/rankup")]
    documents = kustomized(f"{kind}+own", *edits)
    assert [problem for document in documents for problem in problems(document)] == []
    # No file sets a namespace: kubectl's own namespace also applies to volume, board, Secret and kube.sh
    assert not [file for file in K8S.rglob("*.yaml") if re.search(r"\bnamespace:", file.read_text())]
    names = {each["metadata"]["name"] for each in documents if each["kind"] != "ConfigMap"}
    assert names == {"my-job"}
    pods = pods_of(documents)
    for pod in pods:
        (container,), values = pod["spec"]["containers"], environment(pod)
        assert container["image"] == f"registry.example.org/me/{IMAGE}"
        assert "my-job" in command_line(pod)
        assert pod["name"].startswith("my-job-")
        if "subdomain" in pod["spec"]:
            assert values["MASTER_ADDR"] == f"{pods[0]['name']}.{pod['spec']['subdomain']}"
            assert pod["spec"]["subdomain"] == "my-job"
    for document in documents:
        if (selector := selector_of(document)) is not None:
            assert selector["app.kubernetes.io/instance"] == "my-job"
            assert all(selector.items() <= pod["labels"].items() for pod in pods)
    assert "rankup" not in {pod["labels"]["app.kubernetes.io/instance"] for pod in pods}


def uncommented(name: str) -> list[tuple[str, str]]:
    """Return edits that uncomment every patch line marked EDIT."""
    lines = re.findall(r"(?m)^( {6,})# (.* # EDIT.*)$", (K8S / name / "kustomization.yaml").read_text())
    return [(f"{space}# {line}", f"{space}{line}") for space, line in lines]


@pytest.mark.parametrize("kind", KINDS)
def test_k8s_uncommented_patches_reach_every_pod(kind: str) -> None:
    edits = uncommented(".") + uncommented("components/gpu")
    assert len(edits) == 10
    documents = kustomized(f"{kind}+gpu", *edits)
    assert [problem for document in documents for problem in problems(document)] == []
    devices = {"rdma/hca_shared_devices_a": "1", "vpc.amazonaws.com/efa": "4", "hugepages-2Mi": "5120Mi"}
    for pod in pods_of(documents):
        spec = pod["spec"]
        assert spec["imagePullSecrets"] == [{"name": "my-registry"}]
        assert spec["nodeSelector"]
        assert spec["priorityClassName"] == "high"
        assert spec["tolerations"][-1] == {"key": "nvidia.com/gpu", "operator": "Exists"}
        assert pod["labels"]["sidecar.istio.io/inject"] == "false"
        assert devices.items() <= spec["containers"][0]["resources"]["limits"].items()
        assert environment(pod)["NCCL_DEBUG"] == "INFO"
        assert environment(pod)["NCCL_IB_HCA"] == "=mlx5_0,mlx5_1"


def test_k8s_uncommented_lines_for_volcano_are_valid() -> None:
    text, count = re.subn(r"(?m)^( *)# (?=.* # EDIT with Volcano)", r"\1", (K8S / "pytorchjob.yaml").read_text())
    assert count == 2
    job = next(iter(yaml.safe_load_all(text)))
    assert problems(job) == []
    assert job["spec"]["runPolicy"]["schedulingPolicy"] == {"queue": "default"}
    assert {pod["spec"]["schedulerName"] for pod in pods_of([job])} == {"volcano"}


def test_k8s_fsdp_volume_can_be_mounted_by_every_node() -> None:
    claim = one("components/fsdp/volume.yaml", "PersistentVolumeClaim")
    assert claim["metadata"]["name"] == "rankup-runs-shared"  # rankup-runs can't change its access mode
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
