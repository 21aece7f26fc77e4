# shellcheck shell=sh
# Installs, downloads or builds the packages in lock files, and checks each file's hash. Any shell can source this.
# Run: . docker/host/locked.sh; locked "docker/requirements.lock docker/requirements-s3.lock" pip install
# Edit: nothing. TORCH_INDEX sets an index for torch, such as PyTorch's CPU index. The lists have no hashes for it,
# so torch and torchvision are installed from there unverified, and the packages for CUDA are left out.
locked() { # LISTS COMMAND...
  locked_lists=$1
  shift
  locked_folder=$(mktemp -d)
  # shellcheck disable=SC2086  # a list of words
  cat $locked_lists > "$locked_folder/all"
  if [ -n "${TORCH_INDEX:-}" ]; then
    grep -oE '^torch(vision)?==[^ ]+' "$locked_folder/all" > "$locked_folder/torch" &&
      "$@" --no-deps --extra-index-url "$TORCH_INDEX" --requirement "$locked_folder/torch" || return
    # Each package has one line with its name, and then lines with hashes
    awk '/^[a-z]/ {kept = $0 !~ /^(torch|torchvision|triton|cuda-[a-z]+|nvidia-[cn][a-z0-9-]*)==/} kept' \
      "$locked_folder/all" > "$locked_folder/rest"
    mv "$locked_folder/rest" "$locked_folder/all"
  fi
  # The lists are complete, so pip need not look up any other package
  "$@" --no-deps --require-hashes --requirement "$locked_folder/all" || return
  rm -r "$locked_folder"
}
