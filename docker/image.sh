#!/usr/bin/env bash
# Builds the image from what this machine can reach, then tests it: imports torch and torchvision, trains two steps.
# Run: make image      (TARGET=compile adds a compiler, TARGET=horovod adds Horovod; more variables: docker/README.md)
# Edit: nothing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. docker/host/settings.sh

say() { echo "image: $*"; }
fail() { printf 'image: %s\n' "$@" >&2; exit 2; }

target=$(setting TARGET runtime)
[[ $target == runtime || -f docker/$target.Dockerfile ]] || fail "TARGET must be compile or horovod, got $target"
docker/host/setup.sh
base=$(docker/host/base.sh)

# Take the packages from docker/wheels if it has wheels, or if pip would not reach the index from inside a build
if [[ -n $(find docker/wheels -name '*.whl' -print -quit) ]]; then
  reason="the folder has wheels already"
elif [[ $base == rankup-base:* ]]; then
  reason="no registry answers, so an index may not answer either"
elif [[ -z $(setting PIP_CONF) && -n $(python3 -m pip config list 2> /dev/null) ]]; then
  reason="this machine's pip has settings of its own"
fi
if [[ -n ${reason:-} ]]; then
  say "packages from docker/wheels: $reason"
  docker/host/wheels.sh
else
  say "packages from the index"
fi
if [[ $target == horovod ]]; then docker/host/sources.sh "${reason:+offline}"; fi

version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
revision=$(git describe --always --abbrev=40 --dirty --exclude '*' 2> /dev/null || echo unknown)
# The labels are in the command, not in the Dockerfile, so that a new revision changes no layer
labels=()
for label in "title=rankup" "description=One PyTorch training job, written once, started anywhere." licenses=MIT \
  "version=$version" "revision=$revision"; do
  labels+=(--label "org.opencontainers.image.$label")
done

replaced=()
build() { # DOCKERFILE IMAGE [OPTION...]: build the image, and remove it if it does not work
  local dockerfile=$1 image=$2 before log
  shift 2
  before=$(docker image inspect -f '{{.Id}}' "$image" 2> /dev/null || true)
  docker buildx build --load --file "$dockerfile" --tag "$image" "${labels[@]}" "$@" .
  [[ $(docker image inspect -f '{{.Id}}' "$image") != "$before" ]] || return 0
  log=$(mktemp)
  # Run it as a user that the image does not know and that may write only to /tmp
  docker run --rm --network none --read-only --tmpfs /tmp:mode=1777 --cap-drop ALL --security-opt no-new-privileges \
    --user 54321:54321 --entrypoint python "$image" -c '
import torch, torchvision
print("image: torch", torch.__version__, "torchvision", torchvision.__version__)
from train.main import main
raise SystemExit(main("train --dataset digits --max-steps 2 --run-dir /tmp/runs".split()))' > "$log" 2>&1 ||
    { cat "$log" >&2; rm "$log"; docker rmi -f "$image" > /dev/null; fail "removed $image, which failed: see above"; }
  grep '^image:' "$log"
  rm "$log"
  replaced+=("${before:-none}")
}

# The packages come first, with all that pip may need. docker/Dockerfile is what `rankup add` writes for any repository:
# pip finds the packages installed there, and asks no index
extras=$(setting EXTRAS) torch_index=$(setting TORCH_INDEX)
packages=rankup:packages${extras:+-${extras// /-}}
secrets=(--secret "id=pip,src=$(setting PIP_CONF /dev/null)" --secret "id=ca,src=$(setting PIP_CA /dev/null)")
# A build would first send all wheels to the engine, which forgets them, so look whether anything changed
lists=(docker/requirements.lock)
for extra in $extras; do lists+=("docker/requirements-$extra.lock"); done
made_of=$({ cat docker/packages.Dockerfile docker/host/locked.sh "${lists[@]}"
  echo "$(docker image inspect -f '{{.Id}}' "$base") $torch_index $extras"; } | sha256sum | cut -c1-16)
if [[ $(docker image inspect -f '{{index .Config.Labels "made-of"}}' "$packages" 2> /dev/null) != "$made_of" ]]; then
  replaced+=("$(docker image inspect -f '{{.Id}}' "$packages" 2> /dev/null || echo none)")
  docker buildx build --load --file docker/packages.Dockerfile --tag "$packages" --label "made-of=$made_of" \
    --build-arg "BASE_IMAGE=$base" --build-arg "TORCH_INDEX=$torch_index" --build-arg "EXTRAS=$extras" "${secrets[@]}" .
fi
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
printf '[global]\nno-index = true\n[install]\nno-build-isolation = false\n' > "$scratch/pip.conf"
# With a TORCH_INDEX the packages of the list that are for CUDA are not installed, and should not be
sed "${torch_index:+s|-r docker/requirements.lock|-r /dev/null|}" docker/Dockerfile > "$scratch/Dockerfile"

image=$(setting IMAGE "rankup:$target")
runtime=$([[ $target == runtime ]] && echo "$image" || echo rankup:runtime)
build "$scratch/Dockerfile" "$runtime" --build-arg "BASE_IMAGE=$packages" --secret "id=pip,src=$scratch/pip.conf"
[[ $target == runtime ]] || build "docker/$target.Dockerfile" "$image" "${secrets[@]}"
# Tag it with its version too, as the manifests in k8s/ do: a cluster node never pulls a name again that it already has
if [[ $target != runtime || $image == rankup:runtime ]]; then docker tag rankup:runtime "rankup:$version"; fi
# Remove the images that were replaced, unless they have another name or a container uses them
for old in "${replaced[@]}"; do
  if [[ $(docker image inspect -f '{{len .RepoTags}}' "$old" 2> /dev/null) == 0 ]]; then
    docker rmi "$old" > /dev/null 2>&1 || true
  fi
done
say "$image, $(docker image inspect -f '{{.Size}}' "$image" | awk '{printf "%.2f GB", $1 / 1e9}'), revision $revision"
