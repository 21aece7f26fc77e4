#!/usr/bin/env bash
# Asks the package index about known vulnerabilities of all locked packages, by pip-audit in a venv that goes again.
# Run: make audit      (1: something was found, or a package could not be checked, as without a network)
# Edit: nothing; PYTHON in the environment names another Python.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
venv=$(mktemp -d) found=0
trap 'rm -rf "$venv"' EXIT
"${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/pip" --quiet install pip-audit
for lock in docker/requirements*.lock; do
  echo "audit: $lock"
  "$venv/bin/pip-audit" --strict --disable-pip --require-hashes -r "$lock" || found=1
done
if ((found)); then echo "audit: a vulnerability was found, or a package could not be checked: see above" >&2; fi
exit "$found"
