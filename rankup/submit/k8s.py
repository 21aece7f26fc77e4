"""A manifest of Kubernetes: the snapshot goes along, and an init step of each pod unpacks it over the image's files.

Up to 900 KB it is an immutable ConfigMap, which the job owns. A larger one goes through a pod into the run's volume.
kubectl turns the manifest into JSON, so the file may be any that `kubectl apply` takes.
"""

import base64
import json
import secrets
import shlex
import subprocess
import time
from collections.abc import Iterator, Sequence
from typing import Any

from rankup.errors import FAULT, FINISHED, UserError, root_cause
from rankup.files import IN_IMAGE
from rankup.submit.machine import say, uninterrupted
from rankup.submit.snapshot import Snapshot

Object = dict[str, Any]
OWNERS = {"Job": "jobs.batch", "PyTorchJob": "pytorchjobs.kubeflow.org", "JobSet": "jobsets.jobset.x-k8s.io",
          "TrainJob": "trainjobs.trainer.kubeflow.org"}
LABEL = "rankup/snapshot"
MOST_BYTES = 900_000  # packed: a ConfigMap holds 1 MiB
# The image's other files stay: its build may have made them. Some may be another user's, whom this one can't read
UNPACK = """set -e
if cd "$1" 2> /dev/null; then find . -mindepth 1 -maxdepth 1 -exec cp -a -t /rankup/code {} + || true; fi
tar -xzf "$2" -C /rankup/code
cd /rankup/code
[ -e runs ] || [ ! -d /runs ] || ln -s /runs runs
shift 2
[ $# = 0 ] || mkdir -p "$@" # what is mounted inside"""
# It gets its name when it is whole. The newest five stay, and those of pods
RECEIVE = """mkdir -p /runs/.rankup && cd /runs/.rankup || exit
cat > "$1.part" && gzip -t < "$1.part" && mv "$1.part" "$1" || exit
for old in $(ls -t *.tar.gz | tail -n +6); do
  case $2 in *"${old%.tar.gz}"*) ;; *) rm -f "$old" ;; esac
done"""


def kubectl(*words: str, text: bytes = b"", once: bool = False) -> str:
    """Return the output of kubectl. Raises UserError with what it says. `once`: it is fine if the object exists."""
    try:
        done = subprocess.run(["kubectl", *words], input=text, capture_output=True, check=False)
    except FileNotFoundError:
        raise UserError("submit: kubectl must be installed here, got none.") from None
    if done.returncode and not (once and b"(AlreadyExists)" in done.stderr):
        said = " ".join(done.stderr.decode(errors="replace").split())
        raise UserError(f"submit: `kubectl {words[0]}` must succeed, got: {said}")
    return done.stdout.decode()


def submit(snapshot: Snapshot, file: str, args: Sequence[str], *, dry: bool, follow: bool) -> int:
    """Submit the job of a manifest, and follow its pods. Returns the job's exit code, or 0 without `follow`. Raises
    UserError if the cluster refuses an object."""
    objects, rest = list[Object](), kubectl("label", "--local", "-f", file, "-o", "json", f"{LABEL}={snapshot.name}")
    while rest := rest.strip():
        each, end = json.JSONDecoder().raw_decode(rest)
        objects, rest = [*objects, each], rest[end:]
    owner = next(each for each in objects if each["kind"] in OWNERS)
    name = owner["metadata"]["name"]
    what, code = f"{OWNERS[owner['kind']]}/{name}", f"rankup-{snapshot.name}"
    space = ["-n", owner["metadata"]["namespace"]] if "namespace" in owner["metadata"] else []
    packed, templates = snapshot.tar("w:gz"), [template for each in objects for template in _templates(each)]
    large = len(packed) > MOST_BYTES
    sender = _sender(templates[0]["spec"], code) if large else {}
    for template in templates:
        _unpack(template["spec"], code, args, large=large)
    carried = {
        "apiVersion": "v1", "kind": "ConfigMap", "immutable": True,
        "metadata": {"name": code, "labels": {LABEL: snapshot.name}},
        "binaryData": {"code.tar.gz": base64.b64encode(packed).decode()},
    }
    both = {"apiVersion": "v1", "kind": "List", "items": objects}
    written = {f"{code}.json": sender or carried, f"{name}.json": both}
    if not dry:
        if kubectl("get", *space, what, "-o", "name", "--ignore-not-found"):
            raise UserError(f"{file}: its job must have a name that is free, got {name}. kubectl delete {what}")
        for path, content in written.items():
            snapshot.keep(path, json.dumps(content).encode())
    # Not `apply` for a ConfigMap: it would keep a copy of it as an annotation, which is too long
    create, apply = ([verb, *space, "-f", f".rankup/{path}"]
                     for verb, path in zip(("create", "apply"), written, strict=True))
    print(f"+ kubectl {shlex.join(create)}", flush=True)
    if not dry:
        kubectl(*create, once=not large)
    if large:
        _stream(packed, code, sender["metadata"]["name"], space, dry=dry)
    print(f"+ kubectl {shlex.join(apply)}", flush=True)

    def start() -> None:
        kubectl(*apply)
        if not large:
            uid = kubectl("get", *space, what, "-o", "jsonpath={.metadata.uid}")
            owned = [{"apiVersion": owner["apiVersion"], "kind": owner["kind"], "name": name, "uid": uid}]
            kubectl("patch", *space, "configmap", code, "-p", json.dumps({"metadata": {"ownerReferences": owned}}))

    stopped = not dry and uninterrupted(start)[1]
    labels = templates[0].get("metadata", {}).get("labels") or {"job-name": name}
    chosen = [*space, "-l", ",".join(f"{key}={value}" for key, value in sorted(labels.items()))]
    return _follow(what, chosen, space, quiet=dry or stopped or not follow)


