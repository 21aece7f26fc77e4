"""`rankup add k8s` gives valid pods with the right commands for each kind of job and any mix of options."""

import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml

from rankup import cli
from rankup.env.node_env import Limits, read_node_env
from rankup.files import IN_IMAGE, JOB_KINDS
from rankup.files.add import rendered_again
from rankup.files.plan import plan_files
from tests.rigs.jobs import ROOT
from tests.rigs.kube import FILES, IMAGE, K8S, TRAINING, added, problems, rendered
from tests.rigs.kubeflow import OWNERS, command_line, environment, pods_of
from train.commands.line import parse_args
from train.config import Config, check_run, load_config

Object = dict[str, Any]
ELASTIC = (*JOB_KINDS, *(f"{kind}+elastic" for kind in JOB_KINDS))


def mixes(kind: str) -> list[str]:
    """Return all mixes of options for a kind of job."""
    chosen = product(*(("", name) for name in ("gpu", "fsdp+data", "queue+secret")))
    return ["+".join(filter(None, (kind, *each))) for each in chosen]


def test_k8s_files_are_what_rankup_add_writes() -> None:
    """The file names the command that made it, so `rankup add --diff` renders each file again."""
    again = {path.name: made for path, made in rendered_again(ROOT, cli.COMMANDS["add"].parse) if path.parent == K8S}
    assert again.keys() == {*FILES, "volume.yaml"}
    for name, made in again.items():
        assert made == (K8S / name).read_text()
        assert max(map(len, made.splitlines()[4:])) <= 120


def planned(folder: Path, *words: str) -> dict[str, str]:
    """Return the files that `rankup add k8s WORDS` would write in a repository with a script, by their paths."""
    (folder / "train.py").write_text("import torch.distributed")
    (folder / "requirements.txt").write_text("rankup\n")
    given = cli.COMMANDS["add"].parse(["k8s", *words])
    return {file.path: file.content for file in plan_files(given, folder).texts}


def config_of(words: list[str]) -> Config:
    """Return the program's settings for these arguments."""
    parsed = parse_args(words)
    return load_config(parsed.settings, file=parsed.options.config, mistakes=parsed.mistakes)


def check_command(pods: list[Object], what: str) -> None:
    """Check that each pod runs a valid command line of `launch` and the program, as the right node."""
    nproc = 2 if "gpu" in what else 1
    for rank, pod in enumerate(pods):
        words, values = command_line(pod), environment(pod)
        assert words[:4] == ["python", "-m", "rankup", "launch"]
        given = cli.COMMANDS["launch"].parse_args(words[4:])
        least, most = given.nnodes or (len(pods), len(pods))
        assert (least, most) == ((2, 4) if "elastic" in what else (2, 2))
        node = read_node_env(
            values, nproc=given.nproc, nnodes=given.nnodes and most, master_addr=given.master_addr,
            master_port=given.master_port, limits=Limits(least, most) if least < most else None,
        )
        assert (node.node_rank, node.num_nodes, node.nproc, given.join_timeout_s) == (rank, most, nproc, 900)
        first = f"{pods[0]['name']}.{pods[0]['spec']['subdomain']}" if "subdomain" in pod["spec"] else pods[0]["name"]
        assert node.master_addr == first
        assert given.words[:2] == ["train/main.py", "train"]
        config = config_of(given.words[1:])
        for count in range(least, most + 1):
            check_run(config, count * nproc)
        assert (config.device, config.parallel, config.name) == (
            "cuda" if "gpu" in what else Config().device, "fsdp" if "fsdp" in what else Config().parallel, "rankup"
        )


def check_pods(pods: list[Object], what: str) -> None:
    assert len(pods) >= 2
    for pod in pods:
        (container,) = pod["spec"]["containers"]
        assert pod["spec"]["terminationGracePeriodSeconds"] > 60  # time to save
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        paths = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
        assert (paths["dshm"], volumes["dshm"]["emptyDir"]["medium"]) == ("/dev/shm", "Memory")
        assert (paths["runs"], volumes["runs"]["persistentVolumeClaim"]["claimName"]) == ("/runs", "rankup-runs")
        if "data" in what:
            (mount,) = [each for each in container["volumeMounts"] if each["name"] == "data"]
            assert mount == {"name": "data", "mountPath": f"{IN_IMAGE}/train/samples", "subPath": "samples",
                             "readOnly": True}
            assert volumes["data"]["persistentVolumeClaim"]["claimName"] == "rankup-data"
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
VOLUMES = {"emptyDir", "persistentVolumeClaim", "secret"}


