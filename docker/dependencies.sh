#!/bin/sh
# Prints what the program needs, by name: the image takes the versions from requirements.lock, and leaves the test tools out.
# Run: docker/dependencies.sh      (the Dockerfile and wheels.sh do)
# Edit: nothing; the names stand in pyproject.toml.
sed -n '/^dependencies = \[/,/^\]/ s/^ *"\(.*\)",*$/\1/p' "${1:-$(dirname "$0")/../pyproject.toml}"
