"""Reads, renders and checks the manifests in k8s/, without a cluster."""

import copy
import json
import os
import re
import shutil
import subprocess
import tempfile
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from jsonschema import Draft4Validator

from rankup.cli import COMMANDS
from rankup.files.plan import plan_files
from tests.rigs.jobs import ROOT

Object = dict[str, Any]
K8S = ROOT / "k8s"
FILES = ["pytorchjob.yaml", "trainjob.yaml", "jobset.yaml", "job.yaml"]
# A file, or a kind of job and options of `rankup add k8s`. test_k8s_mixes.py tests every combination
TRAINING = [*FILES, "pytorchjob+elastic", "job+gpu", "jobset+fsdp"]
OPTIONS = {"gpu": "--gpus=2", "elastic": "--nodes=2:4", "queue": "--queue=user-queue", "data": "--data=train/samples",
           "secret": "--secret=rankup-secret", "fsdp": ""}
WORDS = {"gpu": ("--device=cuda", "--batch-size=256"), "fsdp": ("--parallel=fsdp", "--checkpoint-format=sharded")}
EVERY = [*TRAINING, "board.yaml"]
VERSION = "1.32"  # of Kubernetes
# The image that `make image` builds, with the program's version
IMAGE = f"rankup:{tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']['version']}"
# The folder with the published schemas and the recorded pods, if there is one
FACTS = Path(os.environ.get("K8S_FACTS", ROOT.parent / "shared" / "k8s"))


def kubectl(*words: str) -> str:
    """Return the output of `kubectl WORDS`. Warnings are failures too."""
    if not shutil.which("kubectl"):
        pytest.skip("no kubectl here: k8s/setup.sh installs it")
    done = subprocess.run(["kubectl", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), f"kubectl {' '.join(words)}: {done.returncode}\n{done.stderr}"
    return done.stdout


def added(what: str) -> str:
    """Return what `rankup add k8s` writes for train/main.py. `what`: a kind of job and options, "job+gpu+elastic"."""
    kind, *options = what.split("+")
    words = ["k8s", f"--kind={kind}", "--name=rankup", f"--image={IMAGE}", *(OPTIONS[each] for each in options),
             f"--file=k8s/{kind}.yaml", "--", "train/main.py", "train", "--name", "rankup",
             *(word for each in options for word in WORDS.get(each, ()))]
    given = COMMANDS["add"].parse([word for word in words if word])
    (made,) = [file.content for file in plan_files(given, ROOT).files if file.path == f"k8s/{kind}.yaml"]
    return made


def rendered(what: str) -> list[Object]:
    """Return the objects of a file in k8s/, of a file anywhere, or of a kind and options, "job+gpu+elastic", as kubectl
    reads them, not Python's YAML: a copy, to change."""
    return copy.deepcopy(_rendered(what))


@cache
def _rendered(what: str) -> list[Object]:
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write((K8S / what).read_text() if what.endswith(".yaml") else added(what))
        file.flush()
        # The only command that reads any kind without asking a cluster. It prints one object after the other
        rest = kubectl("label", "--local", "-o", "json", "-f", file.name, "made-by=nobody").strip()
    documents = []
    while rest:
        document, end = json.JSONDecoder().raw_decode(rest)
        del document["metadata"]["labels"]["made-by"]
        documents.append(document)
        rest = rest[end:].strip()
    assert documents, what
    return documents


PUBLISHED = {
    "PyTorchJob": "kubeflow.org_pytorchjobs.yaml",
    "TrainJob": "trainer.kubeflow.org_trainjobs.yaml",
    "TrainingRuntime": "trainer.kubeflow.org_trainingruntimes.yaml",
    "JobSet": "jobset.x-k8s.io_jobsets.yaml",
}


def _strict(schema: Any) -> Any:
    """Return a published schema as the API server applies it: no unknown fields, int-or-string allows either."""
    if isinstance(schema, list):
        return [_strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string") is True:
        return {"type": ["integer", "string"]}
    made = {key: _strict(value) for key, value in schema.items()}
    free = "additionalProperties" in schema or schema.get("x-kubernetes-preserve-unknown-fields") is True
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object" and not free:
        made["additionalProperties"] = False
    return made


@cache
def _published(kind: str) -> Object | None:
    path = FACTS / "crds" / PUBLISHED[kind]
    if not path.exists():
        return None
    (version,) = yaml.load(path.read_text(), yaml.CSafeLoader)["spec"]["versions"]
    schema = _strict(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}
    return schema  # type: ignore[no-any-return]


def problems(document: Object) -> list[str]:
    """Return the reasons for which a cluster would refuse this object."""
    kind, spec = document["kind"], document.get("spec", {})
    if kind not in PUBLISHED:
        return _core(document)
    # The names of the Services derive from the object's name, and must follow DNS-1035
    found = [] if re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", document["metadata"]["name"]) else ["metadata.name"]
    if (published := _published(kind)) is not None:
        errors = Draft4Validator(published).iter_errors(document)
        found += [f"{'.'.join(map(str, error.absolute_path))}: {error.message[:200]}" for error in errors]
    for replica in spec.get("pytorchReplicaSpecs", {}).values():
        found += _core({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, **replica["template"]})
    for job in (spec if kind == "JobSet" else spec.get("template", {}).get("spec", {})).get("replicatedJobs", []):
        found += _core({"apiVersion": "batch/v1", "kind": "Job", **job["template"]})
    return found


def _core(document: Object) -> list[str]:
    try:
        kubernetes_validate.validate(document, VERSION, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [str(error)[:400]]
    return []


def one(what: str, kind: str) -> Object:
    """Return the only object of this kind in a file or combination."""
    (found,) = [each for each in rendered(what) if each["kind"] == kind]
    return found
