#!/usr/bin/env bash
# Builds Horovod (CPU, gloo) for a Python that has torch, keeps the wheel in a cache, and installs it.
# Run: make horovod      (docker/horovod.sh PYTHON for another environment; the first build takes 4 to 12 minutes)
# Edit: nothing. VERSION is Horovod's last release. RANKUP_CACHE sets a folder other than ~/.cache/rankup.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
VERSION=0.28.1
BOUND_S=1800
python=${1:?the Python that has torch}
cache=${RANKUP_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/rankup}

. docker/host/settings.sh
say() { echo "horovod: $*"; }
fail() { printf 'horovod: %s\n' "$@" >&2; exit 2; }

# The wheel depends on these inputs: if one changes, a new wheel is needed
inputs=$("$python" -c '
import importlib.metadata, platform, sys, sysconfig
print(importlib.metadata.version("torch"), sys.implementation.cache_tag, sysconfig.get_platform(), *platform.libc_ver())
' 2> /dev/null) || fail "$python has no torch: make venv"
# Skip comment lines, so that rewording a comment does not cause a new build
key=$({ echo "$inputs $VERSION"; grep -hv '^ *#' docker/horovod.sh docker/cxx.sh; } | sha256sum | cut -c1-16)
kept=$cache/horovod-$key

if "$python" -c "import horovod.torch, horovod; assert open(horovod.__path__[0] + '/.built').read() == '$key'" \
  2> /dev/null; then
  say "$VERSION is installed already"
  exit
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# Build in a separate environment, which sees the user's torch and leaves nothing in the user's environment
"$python" -m venv "$work/venv"
purelib() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
echo "import site; site.addsitedir('$(purelib "$python")')" > "$(purelib "$work/venv/bin/python")/torch.pth"
pip=("$work/venv/bin/python" -m pip --disable-pip-version-check -qq)
needs=(--no-deps --require-hashes --requirement docker/requirements-horovod.lock)

build() {
  local missing=() tool
  for tool in g++ cmake make; do command -v "$tool" > /dev/null || missing+=("$tool"); done
  "$python" -c 'import sysconfig; open(sysconfig.get_path("include") + "/Python.h")' 2> /dev/null ||
    missing+=(python3-dev)
  ((${#missing[@]} == 0)) || packages "${missing[@]}"
  say "building $VERSION for $inputs, on $(nproc) CPUs"
  "${pip[@]}" install "${needs[@]}"
  # Hide every CUDA toolkit of this machine: torch says that it was built without CUDA, and CMake does not look for one
  mkdir "$work/hide" "$work/wheel"
  printf 'import torch\ntorch.version.cuda = None\n' > "$work/hide/sitecustomize.py"
  # shellcheck disable=SC2016  # the shell that runs it expands these
  printf '#!/bin/sh\n[ "$1" = --build ] || set -- "$@" -D%s\nexec cmake "$@"\n' \
    CMAKE_DISABLE_FIND_PACKAGE_CUDAToolkit=ON > "$work/cmake"
  chmod +x "$work/cmake"
  env PYTHONPATH="$work/hide" CXX="$PWD/docker/cxx.sh" HOROVOD_CMAKE="$work/cmake" CUDACXX=/nowhere \
    MAKEFLAGS="-j$(nproc)" CMAKE_POLICY_VERSION_MINIMUM=3.5 HOROVOD_WITH_PYTORCH=1 HOROVOD_WITH_GLOO=1 \
    HOROVOD_WITHOUT_MPI=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 \
    timeout "$BOUND_S" "${pip[@]}" wheel --no-deps --no-build-isolation --no-cache-dir --no-binary horovod \
    --wheel-dir "$work/wheel" "horovod==$VERSION" > "$work/log" 2>&1 ||
    { tail -n 40 "$work/log" >&2; fail "the build failed: see above"; }
  # Put the wheels that Horovod needs beside its own wheel, so that an install from the cache needs no index
  "${pip[@]}" wheel --wheel-dir "$work/wheel" "${needs[@]}"
  "${pip[@]}" install --no-index --find-links "$work/wheel" "horovod==$VERSION"
  "$work/venv/bin/python" -c '
import horovod.torch as hvd, torch
hvd.init()
assert hvd.gloo_built() and hvd.allreduce(torch.ones(2)).tolist() == [1, 1]'
  rm -rf "$kept.new" "$kept"
  cp -r "$work/wheel" "$kept.new" && mv "$kept.new" "$kept" # one rename: the cache never holds half a wheel
}

mkdir -p "$cache"
exec 9> "$cache/horovod.lock"
flock 9 # two at once would build twice
began=$SECONDS
if [[ -z $(find "$kept" -name '*.whl' -print -quit 2> /dev/null) ]]; then
  build
  say "built in $((SECONDS - began)) s: $kept"
fi
"${pip[@]}" --python "$python" uninstall -y horovod
"${pip[@]}" --python "$python" install --no-index --find-links "$kept" "horovod==$VERSION"
"$python" -c "import horovod; open(horovod.__path__[0] + '/.built', 'w').write('$key')"
say "$VERSION is installed in $("$python" -c 'import sys; print(sys.prefix)'): --parallel horovod"
