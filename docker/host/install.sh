#!/usr/bin/env bash
# Installs the locked packages into a virtual environment with uv, or with pip if uv fails.
# Run: docker/host/install.sh VENV training [PYTHON]      (then, for the tests: docker/host/install.sh VENV tests)
# Edit: nothing. TORCH_INDEX sets an index for torch, such as PyTorch's CPU index.
set -euo pipefail
UV=0.13.9
venv=$(realpath -m "${1:?the virtual environment}")
what=${2:?training or tests}
python=${3:-python3}
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export PIP_DISABLE_PIP_VERSION_CHECK=1
# pip prints a line for each package. In a log these lines would hide the important ones
[[ -t 1 ]] || export PIP_QUIET=1

say() { echo "install: $*"; }
fail() { say "$@" >&2; exit 2; }
. docker/host/locked.sh

# uv does not read pip's configuration, so pass on pip's indexes, wheel folders and certificates
configured() { # NAME: print pip's value, from its variable or its files; print nothing if pip has none
  local variable=PIP_${1^^}
  variable=${variable//-/_}
  if [[ -n ${!variable:-} ]]; then echo "${!variable}"; else "$venv/bin/pip" config get "global.$1" 2> /dev/null || true; fi
}
hand_over() {
  local index certificates
  index=$(configured index-url)
  certificates=$(configured cert)
  [[ -z $index ]] || export UV_DEFAULT_INDEX=$index
  UV_INDEX=$(configured extra-index-url | xargs)
  UV_FIND_LINKS=$(configured find-links | xargs | tr ' ' ',')
  export UV_INDEX UV_FIND_LINKS
  [[ -z $certificates ]] || export SSL_CERT_FILE=$certificates
  # Like pip, take the best version from all indexes, not from the first index that has the package
  export UV_INDEX_STRATEGY=unsafe-best-match UV_SYSTEM_CERTS=1 UV_PYTHON="$venv/bin/python"
  [[ -t 1 ]] || export UV_NO_PROGRESS=1
}
install() { # ARGUMENT...: the arguments of `pip install`
  if ((uv_works)); then
    "$venv/bin/uv" pip install --quiet "$@" && return
    say "uv failed: continuing with pip"
    uv_works=0
  fi
  "$venv/bin/pip" install "$@"
}

if [[ ! -x $venv/bin/pip ]]; then
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "$python must be Python 3.11 or newer. Choose another: make venv PYTHON=python3.12"
  "$python" -c 'import ensurepip' 2> /dev/null ||
    fail "$python can't make virtual environments. On Debian and Ubuntu: sudo apt install python3-venv"
  "$python" -m venv "$venv"
fi
if [[ $what == training ]]; then size="5.8 GB, most of it PyTorch"; else size="1.4 GB"; fi
say "installing the packages for $what into $venv (once; about $size)"
uv_works=1
"$venv/bin/pip" install --quiet "uv==$UV" || { say "can't install uv $UV: continuing with pip"; uv_works=0; }
hand_over
if [[ $what == training ]]; then
  locked docker/requirements.lock install
else
  locked "docker/requirements.lock docker/requirements-test.lock" install
  # SkyPilot needs an older click than we do
  install --no-deps --require-hashes --upgrade --target "$venv/skypilot" --requirement tests/rigs/skypilot.txt
fi
# Install the command `rankup`. The build uses the setuptools just installed, so pip asks no index
install --no-deps --no-build-isolation --editable .
