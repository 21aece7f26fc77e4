#!/usr/bin/env bash
# Installs the locked packages into a virtual environment, by uv; by pip where uv fails.
# Run: docker/host/install.sh VENV training [PYTHON]      (then, for the tests: docker/host/install.sh VENV tests)
# Edit: nothing; TORCH_INDEX names an index for torch, such as PyTorch's CPU index.
set -euo pipefail
UV=0.13.9
venv=$(realpath -m "${1:?the virtual environment}")
what=${2:?training or tests}
python=${3:-python3}
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export PIP_DISABLE_PIP_VERSION_CHECK=1
# pip prints a line for each package. Where nobody watches, these lines hide the ones that matter
[[ -t 1 ]] || export PIP_QUIET=1

say() { echo "install: $*"; }
fail() { say "$@" >&2; exit 2; }
. docker/host/locked.sh

# uv does not read pip's configuration: it gets the same indexes, folders of wheels and certificates
configured() { # NAME: pip's value, from its variable or its files; nothing where pip has none
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
  # As pip does: the best version of all indexes, not of the first that knows the name
  export UV_INDEX_STRATEGY=unsafe-best-match UV_SYSTEM_CERTS=1 UV_PYTHON="$venv/bin/python"
  [[ -t 1 ]] || export UV_NO_PROGRESS=1
}
install() { # ARGUMENT...: of `pip install`
  if ((uv_works)); then
    "$venv/bin/uv" pip install --quiet "$@" && return
    say "uv failed: going on with pip"
    uv_works=0
  fi
  "$venv/bin/pip" install "$@"
}

if [[ ! -x $venv/bin/pip ]]; then
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "Python 3.11 or newer is needed, $python is not. Name one: make venv PYTHON=python3.12"
  "$python" -c 'import ensurepip' 2> /dev/null ||
    fail "$python can't make virtual environments. On Debian and Ubuntu: sudo apt install python3-venv"
  "$python" -m venv "$venv"
fi
if [[ $what == training ]]; then size="5.8 GB, most of it PyTorch"; else size="1.4 GB"; fi
say "packages for $what go into $venv (once; about $size)"
uv_works=1
"$venv/bin/pip" install --quiet "uv==$UV" || { say "no uv $UV: going on with pip"; uv_works=0; }
hand_over
if [[ $what == training ]]; then
  locked docker/requirements.lock install
else
  locked "docker/requirements.lock docker/requirements-test.lock" install
  # Its click is older than ours
  install --no-deps --require-hashes --upgrade --target "$venv/skypilot" --requirement tests/rigs/skypilot.txt
fi
# The command `rankup`; built with the setuptools just installed, so that nothing is looked up
install --no-deps --no-build-isolation --editable .
