#!/usr/bin/env bash
# Builds the site from the pages of this repository. Fails on a broken link, a missing heading, or a page that nav lacks.
# Run: make site      (ARGS=serve shows it; ARGS="deploy 0.1" adds a version to the branch gh-pages)
# Edit: nothing here. site/mkdocs.yml has the order of the pages.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bin=${VENV:-.venv}/bin
export NO_MKDOCS_2_WARNING=1

# Copy pages, pictures, and the files that pages link to. Each keeps its folder, so a link works as it does in the repository
rm -rf build/pages
mkdir -p build/pages
git -c safe.directory='*' ls-files -z -co --exclude-standard -- '*.md' '*.svg' '*.png' '*.css' '*.toml' '*.diff' '*.sbatch' \
  'train/examples/**' LICENSE ':!.github' | xargs -0 cp --parents --target-directory build/pages
"$bin/jupyter-nbconvert" --log-level ERROR --to markdown --output-dir build/pages/train/examples train/examples/*.ipynb

case ${1:-build} in
  build) "$bin/mkdocs" build --config-file site/mkdocs.yml && echo "site: build/site/index.html" ;;
  serve) "$bin/mkdocs" serve --config-file site/mkdocs.yml ;;
  deploy) PATH=$bin:$PATH mike deploy --config-file site/mkdocs.yml --update-aliases "${2:?a version}" latest ;;
  *) echo "site: the command must be build, serve or deploy, got $1" >&2; exit 2 ;;
esac
