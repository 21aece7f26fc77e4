#!/usr/bin/env bash
# Fills docker/wheels with the packages of the image, by this machine's own pip settings (index, proxy, certificates).
# Run: make wheels      (about 3 GB; `make up` does it where a build cannot reach the index)
# Edit: nothing; TORCH_INDEX is the same as for the image.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. docker/host/settings.sh

fail() { printf 'wheels: %s\n' "$@" >&2; exit 2; }
find_pip() {
  local candidate
  for candidate in python3 /usr/bin/python3 "$PWD/.venv/bin/python"; do
    if "$candidate" -m pip --version > /dev/null 2>&1; then
      echo "$candidate"
      return
    fi
  done
  return 1
}

base=$(docker/host/base.sh)
index=$(setting TORCH_INDEX)
extras=$(setting EXTRAS)
# The wheels must fit the Python of the image, which may be another than this machine's
version=$(docker run --rm --network none --entrypoint python3 "$base" \
  -c 'import sys; print("%d.%d" % sys.version_info[:2])')
lists=(docker/requirements.lock docker/requirements-cuda.lock ${extras:+"docker/requirements-$extras.lock"})
wanted=$(cat "${lists[@]}" <(echo "$version $index") | sha256sum)
cd docker/wheels
if [[ $wanted == "$(cat .wanted 2> /dev/null)" ]]; then
  echo "wheels: docker/wheels is up to date ($(du -sh . | cut -f1))"
  exit
fi

if ! python=$(find_pip); then
  if [[ $(id -u) -ne 0 ]] || ! command -v apt-get > /dev/null; then
    fail "pip is needed: sudo apt install python3-pip"
  fi
  { apt-get -q update && apt-get install -q -y --no-install-recommends python3-pip; } > /dev/null
  python=/usr/bin/python3
fi
echo "wheels: downloading for Python $version with $($python -m pip --version | cut -d' ' -f1,2) of $python"
rm -f ./*.whl .wanted
"$python" -m pip download -qq --requirement ../requirements.lock \
  ${extras:+--requirement "../requirements-$extras.lock"} --only-binary :all: --python-version "$version" \
  ${index:+--extra-index-url "$index"}
echo "$wanted" > .wanted
echo "wheels: $(find . -name '*.whl' | wc -l) files, $(du -sh . | cut -f1)"
