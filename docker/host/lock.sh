#!/usr/bin/env bash
# Writes docker/requirements*.lock anew: the newest versions that pyproject.toml allows, but the present torch.
# Run: make lock PYTHON=python3.11      (the oldest Python that is supported: what runs there runs on newer ones)
# Edit: nothing here; to raise torch and torchvision, edit their two lines in docker/requirements.lock first.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
cuda='^(nvidia-[cn]|cuda|triton)' # what only a torch with CUDA pulls in has a list of its own; not nvidia-ml-py
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

write() { # LOCK: its comments and options stay, its versions are those on stdin
  { grep -E '^(#|--)' "$1"; cat; } > "$scratch/new"
  cp "$scratch/new" "$1"
}

"${1:-python3}" -m venv "$scratch/venv"
pip=$scratch/venv/bin/pip
# The runtime, which comes first, may not take a dateutil that the extra s3 can't: botocore wants one below 3
{ grep -E '^torch(vision)?==' docker/requirements.lock; echo 'python-dateutil<3'; } > "$scratch/pinned"
: > "$scratch/listed"
# The runtime first: an extra may not change its versions, and lists only what it adds
for extra in "" s3 horovod test text trainers trackers hf gcs azure; do
  "$pip" install --quiet --editable ".${extra:+[$extra]}" --constraint "$scratch/pinned"
  "$pip" freeze --all --exclude-editable --exclude pip --exclude wheel > "$scratch/pinned"
  if [[ -z $extra ]]; then grep -E "$cuda" "$scratch/pinned" | write docker/requirements-cuda.lock; fi
  grep -vxFf "$scratch/listed" "$scratch/pinned" | grep -vE "$cuda" | write "docker/requirements${extra:+-$extra}.lock"
  cp "$scratch/pinned" "$scratch/listed"
done
