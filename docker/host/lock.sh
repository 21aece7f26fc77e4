#!/usr/bin/env bash
# Writes docker/requirements*.lock anew, with hashes: the newest versions that pyproject.toml allows, but the present torch.
# Run: make lock      (uv looks where its own variables say, such as UV_DEFAULT_INDEX)
# Edit: nothing here; to raise torch and torchvision, edit their lines in docker/requirements.lock first.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
uv=${1:-uv}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
# One list for every machine: markers say what Linux alone needs. The oldest Python that is supported comes first
compile=("$uv" pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --no-annotate)

write() { # LOCK: its comments stay, its packages are those on stdin
  { grep '^#' "$1"; cat; } > "$scratch/new"
  cp "$scratch/new" "$1"
}

grep -oE '^torch(vision)?==[^ ]+' docker/requirements.lock > "$scratch/pinned"
pin() { # LIST: its versions hold for all that follow
  sed -n 's/^\([a-z].*\) \\$/\1/p' "$1" > "$scratch/listed"
  sort -u "$scratch/listed" "$scratch/pinned" -o "$scratch/pinned"
}
# All extras at once: one that came first might take a version that a later one can't
"${compile[@]}" pyproject.toml --all-extras --constraint "$scratch/pinned" > "$scratch/all"
pin "$scratch/all"
: > "$scratch/runtime"
for extra in "" s3 gcs azure hf test; do
  "${compile[@]}" pyproject.toml --extra train ${extra:+--extra "$extra"} --constraint "$scratch/pinned" > "$scratch/all"
  # Together with requirements.lock, which comes with all of them, each list is complete. Their versions agree
  awk 'FILENAME == ARGV[1] {known[$1]; next} /^[a-z]/ {new = !($1 in known)} new' "$scratch/runtime" "$scratch/all" |
    write "docker/requirements${extra:+-$extra}.lock"
  if [[ -z $extra ]]; then cp "$scratch/all" "$scratch/runtime"; fi
done
# Horovod is built in an environment that holds nothing else
# The list may end on the line where it begins, which a range of sed does not see
awk '/^horovod = \[/ {inside = 1} inside {print} inside && /\]/ {exit}' pyproject.toml |
  grep -oE '"[^"]+"' | tr -d '"' > "$scratch/horovod.in"
"${compile[@]}" "$scratch/horovod.in" --constraint "$scratch/pinned" | write docker/requirements-horovod.lock
# Not resolved: SkyPilot's click is older than ours
"${compile[@]}" --no-deps tests/rigs/skypilot.txt | write tests/rigs/skypilot.txt
