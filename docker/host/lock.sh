#!/usr/bin/env bash
# Updates docker/requirements*.lock, with hashes, to the newest versions that pyproject.toml allows, but keeps torch.
# Run: make lock      (uv reads its own variables, such as UV_DEFAULT_INDEX)
# Edit: nothing here. To update torch and torchvision, edit their lines in docker/requirements.lock first.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
uv=${1:-uv}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
# Write one list for all machines: markers show what only Linux needs. 3.11 is the oldest supported Python
compile=("$uv" pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --no-annotate)

write() { # LOCK: keep the file's comments, and replace its packages with those from stdin
  { grep '^#' "$1"; cat; } > "$scratch/new"
  cp "$scratch/new" "$1"
}

grep -oE '^torch(vision)?==[^ ]+' docker/requirements.lock > "$scratch/pinned"
pin() { # LIST: all later lists must use the versions of this one
  sed -n 's/^\([a-z].*\) \\$/\1/p' "$1" > "$scratch/listed"
  sort -u "$scratch/listed" "$scratch/pinned" -o "$scratch/pinned"
}
# Resolve all extras together first: an extra alone might take a version that a later one can't use
"${compile[@]}" pyproject.toml --all-extras --constraint "$scratch/pinned" > "$scratch/all"
pin "$scratch/all"
: > "$scratch/runtime"
for extra in "" s3 gcs azure hf test; do
  "${compile[@]}" pyproject.toml --extra train ${extra:+--extra "$extra"} --constraint "$scratch/pinned" > "$scratch/all"
  # Each list is complete together with requirements.lock, which is always installed. All lists have the same versions.
  # Compare whole lines: an extra may need on all machines what the others need only on Windows
  awk 'FILENAME == ARGV[1] {known[$0]; next} /^[a-z]/ {new = !($0 in known)} new' "$scratch/runtime" "$scratch/all" |
    write "docker/requirements${extra:+-$extra}.lock"
  if [[ -z $extra ]]; then cp "$scratch/all" "$scratch/runtime"; fi
done
# Horovod is built in an environment that contains nothing else
# The list may end on its first line, where a sed range would not stop
awk '/^horovod = \[/ {inside = 1} inside {print} inside && /\]/ {exit}' pyproject.toml |
  grep -oE '"[^"]+"' | tr -d '"' > "$scratch/horovod.in"
"${compile[@]}" "$scratch/horovod.in" --constraint "$scratch/pinned" | write docker/requirements-horovod.lock
# --no-deps, because SkyPilot needs an older click than we do
"${compile[@]}" --no-deps tests/rigs/skypilot.txt | write tests/rigs/skypilot.txt
