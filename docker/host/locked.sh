# shellcheck shell=sh
# Installs, downloads or builds what lock files list, each file only if its hash is listed too. To be sourced, by any shell.
# Run: . docker/host/locked.sh; locked "docker/requirements.lock docker/requirements-s3.lock" pip install
# Edit: nothing. TORCH_INDEX names an index for torch, such as PyTorch's CPU index: its files have other hashes than
# those of the lists, so that torch and torchvision are taken from there unverified, and what CUDA needs is left out.
locked() { # LISTS COMMAND...
  locked_lists=$1
  shift
  locked_folder=$(mktemp -d)
  # shellcheck disable=SC2086  # a list of words
  cat $locked_lists > "$locked_folder/all"
  if [ -n "${TORCH_INDEX:-}" ]; then
    grep -oE '^torch(vision)?==[^ ]+' "$locked_folder/all" > "$locked_folder/torch" &&
      "$@" --no-deps --extra-index-url "$TORCH_INDEX" --requirement "$locked_folder/torch" || return
    # A package is its line and the lines of its hashes
    awk '/^[a-z]/ {kept = $0 !~ /^(torch|torchvision|triton|cuda-[a-z]+|nvidia-[cn][a-z0-9-]*)==/} kept' \
      "$locked_folder/all" > "$locked_folder/rest"
    mv "$locked_folder/rest" "$locked_folder/all"
  fi
  # The lists are complete: nothing is looked up that they do not name
  "$@" --no-deps --require-hashes --requirement "$locked_folder/all" || return
  rm -r "$locked_folder"
}
