#!/usr/bin/env bash
# Converts the project's image into one file for Apptainer, which needs no daemon on the nodes.
# Run: make sif      (where docker and apptainer are; then: IMAGE=rankup.sif sbatch slurm/ddp.sbatch)
# Edit: IMAGE and SIF, here or in the environment.
set -euo pipefail
IMAGE=${IMAGE:-rankup:runtime}
SIF=${SIF:-rankup.sif}

fail() { printf 'sif: %s\n' "$@" >&2; exit 2; }

for tool in docker apptainer; do
  command -v "$tool" > /dev/null \
    || fail "$tool is not here: run make sif on a machine that has docker and apptainer, and copy $SIF"
done
docker image inspect "$IMAGE" > /dev/null 2>&1 || fail "no image $IMAGE here: make image builds it"
archive=$(mktemp --suffix .tar)
trap 'rm -f "$archive"' EXIT
docker save --output "$archive" "$IMAGE"
apptainer build --force "$SIF" "docker-archive:$archive"
echo "sif: $SIF, $(du -h "$SIF" | cut -f 1)"
