"""k8s/: what each manifest and overlay is for, and that its pods run a command that the program understands."""

import re
import shutil
from pathlib import Path

import pytest
import yaml
from torch.distributed.run import get_args_parser

from rankup import cli
from rankup.env.node_env import read_node_env
from tests.rigs.jobs import ROOT
from tests.rigs.kube import (
    CLAIMS,
    EVERY,
    FILES,
    K8S,
    OVERLAYS,
    TRAINING,
    claim_of,
    kubectl,
    one,
    problems,
    rendered,
)
from tests.rigs.kubeflow import command_line, environment, pods_of
from train.config import Config, check_world_size, load_config
from train.config.command_line import parse_args
from train.run import CHOICES


def test_k8s_overlays_are_all_there() -> None:
    promised = "gpu elastic fsdp own script board"
    assert set(promised.split()) <= set(OVERLAYS)


def test_k8s_pytorchjob_read_alone_is_what_the_overlays_build_on() -> None:
    alone, base = ({each["kind"]: each for each in rendered(what)} for what in ("pytorchjob.yaml", "base"))
    assert alone == base
    assert (K8S / "pytorchjob.yaml").resolve() == K8S / "base" / "pytorchjob.yaml"


@pytest.mark.parametrize("what", TRAINING)
def test_k8s_pods_run_what_the_program_understands(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    pods = pods_of(rendered(what))
    assert len(pods) >= 2
    for rank, pod in enumerate(pods):
        words, values = command_line(pod), environment(pod)
        if "torchrun" in words:
            at = words.index("train.main")
            get_args_parser().parse_args(words[words.index("torchrun") + 1 : at + 1])
            config = config_of(words[at + 1 :])
            least, most = (int(count) for count in values["PET_NNODES"].split(":"))
            for count in range(least, most + 1):
                check_world_size(config, count)
            continue
        assert words[:3] == ["python", "train/main.py", "launch"]
        given = cli.parser().parse_args(words[3:])
        node = read_node_env(values, nproc=given.nproc)
        assert (node.node_rank, node.num_nodes, given.join_timeout_s) == (rank, len(pods), 900)
        assert node.nproc == (2 if what == "overlays/gpu" else 1)
        if what == "overlays/script":
            assert (given.script, given.name, given.work_dir) == ("/own/train.py", "rankup", "runs/work")
        else:
            assert (given.script, given.arguments[0]) == ("train/main.py", "train")
            check_world_size(config_of(given.arguments), node.world_size)


def config_of(words: list[str]) -> Config:
    """What the program makes of its own words."""
    parsed = parse_args(words)
    return load_config(parsed.settings, file=parsed.config_file, mistakes=parsed.mistakes, choices=CHOICES)


@pytest.mark.parametrize("what", TRAINING)
def test_k8s_pods_of_a_job_reach_each_other_alone(what: str) -> None:
    policy = one(what, "NetworkPolicy")["spec"]
    wanted = policy["podSelector"]["matchLabels"]
    assert policy["ingress"] == [{"from": [{"podSelector": {"matchLabels": wanted}}]}]
    for pod in pods_of(rendered(what)):
        assert wanted.items() <= pod["labels"].items()
    for pod in pods_of(rendered("overlays/board")):
        assert not wanted.items() <= pod["labels"].items()


@pytest.mark.parametrize("what", TRAINING)
def test_k8s_rank_0_has_the_volume_and_time_to_save(what: str) -> None:
    pods = pods_of(rendered(what))
    claim = claim_of(what)
    volumes = {volume["name"]: volume for volume in pods[0]["spec"]["volumes"]}
    assert volumes["runs"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    for pod in pods:
        assert pod["spec"]["terminationGracePeriodSeconds"] > 60


def test_k8s_whoever_deletes_the_file_of_a_job_deletes_no_checkpoints() -> None:
    claims = {claim["metadata"]["name"] for what in CLAIMS for claim in rendered(what)}
    assert claims == {"rankup-runs", "rankup-runs-shared"}
    for what in EVERY:
        assert not [each for each in rendered(what) if each["kind"] in ("PersistentVolumeClaim", "Namespace")]
    for path in [K8S / name for name in (*FILES, "volume.yaml")]:
        (head,) = [line for line in path.read_text().splitlines()[:3] if line.startswith("# Run: ")]
        assert "kubectl apply -f k8s/volume.yaml" in head
        assert "delete" in head
        assert "delete -f" not in head


@pytest.mark.parametrize("what", TRAINING)
def test_k8s_pods_leave_a_node_that_does_not_answer_within_30_s(what: str) -> None:
    for pod in pods_of(rendered(what)):
        found = {each["key"]: each for each in pod["spec"]["tolerations"]}
        assert set(found) == {"node.kubernetes.io/unreachable", "node.kubernetes.io/not-ready"}
        for each in found.values():
            assert (each["operator"], each["effect"], each["tolerationSeconds"]) == ("Exists", "NoExecute", 30)


def test_k8s_pods_of_a_jobset_meet_at_the_name_that_its_network_gives_them() -> None:
    jobset = one("jobset.yaml", "JobSet")["spec"]
    assert jobset["network"] == {"enableDNSHostnames": True, "publishNotReadyAddresses": True}
    job = jobset["replicatedJobs"][0]["template"]["spec"]
    pods = pods_of(rendered("jobset.yaml"))
    for index, pod in enumerate(pods):
        values = environment(pod)
        assert values["MASTER_ADDR"] == f"{pods[0]['name']}.{pods[0]['spec']['subdomain']}"
        assert (values["RANK"], values["WORLD_SIZE"]) == (str(index), str(job["completions"]))
    assert job["completions"] == job["parallelism"] == len(pods)


def test_k8s_only_the_master_of_a_pytorchjob_mounts_the_volume() -> None:
    for pod in pods_of(rendered("pytorchjob.yaml"))[1:]:
        assert all("persistentVolumeClaim" not in volume for volume in pod["spec"]["volumes"])


def test_k8s_job_counts_its_pods_once() -> None:
    job = one("job.yaml", "Job")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    world_size = {each["name"]: each.get("value") for each in container["env"]}["WORLD_SIZE"]
    assert world_size == str(job["spec"]["completions"]) == str(job["spec"]["parallelism"])
    service = one("job.yaml", "Service")
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert service["metadata"]["name"] == job["spec"]["template"]["spec"]["subdomain"]
    first = pods_of([job])[0]
    assert environment(first)["MASTER_ADDR"] == f"{first['name']}.{service['metadata']['name']}"
    assert service["spec"]["selector"].items() <= first["labels"].items()


def test_k8s_gpu_asks_for_as_many_devices_as_processes() -> None:
    job = one("overlays/gpu", "PyTorchJob")
    for pod in pods_of([job]):
        (container,) = pod["spec"]["containers"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == job["spec"]["nprocPerNode"] != "1"
        assert pod["spec"]["affinity"]["podAntiAffinity"]


def test_k8s_gpu_lines_for_fast_networks_give_every_pod_its_devices(tmp_path: Path) -> None:
    """The lines to remove a # from: no cluster has all of these devices, and a pod waits for one that is not there."""
    shutil.copytree(K8S, tmp_path / "k8s", symlinks=True)
    patch = tmp_path / "k8s/overlays/gpu/job.yaml"
    text, count = re.subn(r"(?m)^( *)# (?=.* # EDIT: )", r"\1", patch.read_text())
    assert count == 5
    patch.write_text(text)
    documents = list(yaml.safe_load_all(kubectl("kustomize", str(patch.parent))))
    assert [problem for document in documents for problem in problems(document)] == []
    devices = {"rdma/hca_shared_devices_a": "1", "vpc.amazonaws.com/efa": "4", "hugepages-2Mi": "5120Mi"}
    for pod, plain in zip(pods_of(documents), pods_of(rendered("overlays/gpu")), strict=True):
        (container,), (without,) = pod["spec"]["containers"], plain["spec"]["containers"]
        assert container["resources"]["limits"] == without["resources"]["limits"] | devices
        nccl = {"NCCL_DEBUG": "INFO", "NCCL_IB_HCA": "=mlx5_0,mlx5_1"}
        assert environment(pod) == environment(plain) | nccl


def test_k8s_elastic_has_no_master_and_keeps_the_least_number() -> None:
    job = one("overlays/elastic", "PyTorchJob")["spec"]
    assert list(job["pytorchReplicaSpecs"]) == ["Worker"]
    budget = one("overlays/elastic", "PodDisruptionBudget")["spec"]
    assert budget["minAvailable"] == job["elasticPolicy"]["minReplicas"]
    assert not any(pod["spec"].get("initContainers") for pod in pods_of(rendered("overlays/elastic")))


def test_k8s_fsdp_pods_all_have_the_volume_on_any_node() -> None:
    claim = claim_of("overlays/fsdp")
    assert claim["metadata"]["name"] != claim_of("base")["metadata"]["name"]  # whose access mode can't be changed
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    for pod in pods_of(rendered("overlays/fsdp")):
        assert {"--parallel=fsdp", "--checkpoint-format=sharded"} <= set(command_line(pod))
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        assert volumes["runs"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]


def test_k8s_elastic_workers_wait_for_one_that_pulls_its_image_for_ten_minutes() -> None:
    for pod in pods_of(rendered("overlays/elastic")):  # torchrun joins before our program runs
        words, values = command_line(pod), environment(pod)
        (tries,) = re.findall(r"seq (\d+)", words[2])
        (pause_s,) = re.findall(r"sleep (\d+)", words[2])
        assert int(tries) * int(pause_s) > 600
        waits = dict(pair.split("=") for pair in values["PET_RDZV_CONF"].split(","))
        assert int(waits["join_timeout"]) > 600
        assert int(waits["read_timeout"]) < 60


def test_k8s_lines_for_istio_kueue_and_volcano_say_what_these_look_for(tmp_path: Path) -> None:
    """The lines to remove a # from: most clusters have none of the three."""
    shutil.copytree(K8S, tmp_path / "k8s", symlinks=True)
    file = tmp_path / "k8s/base/pytorchjob.yaml"
    text, count = re.subn(r"(?m)^( *)# (?=.* # EDIT with )", r"\1", file.read_text())
    assert count == 5
    file.write_text(text)
    documents = list(yaml.safe_load_all(kubectl("kustomize", str(file.parent))))
    assert [problem for document in documents for problem in problems(document)] == []
    (job,) = [document for document in documents if document["kind"] == "PyTorchJob"]
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"]
    assert (job["spec"]["runPolicy"]["suspend"], job["spec"]["runPolicy"]["schedulingPolicy"]["queue"]) == (
        True, "default"
    )
    for pod in pods_of(documents):
        assert pod["spec"]["schedulerName"] == "volcano"
        assert pod["labels"]["sidecar.istio.io/inject"] == "false"
        assert "kueue.x-k8s.io/queue-name" not in pod["labels"]  # of the job alone


def test_k8s_board_reads_the_volume_inside_the_cluster_alone() -> None:
    assert one("overlays/board", "Service")["spec"]["type"] == "ClusterIP"
    (pod,) = pods_of(rendered("overlays/board"))
    volumes = {each["name"]: each.get("persistentVolumeClaim") for each in pod["spec"]["volumes"]}
    claims = {name: claim["claimName"] for name, claim in volumes.items() if claim}
    assert list(claims.values()) == [claim_of("pytorchjob.yaml")["metadata"]["name"]]
    assert all(mount["readOnly"] for mount in pod["spec"]["containers"][0]["volumeMounts"] if mount["name"] in claims)


def test_k8s_readme_names_every_overlay() -> None:
    text = (K8S / "README.md").read_text()
    for name in OVERLAYS:
        assert f"k8s/overlays/{name}`" in text
