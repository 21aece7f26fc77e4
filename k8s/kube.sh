#!/usr/bin/env bash
# Runs a job on a kind or minikube cluster of this machine: makes the cluster, installs the operator, follows the log.
# Run: make k8s-kind      (or k8s-minikube, -logs, -delete; FILE=job runs k8s/job.yaml, default pytorchjob)
# Edit: nothing. Set IMAGE and CLUSTER in the environment.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
kind=${FILE:-pytorchjob} cluster=${CLUSTER:-rankup}
# The default is the image that the manifests name and `make image` builds
image=${IMAGE:-rankup:$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)}
# The tests use this release; others may set other variables in the pods
operator="github.com/kubeflow/training-operator.git/manifests/overlays/standalone?ref=v1.9.4"
context=() # kubectl's current context, unless this script makes a cluster

say() { echo "kube: $*"; }
fail() { printf 'kube: %s\n' "$@" >&2; exit 2; }
k() { kubectl "${context[@]}" "$@"; }
need() { command -v "$1" > /dev/null || fail "$1 is not installed: $2"; }

[[ $kind =~ ^(pytorchjob|job|jobset|trainjob)$ ]] || fail "FILE must be pytorchjob, job, jobset or trainjob, got $kind"
name=$(sed -n 's/.*app.kubernetes.io\/instance: \([a-z0-9-]*\).*/\1/p' "k8s/$kind.yaml" | head -1)
case $kind in
  job | jobset | trainjob) first=batch.kubernetes.io/job-completion-index=0 ;;
  *) first=training.kubeflow.org/job-role=master ;;
esac
first+=,app.kubernetes.io/instance=$name

load() { # COMMAND...: run the command, which loads the image into the cluster's nodes
  docker image inspect "$image" > /dev/null 2>&1 || fail "there is no image $image: make image builds it"
  say "loading $image into the cluster"
  "$@"
}

install_operator() {
  if [[ $kind == job ]]; then return; fi
  [[ $kind == pytorchjob ]] ||
    fail "this script installs the training operator v1, which does not support $kind: see k8s/README.md"
  if ! k get crd pytorchjobs.kubeflow.org > /dev/null 2>&1; then
    say "installing the operator"
    # Server-side, because the schemas are too long for the annotation of a plain apply
    k apply --server-side -k "$operator"
  fi
  k --namespace kubeflow rollout status deployment/training-operator --timeout 300s
}

ended() { # print the conditions of the job that are true
  k get "$kind" "$name" -o 'jsonpath={range .status.conditions[?(@.status=="True")]}{.type} {end}'
}

follow() { # print the logs of the pods of rank 0, one after the other, until the job has ended
  local seen="" pod uid phase conditions
  while true; do
    conditions=" $(ended) "
    read -r uid pod phase < <(k get pods -l "$first" --sort-by .metadata.creationTimestamp \
      -o 'jsonpath={range .items[*]}{.metadata.uid} {.metadata.name} {.status.phase}{"\n"}{end}' | tail -1) || true
    if [[ -n ${uid:-} && $uid != "$seen" && $phase != Pending ]]; then
      seen=$uid
      k logs --follow "$pod" || true # the pod may be removed meanwhile; then a new one replaces it
    elif [[ $conditions == *" Failed "* ]]; then
      k get pods -l app.kubernetes.io/instance="$name" >&2
      echo "kube: the job failed: the lines above name the rank and the reason" >&2
      return 1
    elif [[ $conditions == *" Succeeded "* || $conditions == *" Complete "* ]]; then
      say "the job has finished"
      return
    else
      sleep "${POLL_S:-2}"
    fi
  done
}

start() {
  install_operator
  k apply -f k8s/volume.yaml
  k apply -f "k8s/$kind.yaml"
  follow
}

case ${1:-} in
  kind)
    need kind "see kind.sigs.k8s.io"
    k8s/setup.sh
    kind get clusters | grep -qx "$cluster" || kind create cluster --name "$cluster" --wait 300s
    context=(--context "kind-$cluster")
    load kind load docker-image "$image" --name "$cluster"
    start
    ;;
  minikube)
    need minikube "see minikube.sigs.k8s.io"
    k8s/setup.sh
    minikube -p "$cluster" status > /dev/null 2>&1 || minikube -p "$cluster" start
    context=(--context "$cluster")
    load minikube -p "$cluster" image load "$image"
    start
    ;;
  logs) follow ;;
  delete) # the job and its other objects, but not the volume, which has the checkpoints
    k delete -f "k8s/$kind.yaml" --ignore-not-found
    say "the volume stays: kubectl delete -f k8s/volume.yaml removes all checkpoints"
    ;;
  *) fail "usage: [FILE=NAME] k8s/kube.sh kind|minikube|logs|delete" ;;
esac
