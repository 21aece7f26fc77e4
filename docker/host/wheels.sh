#!/usr/bin/env bash
# Fills docker/wheels with the packages of the image. pip uses this machine's settings (index, proxy, certificates).
# Run: make wheels      (about 3 GB; `make up` runs this if a build cannot reach the index)
# Edit: nothing. Set TORCH_INDEX to the same index as for the image.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. docker/host/settings.sh
. docker/host/locked.sh

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
TORCH_INDEX=$(setting TORCH_INDEX)
extras=$(setting EXTRAS)
# The wheels must fit the Python of the image, which may differ from this machine's Python
version=$(docker run --rm --network none --entrypoint python3 "$base" \
  -c 'import sys; print("%d.%d" % sys.version_info[:2])')

fill() { # FOLDER LIST...: download the wheels of the lists, unless the folder already has them
  local folder=$1 wanted python
  shift
  wanted=$(cat docker/requirements*.lock <(echo "$* $version $TORCH_INDEX") | sha256sum)
  if [[ $wanted == "$(cat "$folder/.wanted" 2> /dev/null)" ]]; then
    echo "wheels: $folder is up to date ($(du -sh "$folder" | cut -f1))"
    return
  fi
  if ! python=$(find_pip); then
    packages python3-pip
    python=/usr/bin/python3
  fi
  echo "wheels: downloading for Python $version with $($python -m pip --version | cut -d' ' -f1,2) of $python"
  rm -f "$folder"/*.whl "$folder/.wanted"
  locked "${*/#/docker/}" "$python" -m pip download -qq --dest "$folder" --only-binary :all: --python-version "$version"
  echo "$wanted" > "$folder/.wanted"
  echo "wheels: $(find "$folder" -name '*.whl' | wc -l) files in $folder, $(du -sh "$folder" | cut -f1)"
}

fill docker/wheels requirements.lock
# The extras have their own folder, so that the layer of all other packages does not change
# shellcheck disable=SC2046,SC2086  # a list of words
if [[ -n $extras ]]; then fill docker/extra-wheels $(printf 'requirements-%s.lock ' $extras); fi
