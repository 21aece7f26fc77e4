#!/usr/bin/env bash
# Finds kubectl, or installs it from this machine's packages or a newer Debian. The tests need no cluster.
# Run: INSTALL=1 k8s/setup.sh      (as root; without INSTALL=1 it says what is missing, with exit code 2)
# Edit: nothing.
set -euo pipefail
newer_debian=trixie # Debian 12 has kubectl 1.20 with an old kustomize; the newer one needs only libc
keys=/usr/share/keyrings/debian-archive-keyring.gpg
bin=${BIN:-/usr/local/bin}

new_enough() { # whether there is a kubectl 1.27 or newer
  [[ $(kubectl version --client 2> /dev/null) =~ v1\.([0-9]+) ]] && ((BASH_REMATCH[1] >= 27))
}
fail() { printf 'setup: %s\n' "$@" >&2; exit 2; }

if new_enough; then exit 0; fi
[[ $(id -u) -eq 0 && ${INSTALL:-} == 1 ]] ||
  fail "kubectl 1.27 or newer is needed: https://kubernetes.io/docs/tasks/tools" \
    "  or let this script install Debian's package, as root: INSTALL=1 $0"
candidate=$(apt-cache policy kubectl 2> /dev/null | awk '/Candidate:/ && $2 != "(none)" {print $2}')
if [[ -n $candidate ]] && dpkg --compare-versions "$candidate" ge 1.27; then
  apt-get install -q -y --no-install-recommends kubectl
elif [[ -f $keys ]]; then
  # shellcheck disable=SC2016  # apt expands these, not the shell
  mirror=$(apt-get indextargets --format '$(REPO_URI) $(COMPONENT)' 'Created-By: Packages' |
    awk '$2 == "main" {print $1; exit}')
  echo "setup: installing kubectl of Debian $newer_debian into $bin"
  folder=$(mktemp -d)
  trap 'rm -rf "$folder"' EXIT
  mkdir -p "$folder/lists/partial" "$folder/archives/partial" "$bin"
  echo "deb [signed-by=$keys] $mirror $newer_debian main" > "$folder/sources.list"
  options=(-q -o "Dir::Etc::sourcelist=$folder/sources.list" -o Dir::Etc::sourceparts=/dev/null
    -o Dir::Etc::preferencesparts=/dev/null -o "Dir::State::lists=$folder/lists" -o Dir::State::status=/dev/null
    -o "Dir::Cache=$folder" -o APT::Sandbox::User=root)
  apt-get "${options[@]}" update > /dev/null
  (cd "$folder" && apt-get "${options[@]}" download kubectl > /dev/null)
  dpkg -x "$folder"/kubectl_*.deb "$folder/kubectl"
  install -m 755 "$folder/kubectl/usr/bin/kubectl" "$bin/kubectl"
else
  fail "no package of kubectl here: https://kubernetes.io/docs/tasks/tools"
fi
new_enough || fail "kubectl was installed but does not work"
