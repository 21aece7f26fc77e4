#!/usr/bin/env bash
# Builds the image from what this machine can reach, and tries it: imports torch and torchvision, trains two steps.
# Run: make image      (TARGET=compile adds a compiler; BASE_IMAGE, TORCH_INDEX, PIP_CONF, PIP_CA: docker/README.md)
# Edit: nothing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. docker/settings.sh

say() { echo "image: $*"; }
fail() { printf 'image: %s\n' "$@" >&2; exit 2; }

docker/setup.sh
BASE_IMAGE=$(docker/base.sh)
export BASE_IMAGE

# The packages: from the wheelhouse where there is one, or where pip inside a build would be lost
if [[ -n $(find docker/wheels -name '*.whl' -print -quit) ]]; then
  reason="it holds wheels already"
elif [[ $BASE_IMAGE == rankup-base:* ]]; then
  reason="no registry answers, so an index may not either"
elif [[ -z $(setting PIP_CONF) && -n $(python3 -m pip config list 2> /dev/null) ]]; then
  reason="this machine's pip has settings of its own"
fi
if [[ -n ${reason:-} ]]; then
  say "packages from docker/wheels: $reason"
  docker/wheels.sh
else
  say "packages from the index"
fi

if [[ $(setting TARGET) == horovod ]]; then docker/sources.sh "${reason:+offline}"; fi

VERSION=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
REVISION=$(git describe --always --abbrev=40 --dirty --exclude '*' 2> /dev/null || echo unknown)
export VERSION REVISION
image=$(docker compose config --images | sed -n 1p)
before=$(docker image inspect -f '{{.Id}}' "$image" 2> /dev/null || true)
docker compose build prepare
if [[ $(docker image inspect -f '{{.Id}}' "$image") != "$before" ]]; then
  log=$(mktemp)
  # As somebody the image has never heard of, who may write nowhere but in /tmp
  docker run --rm --network none --read-only --tmpfs /tmp:mode=1777 --cap-drop ALL --security-opt no-new-privileges \
    --user 54321:54321 --entrypoint sh "$image" -c '
      python -c "import torch, torchvision as v; print(\"image: torch\", torch.__version__, \"torchvision\", v.__version__)"
      exec python -m train.main train --dataset digits --max-steps 2 --run-dir /tmp/runs' > "$log" 2>&1 ||
    { cat "$log" >&2; rm "$log"; docker rmi -f "$image" > /dev/null; fail "the image does not work, and is not kept: see above"; }
  grep '^image:' "$log"
  rm "$log"
fi
# By its version too: the manifests in k8s/ name that, since a cluster keeps for ever what it once had by a name
if [[ $image == rankup:runtime ]]; then docker tag "$image" "rankup:$VERSION"; fi
# The one it replaces, unless it goes by another name or a container uses it
if [[ $(docker image inspect -f '{{len .RepoTags}}' "${before:-none}" 2> /dev/null) == 0 ]]; then
  docker rmi "$before" > /dev/null 2>&1 || true
fi
say "$image, $(docker image inspect -f '{{.Size}}' "$image" | awk '{printf "%.2f GB", $1 / 1e9}'), revision $REVISION"
