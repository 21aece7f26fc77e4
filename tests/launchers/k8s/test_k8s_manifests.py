"""What single manifests of k8s/ promise. test_k8s_mixes.py tests what all of them promise."""

import re

from tests.rigs.kube import EVERY, FILES, K8S, TRAINING, one, rendered
from tests.rigs.kubeflow import command_line, pods_of


def test_k8s_deleting_the_file_of_a_job_deletes_no_checkpoint() -> None:
    for what in EVERY:
        assert not [each for each in rendered(what) if each["kind"] in ("PersistentVolumeClaim", "Namespace")]
    for path in [K8S / name for name in (*FILES, "volume.yaml")]:
        (head,) = [line for line in path.read_text().splitlines()[:3] if line.startswith("# Run: ")]
        assert "kubectl apply -f k8s/volume.yaml" in head
        assert "delete" in head
        assert "delete -f" not in head


def test_k8s_commands_of_the_page_wait_for_the_container_before_they_follow_its_log() -> None:
    """`kubectl logs -f` fails while a pod pulls its image, so a block of commands that is pasted waits first."""
    blocks = re.findall(r"(?ms)^```sh\n(.*?)^```", (K8S / "README.md").read_text())
    pasted = [block.splitlines() for block in blocks if " apply " in block and " logs -f" in block]
    assert len(pasted) == 2
    for apply, wait, logs in pasted:
        kind = wait.rpartition(" ")[2].partition("/")[0]
        assert apply == f"kubectl apply -f k8s/volume.yaml -f k8s/{kind}.yaml"
        assert wait.startswith("kubectl wait --for ")
        assert logs.startswith("kubectl logs -f ")


def test_k8s_job_has_one_number_of_pods_and_a_service_for_their_names() -> None:
    job = one("job.yaml", "Job")
    first = pods_of([job])[0]
    words = command_line(first)
    num_nodes, master = (words[words.index(flag) + 1] for flag in ("--nnodes", "--master-addr"))
    assert num_nodes == str(job["spec"]["completions"]) == str(job["spec"]["parallelism"])
    service = one("job.yaml", "Service")
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert service["metadata"]["name"] == job["spec"]["template"]["spec"]["subdomain"]
    assert master == f"{first['name']}.{service['metadata']['name']}"
    assert service["spec"]["selector"].items() <= first["labels"].items()


def test_k8s_elastic_job_keeps_its_minimum_of_pods_during_drains() -> None:
    for what in ("pytorchjob+elastic", "job+elastic", "jobset+elastic"):
        (least,) = {re.findall(r"--nnodes (\d):", " ".join(command_line(pod)))[0] for pod in pods_of(rendered(what))}
        assert one(what, "PodDisruptionBudget")["spec"]["minAvailable"] == int(least)
    assert not any(pod["spec"].get("initContainers") for pod in pods_of(rendered("pytorchjob+elastic")))


def test_k8s_board_is_read_only_and_inside_the_cluster() -> None:
    assert one("board.yaml", "Service")["spec"]["type"] == "ClusterIP"
    (pod,) = pods_of(rendered("board.yaml"))
    volumes = {each["name"]: each.get("persistentVolumeClaim") for each in pod["spec"]["volumes"]}
    claims = {name: claim["claimName"] for name, claim in volumes.items() if claim}
    assert list(claims.values()) == [one("volume.yaml", "PersistentVolumeClaim")["metadata"]["name"]]
    assert all(mount["readOnly"] for mount in pod["spec"]["containers"][0]["volumeMounts"] if mount["name"] in claims)
    for what in TRAINING:
        reached = one(what, "NetworkPolicy")["spec"]["podSelector"]["matchLabels"]
        assert not reached.items() <= pod["labels"].items()
