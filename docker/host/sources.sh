#!/usr/bin/env bash
# Fills docker/horovod for horovod.Dockerfile, with the wheels that make horovod has built here and with the sources.
# Run: nothing. docker/image.sh runs this (`sources.sh offline` downloads the sources, for builds that reach no index)
# Edit: nothing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../horovod"
for built in "${RANKUP_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/rankup}"/horovod-*/; do
  if [[ -d $built ]]; then cp -r "$built" .; fi
done
version=$(sed -n 's/^VERSION=//p' ../horovod.sh)
if [[ ${1:-} != offline || -s horovod-$version.tar.gz ]]; then exit; fi
for python in python3 /usr/bin/python3 ../../.venv/bin/python; do
  if "$python" -m pip --version > /dev/null 2>&1; then break; fi
done
"$python" -m pip download -qq --no-deps --require-hashes --requirement ../requirements-horovod.lock \
  --only-binary :all: --python-version 3.11
"$python" -m pip download -qq --no-deps --no-binary horovod "horovod==$version"
