"""What the manifests in `templates/k8s/` need to know. Each kind of job is a template; `parts/` has what they share.

In an image the repository is at /work, and its runs/ is a link to /runs, where each pod mounts the volume of the runs.
`python -m rankup launch ARGS` starts the agent of a pod. The volume has a file of its own, which all jobs of a
repository share: deleting a job's file then deletes no checkpoint.
"""

import json
import re
import shlex
import textwrap
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from rankup.errors import UserError

# Words that mean themselves in YAML without quotes
PLAIN = re.compile(r"(?!(?i:true|false|null|yes|no|on|off|y|n)$)-{0,2}[A-Za-z/]([\w/.=@-]|:(?=[\w/]))*", re.ASCII)
NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")  # of any object of Kubernetes
IMAGE = re.compile(r"[\w.:/@-]+", re.ASCII)
CONTAINERS = {"pytorchjob": "pytorch", "trainjob": "node"}  # names that the operators look for
# The exit codes that fail a job. Kubernetes has no ranges
CODES = "\n        ".join(textwrap.wrap(", ".join(map(str, range(1, 128))), 97))


def k8s_variables(given: Namespace, variables: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return `variables` with what only manifests need. `given`: the options of `rankup add`. Raises UserError for
    options that don't go together."""
    kind, name, path = given.kind, variables["name"], variables["path"]
    least, most, gpus = variables["least"], variables["most"], variables["gpus"]
    elastic = least < most
    for flag, text in (("--queue", given.queue), ("--secret", given.secret), ("--data-claim", given.data_claim)):
        if text and not NAME.fullmatch(text):
            raise UserError(f"add: {flag} must be a name of Kubernetes (small letters, digits, - and .), got {text}.")
    volume = str(PurePosixPath(path).with_name("volume.yaml"))
    data_claim = given.data_claim or f"{name}-data"
    env, mounts, volumes = [], [], []
    if kind == "pytorchjob" and elastic:  # without a Master the operator sets no RANK
        label = "metadata.labels['training.kubeflow.org/replica-index']"
        env.append(f'name: RANK\n        valueFrom: {{fieldRef: {{fieldPath: "{label}"}}}}')
    if given.secret:  # 288 is 0440 in octal: root's file that the pod's group can read
        env.append("{name: RANKUP_SECRET_FILE, value: /run/secrets/rankup/secret}")
        mounts.append("{name: secret, mountPath: /run/secrets/rankup, readOnly: true}")
        volumes.append(f"{{name: secret, secret: {{secretName: {_word(given.secret)}, defaultMode: 288}}}}")
    names = [PurePosixPath(each.target).name for each in variables["data"]]
    if len({*names}) < len(names):
        raise UserError(f"add: --data must name folders of different names with k8s, got {' and '.join(given.data)}.")
    for each in variables["data"]:
        subpath = json.dumps(PurePosixPath(each.target).name)
        mounts.append(f"{{name: data, mountPath: {json.dumps(each.target)}, subPath: {subpath}, readOnly: true}}")
    if variables["data"]:
        volumes.append(f"{{name: data, persistentVolumeClaim: {{claimName: {_word(data_claim)}}}}} # EDIT: of the data")
    quoted = {key: _word(text) for key, text in (("queue", given.queue), ("image", variables["image"])) if text}
    return variables | {
        "kind": kind, "elastic": elastic, "spread": bool(gpus), "queue": given.queue, "secret": given.secret,
        "volume": volume, "claim": _claim_in(folder / volume) or f"{name}-runs", "data_claim": data_claim,
        "makes_data_claim": bool(variables["data"]) and not given.data_claim,
        "container": CONTAINERS.get(kind, "trainer"), "args": _flow(_arguments(given, variables)), "codes": CODES,
        "pods": "one pod" if most == 1 else f"{least} to {most} pods" if elastic else f"{most} pods",
        "run": f"kubectl apply -f {shlex.quote(volume)} -f {shlex.quote(path)}",
        "env": env, "mounts": mounts, "volumes": volumes, **quoted,
    }


def same_name(manifest: Path, name: str) -> list[str]:
    """Return notes on the other manifests beside `manifest` with a job of the same name, of which only one can run."""
    same = re.compile(rf"^(metadata: {{|  )name: {name}[,\n]", re.MULTILINE)
    return [
        f"name  {other.name} makes a job {name} too: give --name, so that both can run"
        for other in sorted(manifest.parent.glob("*.y*ml"))
        if other != manifest and other.is_file() and same.search(other.read_text(errors="replace"))
    ]


def _claim_in(volume: Path) -> str:
    """Return the claim in a volume.yaml that is there already, which all jobs of the repository share, or ""."""
    text = volume.read_text(errors="replace") if volume.is_file() else ""
    found = re.search(r"(?m)^kind: PersistentVolumeClaim.*\nmetadata:(?: \{|\n  )name: ([a-z0-9.-]+)", text)
    return found[1] if found else ""


def _arguments(given: Namespace, variables: dict[str, Any]) -> list[str]:
    """Return the arguments of `rankup launch` in a pod. The operators set who the pod is; in an Indexed Job it has only
    its index. All jobs share a volume, so a name that the user chose is the run's too."""
    kind, name, most, gpus = given.kind, variables["name"], variables["most"], variables["gpus"]
    options = list(variables["options"])  # --nnodes of an elastic job
    if kind in ("job", "jobset"):
        master = f"{name}-0.{name}" if kind == "job" else f"{name}-node-0-0.{name}"
        options = options or ["--nnodes", str(most)]
        options += ["--master-addr", master] if most > 1 else []
        options += ["--nproc", str(gpus)] if gpus else []
    elif kind == "pytorchjob" and options:
        options += ["--master-addr", f"{name}-worker-0", "--master-port", "29400"]
    if given.name and "--name" not in variables["words"]:
        options += ["--name", name]
    return [*options, "--join-timeout-s", "900", *variables["words"]]


def _word(text: str) -> str:
    """Return a text as one word of YAML."""
    return text if PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=False)


def _flow(words: Sequence[str]) -> str:
    """Return words as a list of YAML, in lines of up to 90 columns. Kubernetes replaces $(NAME), and makes $ of $$."""
    lines = [""]
    for part in (_word(word.replace("$", "$$")) for word in words):
        fits = len(lines[-1]) + len(part) < 90 or not lines[-1]
        lines[-1:] = [f"{lines[-1]}{part}, "] if fits else [lines[-1], f"{part}, "]
    text = "\n  ".join(line.rstrip() for line in lines).removesuffix(",")
    return f"[{text}]"