def labelled(metadata: Object) -> bool:
    return {f"app.kubernetes.io/{name}" for name in ("instance", "component")} <= metadata["labels"].keys()


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
        assert labelled(document["metadata"])
        assert "namespace" not in document["metadata"]  # the user chooses it
        if (wanted := selector_of(document)) is not None:
            assert all(wanted.items() <= pod["labels"].items() for pod in pods)
    assert pods
    for pod in pods:
        check_pod(pod)
    return pods


def check_pod(pod: Object) -> None:
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


def test_k8s_volume_claims_fit_the_schemas(tmp_path: Path) -> None:
    """The claim of the runs is shared by all jobs of a repository, and --data adds one, unless one is named."""
    (tmp_path / "images").mkdir()

    def claims(*words: str) -> list[Object]:
        files = planned(tmp_path, "--name=mine", *words, "train.py")
        (tmp_path / "k8s").mkdir(exist_ok=True)
        (tmp_path / "k8s" / "volume.yaml").write_text(files["k8s/volume.yaml"])
        used = {volume["persistentVolumeClaim"]["claimName"]
                for pod in pods_of(list(yaml.safe_load_all(files["k8s/train.yaml"])))
                for volume in pod["spec"]["volumes"] if "persistentVolumeClaim" in volume}
        found = list(yaml.safe_load_all(files["k8s/volume.yaml"]))
        assert [problem for document in [*rendered("volume.yaml"), *found] for problem in problems(document)] == []
        return [used, {each["metadata"]["name"] for each in found}]

    assert claims() == [{"mine-runs"}] * 2
    assert claims("--data=images") == [{"mine-runs", "mine-data"}] * 2
    assert claims("--data=images", "--data-claim=big") == [{"mine-runs", "big"}, {"mine-runs"}]
    assert claims("--name=other") == [{"mine-runs"}] * 2  # the volume is there already
    (tmp_path / "k8s" / "volume.yaml").write_text("kind: ConfigMap\nmetadata:\n  name: foreign\n---\n"
                                                  "kind: PersistentVolumeClaim\nmetadata:\n  name: own\n")
    assert claims("--name=other") == [{"own"}] * 2
    (tmp_path / "k8s" / "volume.yaml").write_text("kind: ConfigMap\nmetadata:\n  name: foreign\n")
    assert claims("--name=other") == [{"other-runs"}] * 2


def test_k8s_board_gives_a_valid_pod() -> None:
    check_taken(rendered("board.yaml"))