def _stream(packed: bytes, code: str, pod: str, space: Sequence[str], *, dry: bool) -> None:
    """Send the packed snapshot through a pod into the run's volume, and remove the pod."""
    file = f"{code}.tar.gz"
    print(f"+ kubectl exec -i {pod} -- sh -c 'cat > /runs/.rankup/{file}' < {file}", flush=True)
    if dry:
        return
    try:
        _wait([*space, "--field-selector", f"metadata.name={pod}"], "", space)
        used = kubectl("get", *space, "pods", "-l", LABEL, "-o", "jsonpath={.items[*].metadata.labels}")
        kubectl("exec", "-i", *space, pod, "--", "sh", "-c", RECEIVE, "sh", file, used, text=packed)
    finally:
        kubectl("delete", *space, "pod", pod, "--grace-period=1", "--ignore-not-found")


def _templates(part: Any) -> Iterator[Object]:
    """Iterate over the templates of pods in an object."""
    if isinstance(part, dict) and isinstance(part.get("spec"), dict) and "containers" in part["spec"]:
        yield part
    elif isinstance(part, dict | list):
        for each in part.values() if isinstance(part, dict) else part:
            yield from _templates(each)


def _unpack(spec: Object, code: str, args: Sequence[str], *, large: bool) -> None:
    """Add to a pod the step that unpacks the snapshot, and to its first container the arguments."""
    main = spec["containers"][0]
    where, mounts = main.setdefault("workingDir", IN_IMAGE), main.setdefault("volumeMounts", [])
    runs = [each for each in mounts if each["mountPath"] == "/runs"]
    inner = [each["mountPath"][len(where) + 1:] for each in mounts if each["mountPath"].startswith(f"{where}/")]
    packed = f"/runs/.rankup/{code}.tar.gz" if large else "/rankup/packed/code.tar.gz"
    volumes: dict[str, Object] = {"rankup-code": {"emptyDir": {}}}
    volumes |= {} if large else {"rankup-packed": {"configMap": {"name": code}}}
    step = {
        "name": "rankup-code", "command": ["sh", "-c", UNPACK, "sh", where, packed, *inner],
        "volumeMounts": [*runs, *({"name": name, "mountPath": f"/{name.replace('-', '/')}"} for name in volumes)],
        **{key: main[key] for key in ("image", "imagePullPolicy", "resources", "securityContext") if key in main},
    }
    spec["initContainers"] = [*spec.get("initContainers", []), step]
    spec["volumes"] = [*spec.get("volumes", []), *({"name": name, **kind} for name, kind in volumes.items())]
    # Read-only, as the image is: what a script writes there would be lost with the pod
    mounts.append({"name": "rankup-code", "mountPath": where, "readOnly": True})
    if args:
        main["args"] = [*main.get("args", []), *(word.replace("$", "$$") for word in args)]


