"""`rankup submit` of a manifest: what it makes of each kind of job, and what a scripted kubectl is asked to do."""

import base64
import io
import json
import random
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.rigs.kube import IMAGE, added, problems, rendered
from tests.rigs.kubectl import Kubectl, pod

Object = dict[str, Any]
DONE = [[], [{"type": "Complete", "status": "True"}]]


def repository(folder: Path, kind: str = "job") -> Path:
    """Return a folder with a script, data and a manifest by `rankup add`."""
    for name, text in {"train/samples/big.bin": "0", "train.py": "", "k8s/train.yaml": added(f"{kind}+data")}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def sent(mine: Path) -> list[Object]:
    """Return the objects that were applied."""
    (path,) = [path for path in (mine / ".rankup").glob("*.json") if path.name == "rankup.json"]
    (mine / "sent.yaml").write_text(path.read_text())
    return rendered(str(mine / "sent.yaml"))


def templates(part: Any) -> list[Object]:
    if isinstance(part, dict) and "containers" in part.get("spec", {}):
        return [part]
    inner = part.values() if isinstance(part, dict) else part if isinstance(part, list) else []
    return [found for each in inner for found in templates(each)]


@pytest.mark.parametrize("kind", ["job", "pytorchjob", "jobset", "trainjob"])
def test_submit_k8s_sends_objects_that_the_cluster_takes(kind: str, tmp_path: Path) -> None:
    """Each pod unpacks the snapshot before it starts, and gets the words. The job owns the ConfigMap."""
    mine = repository(tmp_path / "mine", kind)
    kubectl = Kubectl(mine, tmp_path / "stub", {"job": DONE, "pods": [[pod("a"), pod("b")]]})
    code, said = kubectl.submit("k8s/train.yaml", "--lr", "$0.2")
    assert code == 0, said
    assert "the log of all pods" in said
    objects = sent(mine)
    assert [found for each in objects for found in problems(each)] == []
    found = [template["spec"] for each in objects for template in templates(each)]
    assert len(found) == (2 if kind == "pytorchjob" else 1)
    (code_map,) = (mine / ".rankup").glob("rankup-*.json")
    carried = json.loads(code_map.read_text())
    assert problems(carried) == []
    assert carried["immutable"] is True
    for spec in found:
        main, step = spec["containers"][0], spec["initContainers"][-1]
        assert main["args"][-2:] == ["--lr", "$$0.2"]
        assert {"name": "rankup-code", "mountPath": "/work", "readOnly": True} in main["volumeMounts"]
        assert step["image"] == IMAGE
        assert step["securityContext"]["readOnlyRootFilesystem"] is True
        assert step["command"][-1] == "train/samples"  # its volume is mounted inside
        assert {"name": "rankup-packed", "configMap": {"name": carried["metadata"]["name"]}} in spec["volumes"]
    with tarfile.open(fileobj=io.BytesIO(base64.b64decode(carried["binaryData"]["code.tar.gz"]))) as tar:
        names = tar.getnames()
    assert {"train.py", ".rankup.json"} < {*names}
    assert not any(name.startswith(("train/", ".git", "runs", ".rankup/")) for name in names)
    (patch,) = kubectl.calls("patch")
    (owner,) = json.loads(patch[-1])["metadata"]["ownerReferences"]
    assert (owner["kind"].lower(), owner["name"], owner["uid"]) == (kind, "rankup", "uid-1")
    assert [words[0] for words in kubectl.calls("create") + kubectl.calls("apply")] == ["create", "apply"]


def test_submit_k8s_streams_a_large_snapshot_into_the_volume(tmp_path: Path) -> None:
    """The file gets its name when it is whole. Pods unpack it from the volume. A pod that carries it is removed."""
    mine = repository(tmp_path / "mine")
    (mine / "weights.bin").write_bytes(random.Random(0).randbytes(1_200_000))
    kubectl = Kubectl(mine, tmp_path / "stub", {"job": DONE, "pods": [[pod("sender", ready=False)], [pod("a")]]})
    code, said = kubectl.submit("k8s/train.yaml")
    assert code == 0, said
    (file,) = (tmp_path / "stub" / "runs" / ".rankup").iterdir()
    with tarfile.open(file) as tar:
        assert tar.getmember("weights.bin").size == 1_200_000
    objects = sent(mine)
    assert [found for each in objects for found in problems(each)] == []
    (spec,) = [template["spec"] for each in objects for template in templates(each)]
    step = spec["initContainers"][-1]
    assert f"/runs/.rankup/{file.name}" in step["command"]
    assert "/runs" in [mount["mountPath"] for mount in step["volumeMounts"]]
    (sender,) = [json.loads(path.read_text()) for path in (mine / ".rankup").glob("rankup-*.json")]
    assert problems(sender) == []
    (removed,) = kubectl.calls("delete")
    assert sender["metadata"]["name"] in removed
    order = [words[0] for words in map(json.loads, (tmp_path / "stub" / "calls").read_text().splitlines())]
    assert order.index("exec") < order.index("delete") < order.index("apply")


