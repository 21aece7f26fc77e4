#!/usr/bin/env bash
# Pushes the image to a registry under its version. IMAGE=REPOSITORY:VERSION then runs it elsewhere.
# Run: make push REPOSITORY=registry.example.org/me/rankup      (after docker login, if the registry requires it)
# Edit: nothing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

fail() { echo "push: $*" >&2; exit 2; }
[[ -n ${REPOSITORY:-} ]] || fail "REPOSITORY must name the image in a registry, such as registry.example.org/me/rankup"
image=$(docker compose config --images | sed -n 1p)
label() { docker image inspect -f "{{index .Config.Labels \"org.opencontainers.image.$1\"}}" "$image"; }
version=$(label version)
[[ $(label revision) != *-dirty ]] || fail "$image was built from files that are not committed"
docker tag "$image" "$REPOSITORY:$version"
docker push "$REPOSITORY:$version"