def check(documents: list[Object], what: str) -> None:
    pods = check_taken(documents)
    check_pods(pods, what)
    check_command(pods, what)
    policy = next(each["spec"] for each in documents if each["kind"] == "NetworkPolicy")
    assert policy["ingress"] == [{"from": [{"podSelector": policy["podSelector"]}]}]
    (job,) = [each for each in documents if each["kind"] in OWNERS]
    if "queue" in what:
        queued = next(each for each in documents if each["kind"] == "TrainJob") if "trainjob" in what else job
        assert queued["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "user-queue"
        assert queued["spec"].get("suspend") or queued["spec"]["runPolicy"]["suspend"]
        assert [each for each in documents if "kueue.x-k8s.io/queue-name" in each["metadata"]["labels"]] == [queued]
    if "gpu" in what and job["kind"] == "PyTorchJob":
        assert job["spec"]["nprocPerNode"] == "2"


@pytest.mark.parametrize("what", [what for what in TRAINING if what.endswith(".yaml")])
def test_k8s_plain_files_give_valid_pods(what: str) -> None:
    check(rendered(what), what)


@pytest.mark.parametrize("kind", ELASTIC)
def test_k8s_options_combine_in_any_mix(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for what in mixes(kind):
        check(rendered(what), what)


@pytest.mark.parametrize(("words", "said"), [
    (["--queue=My Queue", "train.py"], "--queue must be a name of Kubernetes"),
    (["--secret=a_b", "train.py"], "--secret must be a name of Kubernetes"),
    (["--data-claim={x}", "train.py"], "--data-claim must be a name of Kubernetes"),
    (["--image=a: b", "train.py"], "--image must be the name of an image, got a: b"),
    (["--", "train.py", "a\nb"], "each word must be on one line, got "),
])
def test_k8s_words_that_fit_no_manifest_are_refused_in_one_line(words: list[str], said: str, tmp_path: Path) -> None:
    with pytest.raises(cli.UserError) as found:
        planned(tmp_path, *words)
    assert str(found.value).startswith(f"add: {said}")
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("name", ["yes", "null", "on", "e5", "7", "12345678", "Über", "a.b", "x" * 60])
def test_k8s_name_of_a_job_is_a_text_in_every_kind(name: str, tmp_path: Path) -> None:
    for kind in JOB_KINDS:
        queue = "7" if name == "7" else "no"
        files = planned(tmp_path, f"--name={name}", f"--kind={kind}", f"--queue={queue}", "train.py")
        for path in ("k8s/train.yaml", "k8s/volume.yaml"):
            for document in yaml.safe_load_all(files[path]):
                assert problems(document) == []
                assert all(isinstance(text, str) for text in document["metadata"]["labels"].values())


@pytest.mark.parametrize("kind", JOB_KINDS)
def test_k8s_words_of_a_script_reach_it_unchanged(kind: str, tmp_path: Path) -> None:
    """YAML would read some words as numbers, and Kubernetes expands $(NAME)."""
    words = ["--lr", "1e-3", "--x=yes", "yes", "NO", "null", "2:4", "", "a b", 'a "b"', "$HOME", "$(HOME)", "$$", "#x",
             "~", "[x]", "a: b", "-", "é", "o'clock", "\\n", "x" * 200]
    made = planned(tmp_path, f"--kind={kind}", "--", "train.py", *words)["k8s/train.yaml"]
    for pod in pods_of(list(yaml.safe_load_all(made))):
        assert command_line(pod)[-len(words) - 1:] == ["train.py", *words]


@pytest.mark.parametrize("kind", JOB_KINDS)
def test_k8s_lines_to_edit_are_valid_once_they_are_uncommented(kind: str) -> None:
    """Without the lines for newer clusters, which test_k8s_rules.py tests."""
    text, count = re.subn(r"(?m)^( *(?:- )?)# (?=.* # EDIT)", r"\1", added(f"{kind}+gpu"))
    assert count == (6 if kind == "pytorchjob" else 4)
    documents = list(yaml.safe_load_all(text))
    assert [problem for document in documents for problem in problems(document)] == []
    for pod in pods_of(documents):
        assert pod["spec"]["imagePullSecrets"] == [{"name": "my-registry"}]
        assert pod["spec"]["nodeSelector"]
        assert pod["spec"]["priorityClassName"] == "high"
        assert pod["spec"]["tolerations"][-1] == {"key": "nvidia.com/gpu", "operator": "Exists"}
        assert pod["spec"].get("schedulerName") == ("volcano" if kind == "pytorchjob" else None)


def test_k8s_name_of_the_job_is_that_of_its_run(tmp_path: Path) -> None:
    """Otherwise two jobs of a repository, which share a volume, would both write into runs/train."""

    def name_of(*words: str) -> str:
        (pod, _) = pods_of(list(yaml.safe_load_all(planned(tmp_path, *words)["k8s/train.yaml"])))
        return str(cli.COMMANDS["launch"].parse(command_line(pod)[4:]).name)

    assert name_of("train.py") == ""  # the script's name
    assert name_of("--name=second", "train.py") == "second"
    assert name_of("--name=second", "--", "train.py", "--name", "own") == ""


def test_k8s_files_name_their_job_in_every_object() -> None:
    """Two jobs side by side share no name, and no selector of one job selects pods of the other."""
    for kind in JOB_KINDS:
        text = added(f"{kind}+elastic").replace("rankup", "my-job")
        documents = list(yaml.safe_load_all(text))
        assert {each["metadata"]["name"] for each in documents} == {"my-job"}
        selectors = [found for each in documents if (found := selector_of(each)) is not None]
        assert {each["app.kubernetes.io/instance"] for each in selectors} == {"my-job"}
    # No file sets a namespace: kubectl's own namespace also applies to volume, board, Secret and kube.sh
    assert not [file for file in K8S.rglob("*.yaml") if re.search(r"\bnamespace:", file.read_text())]