def test_submit_k8s_cut_stream_starts_no_job(tmp_path: Path) -> None:
    mine = repository(tmp_path / "mine")
    (mine / "weights.bin").write_bytes(random.Random(0).randbytes(1_200_000))
    fails = {"exec": "error: unable to upgrade connection"}
    kubectl = Kubectl(mine, tmp_path / "stub", {"pods": [[pod("sender")]], "fails": fails})
    code, said = kubectl.submit("k8s/train.yaml")
    assert code == 2
    assert "unable to upgrade connection" in said
    assert kubectl.calls("apply") == []
    assert kubectl.calls("delete")


@pytest.mark.parametrize(
    ("pods", "events", "reason"),
    [
        ([[pod("mine-0", ready=False, conditions=[{"reason": "Unschedulable", "message": "claim not found"}])]],
         [[]], "mine-0: Unschedulable claim not found"),
        ([[pod("mine-0", ready=False, containerStatuses=[
            {"state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}}])]],
         [[]], "mine-0: ImagePullBackOff no such image"),
        ([[]], [[{"message": 'pods "mine-0" is forbidden: exceeded quota: gpus'}]], "exceeded quota: gpus"),
    ],
    ids=["claim", "image", "quota"],
)
def test_submit_k8s_says_why_pods_wait(
    pods: list[list[Object]], events: list[list[Object]], reason: str, tmp_path: Path
) -> None:
    mine = repository(tmp_path / "mine")
    job = [[], [], [{"type": "Failed", "status": "True"}]]
    code, said = Kubectl(mine, tmp_path / "stub", {"job": job, "pods": pods, "events": events}).submit("k8s/train.yaml")
    assert code == 1
    assert said.count(reason) == 1, said


def test_submit_k8s_ends_with_the_code_of_the_pods(tmp_path: Path) -> None:
    mine = repository(tmp_path / "mine")
    job = [[], [{"type": "Failed", "status": "True"}]]
    pods = [[pod("a", code=171), pod("b", code=3)]]
    assert Kubectl(mine, tmp_path / "stub", {"job": job, "pods": pods}).submit("k8s/train.yaml")[0] == 3


def test_submit_k8s_refuses_a_taken_name_and_sends_nothing(tmp_path: Path) -> None:
    mine = repository(tmp_path / "mine")
    kubectl = Kubectl(mine, tmp_path / "stub", {"taken": "job.batch/rankup\n"})
    code, said = kubectl.submit("k8s/train.yaml")
    assert (code, kubectl.calls("create"), kubectl.calls("apply")) == (2, [], [])
    assert "must have a name that is free, got rankup. kubectl delete jobs.batch/rankup" in said


def test_submit_k8s_names_what_the_cluster_refuses(tmp_path: Path) -> None:
    mine = repository(tmp_path / "mine", "pytorchjob")
    says = "error: the server doesn't have a resource type \"pytorchjobs\""
    code, said = Kubectl(mine, tmp_path / "stub", {"fails": {"get": says}}).submit("k8s/train.yaml")
    assert code == 2
    assert says in said


def test_submit_k8s_dry_run_asks_the_cluster_nothing(tmp_path: Path) -> None:
    mine = repository(tmp_path / "mine")
    kubectl = Kubectl(mine, tmp_path / "stub", {})
    code, said = kubectl.submit("--dry-run", "k8s/train.yaml")
    assert code == 0
    assert not (tmp_path / "stub" / "calls").exists()
    assert not (mine / ".rankup").exists()
    assert [line.split()[2] for line in said.splitlines() if line[0] == "+"] == ["create", "apply", "logs"]
