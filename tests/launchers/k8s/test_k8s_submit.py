"""`rankup submit k8s/train.yaml`: each pod unpacks the snapshot over the image's files, and trains."""

import base64
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rigs.jobs import environment
from tests.rigs.kubectl import Kubectl, pod
from tests.rigs.kubepods import Cluster

pytestmark = pytest.mark.timeout(900)
TRAIN = """
import pathlib, sys
import torch, torch.distributed as dist
from recipe import WORD
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print("ranks", int(total), WORD, *sys.argv[1:], pathlib.Path("points/scale.txt").read_text(), flush=True)
pathlib.Path("runs/weights.txt").write_text(WORD)
try:
    pathlib.Path("beside.txt").write_text("lost")
except OSError as error:
    print("beside the code:", error.strerror, flush=True)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("large", [False, True], ids=["ConfigMap", "volume"])
def test_k8s_submit_pods_run_what_was_submitted(image: str, tmp_path: Path, *, large: bool) -> None:
    """The image has none of the user's files. Data stay mounted inside the code, which is read-only."""
    mine = tmp_path / "mine"
    (mine / "points").mkdir(parents=True)
    (mine / "points" / "scale.txt").write_text("1.5")
    (mine / "train.py").write_text(TRAIN)
    (mine / "recipe.py").write_text("WORD = 'old'\n")
    (mine / "requirements.txt").write_text("rankup\n")
    words = ["add", "k8s", "--image", image, "--name", "job", "--data", "points", "train.py"]
    subprocess.run([sys.executable, "-m", "rankup", *words], cwd=mine, env=environment({}), check=True)
    if large:
        (mine / "noise.bin").write_bytes(random.Random(0).randbytes(1_200_000))
    done = {"job": [[], [{"type": "Complete", "status": "True"}]], "pods": [[pod("sender")], [pod("a")]]}
    kubectl = Kubectl(mine, tmp_path / "stub", done)
    code, said = kubectl.submit("k8s/train.yaml", "--lr", "0.2")
    assert code == 0, said
    (tmp_path / "sent.yaml").write_text((mine / ".rankup/job.json").read_text())
    pods = Cluster(tmp_path / "pods", str(tmp_path / "sent.yaml"), [])
    try:
        (pods.data / "points").mkdir(parents=True)
        (pods.data / "points" / "scale.txt").write_text("1.5")
        if large:
            (tmp_path / "stub/runs/.rankup").rename(pods.runs / ".rankup")
        else:
            (carried,) = (mine / ".rankup").glob("rankup-*.json")
            pods.config.mkdir()
            packed = base64.b64decode(json.loads(carried.read_text())["binaryData"]["code.tar.gz"])
            (pods.config / "code.tar.gz").write_bytes(packed)
        (mine / "recipe.py").write_text("WORD = 'new'\n")
        pods.start()
        assert pods.codes() == [0, 0], pods.logs()
        assert pods.logs().count("ranks 2 old --lr 0.2 1.5") == 2, pods.logs()
        assert pods.logs().count("beside the code: Read-only file system") == 2, pods.logs()
        assert (pods.runs / "weights.txt").read_text() == "old"
        record = json.loads((pods.runs / "job" / "status.json").read_text())["snapshot"]
        assert record["snapshot"] in said
    finally:
        pods.remove()
