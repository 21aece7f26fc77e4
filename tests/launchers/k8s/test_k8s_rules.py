"""The rules of each manifest in k8s/ decide what follows the end of a pod as the table in k8s/ends.md says."""

import re

import kubernetes_validate
import pytest
import yaml

from rankup import errors
from rankup.doctor import CODES
from tests.rigs.kube import K8S, problems, rendered
from tests.rigs.kubeflow import OWNERS, Object, verdict

OURS = {value for name, value in vars(errors).items() if name.isupper() and isinstance(value, int)}
KILLED = 137
COLUMNS = {
    "PyTorchJob": "pytorchjob.yaml", "Job": "job.yaml", "JobSet": "jobset.yaml", "TrainJob": "trainjob.yaml",
}
WORDS = {"done": "done", "fails": "the job fails", "new": "new pod, not counted", "counted": "new pod, counted"}


def owner(what: str) -> Object:
    (found,) = [each for each in rendered(what) if each["kind"] in OWNERS]
    return found


def table() -> dict[tuple[str, int], str]:
    """Return the table of k8s/ends.md, by column and exit code."""
    (text,) = re.findall(r"(?m)^(\| exit code .*\n(?:\|.*\n)+)", (K8S / "ends.md").read_text())
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    found = {}
    for column, title in enumerate(head[2:], 2):
        for row in rows:
            for name in title.split(" (")[0].split(", "):
                for codes in row[0].split(", "):
                    first, _, last = codes.partition(" to ")
                    found |= {(name, code): row[column] for code in range(int(first), int(last or first) + 1)}
    return found


@pytest.mark.parametrize("name", COLUMNS)
def test_k8s_manifests_treat_exit_codes_as_the_page_says(name: str) -> None:
    job, said = owner(COLUMNS[name]), table()
    assert {code for title, code in said if title == name} == {*range(128), *OURS, KILLED}
    for code in sorted({*range(128), *OURS, KILLED}):
        assert said[name, code] == WORDS[verdict(job, code)], code
    assert all(0 < code < 128 for code in (*CODES.values(), errors.FAULT, errors.USER_MISTAKE) if code)
    assert verdict(job, 255) in ("new", "counted")


@pytest.mark.parametrize("what", ["job.yaml", "jobset.yaml", "trainjob.yaml"])
def test_k8s_preempted_pod_is_not_counted_and_a_mistake_stays_final(what: str) -> None:
    job = owner(what)
    for code in OURS | {KILLED}:
        final = {errors.FINISHED: "done", errors.FAULT: "fails", errors.USER_MISTAKE: "fails"}
        assert verdict(job, code, disrupted=True) == final.get(code, "new")


@pytest.mark.parametrize("kind", ["pytorchjob", "job", "jobset"])
def test_k8s_elastic_job_is_done_once_one_pod_is(kind: str) -> None:
    plain, elastic = owner(kind), owner(f"{kind}+elastic")
    assert [verdict(elastic, code) for code in OURS] == [verdict(plain, code) for code in OURS]
    if kind == "pytorchjob":
        assert (list(elastic["spec"]["pytorchReplicaSpecs"]), elastic["spec"]["elasticPolicy"]) == (["Worker"], {})
    else:
        job = spec_of_job(elastic)
        assert job["completions"] == job["parallelism"] == 4  # a cluster lets users change them only if both are equal
        assert job["successPolicy"] == {"rules": [{"succeededCount": 1}]}


def spec_of_job(job: Object) -> Object:
    """Return the spec of a Job, or of the Job in a JobSet or a TrainingRuntime."""
    spec = job["spec"] if job["kind"] != "TrainingRuntime" else job["spec"]["template"]["spec"]
    return spec if job["kind"] == "Job" else spec["replicatedJobs"][0]["template"]["spec"]


@pytest.mark.parametrize("what", ["job.yaml", "jobset.yaml", "trainjob.yaml"])
def test_k8s_lines_for_newer_clusters_restart_codes_to_retry(what: str) -> None:
    """These lines are commented out, because an older kubectl would refuse the file with them."""
    text = (K8S / what).read_text()
    newer = re.sub(r"(?m)^( +)# (restartPolicy\w*: )", r"\1\2", text)
    job = spec_of_job(next(yaml.safe_load_all(newer)))
    (container,) = job["template"]["spec"]["containers"]
    assert container["restartPolicy"] == "Never"
    (rule,) = container["restartPolicyRules"]
    again = {code for code in OURS | {KILLED} if errors.worth_restarting(code)} - {errors.LEFT_OUT}  # needs a new node
    assert rule == {"action": "Restart", "exitCodes": {"operator": "In", "values": sorted(again)}}
    assert problems(next(yaml.safe_load_all(text))) == []
    whole = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "rankup"}, "spec": job}
    kubernetes_validate.validate(whole, "1.35", strict=True)
    with pytest.raises(kubernetes_validate.ValidationError, match="restartPolicyRules"):
        kubernetes_validate.validate(whole, "1.33", strict=True)
