"""The rules of each manifest in k8s/ decide what follows the end of a pod as the table in k8s/ends.md says."""

import re

import kubernetes_validate
import pytest
import yaml

from rankup import errors
from rankup.doctor import CODES
from tests.rigs.kube import K8S, rendered
from tests.rigs.kubeflow import OWNERS, Object, verdict

OURS = {value for name, value in vars(errors).items() if name.isupper() and isinstance(value, int)}
KILLED = 137
VERDICTS = {code for code in CODES.values() if code > 10}  # of the doctor
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
                found |= {(name, int(code)): row[column] for code in row[0].split(", ")}
    return found


@pytest.mark.parametrize("name", COLUMNS)
def test_k8s_manifests_treat_exit_codes_as_the_page_says(name: str) -> None:
    job, said = owner(COLUMNS[name]), table()
    assert set(said) == {(name, code) for name in COLUMNS for code in OURS | {KILLED}}
    for code in sorted(OURS | {KILLED}):
        assert said[name, code] == WORDS[verdict(job, code)], code
    assert {verdict(job, code) for code in VERDICTS} == {"fails"}


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
        assert job["completions"] == job["parallelism"] == 3  # a cluster lets users change them only if both are equal
        assert job["successPolicy"] == {"rules": [{"succeededCount": 1}]}


def spec_of_job(job: Object) -> Object:
    """Return the spec of a Job, or of the Job in a JobSet."""
    return job["spec"] if job["kind"] == "Job" else job["spec"]["replicatedJobs"][0]["template"]["spec"]


@pytest.mark.parametrize("what", ["job.yaml", "jobset.yaml"])
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
    whole = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "rankup"}, "spec": job}
    kubernetes_validate.validate(whole, "1.35", strict=True)
    with pytest.raises(kubernetes_validate.ValidationError, match="restartPolicyRules"):
        kubernetes_validate.validate(whole, "1.33", strict=True)