def _sender(spec: Object, code: str) -> Object:
    """Return a pod that mounts the run's volume as the job's pods do, and waits for the snapshot."""
    main = spec["containers"][0]
    runs = [each for each in main.get("volumeMounts", []) if each["mountPath"] == "/runs"]
    if not runs:
        raise UserError(f"submit: above {MOST_BYTES} bytes packed, the pods must have a volume at /runs, got none.")
    few = {"cpu": "500m", "memory": "256Mi"}
    waits = {"name": "send", "command": ["sleep", "3600"], "volumeMounts": runs,
             "resources": {"requests": few, "limits": few},
             **{key: main[key] for key in ("image", "imagePullPolicy", "securityContext") if key in main}}
    named = ("securityContext", "imagePullSecrets", "nodeSelector", "tolerations")
    kept = {key: spec[key] for key in named if key in spec}
    return {
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": f"{code}-{secrets.token_hex(2)}"},
        "spec": {**kept, "containers": [waits], "restartPolicy": "Never", "activeDeadlineSeconds": 3600,
                 "volumes": [each for each in spec["volumes"] if each["name"] == runs[0]["name"]]},
    }


# Following ------------------------------------------------------------------------------------------------------------


def _ask(*words: str) -> Object:
    found: Object = json.loads(kubectl("get", *words, "-o", "json"))
    return found


def _wait(chosen: Sequence[str], what: str, space: Sequence[str]) -> str:
    """Wait until all pods have started their containers, and say what the cluster says about those that can't. Returns
    the condition with which the job has ended, or ""."""
    before, looks = "", 0
    while True:
        looks += 1
        pods = _ask("pods", *chosen)["items"]
        if over := _over(what, space) if what else "":
            return over
        if pods and all(each.get("status", {}).get("containerStatuses") and not _why(each) for each in pods):
            return ""
        why = next(filter(None, map(_why, pods)), "")
        if not pods:
            selector = f"involvedObject.name={what.rpartition('/')[2]},type=Warning"
            why = next((each["message"] for each in _ask("events", *space, "--field-selector", selector)["items"]), "")
            why = why or (f"{what} has no pod yet: it may wait in a queue" if looks > 3 else "")
        if why and why != before:
            say(why)
        before = why
        time.sleep(1)


def _why(pod: Object) -> str:
    """Return why a pod waits, in the cluster's words; "" if it does not."""
    name, status = pod["metadata"]["name"], pod.get("status", {})
    both = ("initContainerStatuses", "containerStatuses")
    states = [each["state"] for which in both for each in status.get(which, [])]
    found = [each for each in status.get("conditions", []) if each.get("reason") == "Unschedulable"]
    found += [state["waiting"] for state in states if "waiting" in state]
    shown = (f"{name}: {each.get('reason', 'waits')} {each.get('message', '')}" for each in found)
    return " ".join(next(shown, "").split())


def _over(what: str, space: Sequence[str]) -> str:
    """Return the condition with which a job has ended, or ""."""
    conditions = _ask(*space, what).get("status", {}).get("conditions", [])
    ends = ("Complete", "Completed", "Succeeded", "Failed")
    return next((each["type"] for each in conditions if each["type"] in ends and each["status"] == "True"), "")


def _follow(what: str, chosen: Sequence[str], space: Sequence[str], *, quiet: bool) -> int:
    """Print the logs of the job's pods until the job is over. Returns its exit code."""
    logs = ["kubectl", "logs", "-f", *chosen, "--tail=-1", "--max-log-requests=100", "--ignore-errors"]
    since = list[str]()
    print(f"+ {' '.join(logs)}", flush=True)
    try:
        while not quiet and not (over := _wait(chosen, what, space)):
            subprocess.run([*logs, *since], check=False)
            time.sleep(1)  # until the cluster knows how the job goes on
            since = [f"--since-time={time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())}"]
    except KeyboardInterrupt:
        quiet = True
    if quiet:
        say(f"Look: kubectl get pods {' '.join(chosen)}. Stop: kubectl delete {what}. Come back: {' '.join(logs)}")
        return FINISHED
    ended = [each["state"].get("terminated", {}).get("exitCode", 0) for pod in _ask("pods", *chosen)["items"]
             for each in pod.get("status", {}).get("containerStatuses", [])]
    say(f"{what} is over: {over}")
    return root_cause(ended) or FAULT if over == "Failed" else FINISHED
