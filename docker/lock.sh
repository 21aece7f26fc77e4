#!/usr/bin/env bash
# Write docker/requirements*.lock anew: the newest versions that pyproject.toml allows, torch and torchvision as they are.
# Run: make lock PYTHON=python3.11      (the oldest Python that is supported: what runs there runs on newer ones)
# Edit: the lines torch== and torchvision== in requirements.lock, to raise these two.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
lock=docker/requirements.lock
venv=$(mktemp -d)
trap 'rm -rf "$venv"' EXIT

"${1:-python3}" -m venv "$venv"
grep -E '^torch(vision)?==' "$lock" > "$venv/keep.txt"
"$venv/bin/pip" install --quiet --editable '.[test]' --constraint "$venv/keep.txt"
installed() {
  # torch needs the CUDA libraries and triton on Linux only; elsewhere there are none
  "$venv/bin/pip" freeze --all --exclude-editable --exclude pip --exclude wheel |
    sed -E '/^(nvidia|cuda|triton)/s/$/; platform_system == "Linux"/'
}
installed > "$venv/all.txt"
{ grep '^#' "$lock"; cat "$venv/all.txt"; } > "$venv/requirements.lock"
# What a BERT and Horovod need besides, in lists of their own: the image is built anew when requirements.lock changes
for extra in text horovod; do
  "$venv/bin/pip" install --quiet --editable ".[test,$extra]" --constraint "$venv/all.txt"
  { grep '^#' "docker/requirements-$extra.lock"; installed | grep -vxFf "$venv/all.txt"; } > "$venv/requirements-$extra.lock"
  installed > "$venv/all.txt"
done
cp "$venv"/requirements*.lock docker/
