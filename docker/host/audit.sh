#!/usr/bin/env bash
# Checks all locked packages for known vulnerabilities: pip-audit, in a temporary venv, asks the package index.
# Run: make audit      (exit code 1: a vulnerability was found, or a package could not be checked)
# Edit: nothing. PYTHON in the environment sets another Python.
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
