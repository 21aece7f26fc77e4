#!/usr/bin/env bash
# Finds a container engine, Compose v2 and buildx, or installs them from the packages of Debian or Ubuntu.
# Run: INSTALL=1 docker/host/setup.sh      (as root on Debian or Ubuntu; without INSTALL=1 it prints the commands, with exit code 2)
# Edit: nothing.
set -euo pipefail

# Compose and buildx are plug-ins of the docker command. No package writes to this folder, so no package overwrites them.
plugins=/usr/local/lib/docker/cli-plugins
# Debian 12 has only Compose v1. The plug-ins of this newer release need only libc, so they run on Debian 12 too.
newer_debian=trixie
daemon_log=/var/log/dockerd.log

say() { echo "setup: $*"; }
fail() { printf 'setup: %s\n' "$@" >&2; exit 2; }

engine_answers() { docker info > /dev/null 2>&1; }
has_compose() { [[ $(docker compose version --short 2> /dev/null) =~ ^v?([2-9]|[1-9][0-9]+)\. ]]; }
has_buildx() { docker buildx version > /dev/null 2>&1; }

packaged() { # PACKAGE [OLDEST]: whether apt has the package, in version OLDEST or newer
  local candidate
  candidate=$(apt-cache policy "$1" | awk '/Candidate:/ && $2 != "(none)" {print $2}')
  [[ -n $candidate ]] && dpkg --compare-versions "$candidate" ge "${2:-0}"
}

install_packages() {
  local wanted=()
  # The package docker.io only recommends iptables, but the engine does not start without it
  command -v dockerd > /dev/null || wanted+=(docker.io iptables)
  # Debian 13 has the docker command in a separate package
  command -v docker > /dev/null || { packaged docker-cli && wanted+=(docker-cli); }
  if ! has_compose; then
    if packaged docker-compose-v2; then wanted+=(docker-compose-v2) # Ubuntu
    elif packaged docker-compose 2; then wanted+=(docker-compose); fi
  fi
  has_buildx || { packaged docker-buildx && wanted+=(docker-buildx); }
  if ((${#wanted[@]})); then
    say "installing ${wanted[*]}"
    apt-get install -q -y --no-install-recommends "${wanted[@]}" > "$log" 2>&1 ||
      { tail -20 "$log" >&2; fail "apt-get failed"; }
  fi
}

install_plugins() { # PACKAGE...: unpack the packages of a newer Debian from this machine's mirror
  local private mirror package line keys=/usr/share/keyrings/debian-archive-keyring.gpg
  private=$(mktemp -d)
  # Find the mirror of "main" itself, because updates and security fixes may be on another mirror
  # shellcheck disable=SC2016  # apt expands these, not the shell
  line=$(apt-get indextargets --format '$(REPO_URI) $(CODENAME) $(COMPONENT)' 'Created-By: Packages' |
    awk -v codename="$VERSION_CODENAME" '$2 == codename && $3 == "main"' | head -1)
  mirror=${line%% *}
  [[ $ID == debian && -n $mirror ]] || fail "$PRETTY_NAME has no package of $*: see Docker's own instructions"
  say "unpacking $* from Debian $newer_debian into $plugins"
  mkdir -p "$private/lists/partial" "$private/archives/partial"
  echo "deb [signed-by=$keys] $mirror $newer_debian main" > "$private/sources.list"
  local options=(-o "Dir::Etc::sourcelist=$private/sources.list" -o Dir::Etc::sourceparts=-
    -o Dir::Etc::preferencesparts=- -o "Dir::State::lists=$private/lists" -o "Dir::Cache=$private" -o APT::Sandbox::User=root)
  apt-get "${options[@]}" -q update > "$log" 2>&1 ||
    { tail -20 "$log" >&2; fail "apt-get update failed for $newer_debian from $mirror: see above"; }
  mkdir -p "$plugins"
  for package in "$@"; do
    (cd "$private" && apt-get "${options[@]}" -q download "$package" >> "$log" 2>&1) ||
      { tail -20 "$log" >&2; fail "apt-get download $package failed: see above"; }
    dpkg -x "$private/$package"_*.deb "$private/$package"
    install -m 755 "$(find "$private/$package" -path '*cli-plugins/*' -type f)" "$plugins/"
  done
  rm -rf "$private"
}

start_daemon() {
  if [[ -d /run/systemd/system ]]; then
    say "starting the service docker"
    systemctl enable --now docker
  else
    # Do not use /etc/init.d: its script raises limits, which containers and small virtual machines refuse
    say "no service manager runs here: starting dockerd in the background (log: $daemon_log)"
    [[ -s /var/run/docker.pid ]] && ! kill -0 "$(< /var/run/docker.pid)" 2> /dev/null && rm /var/run/docker.pid
    setsid nohup dockerd >> "$daemon_log" 2>&1 < /dev/null &
  fi
  for _ in {1..120}; do
    engine_answers && return
    sleep 0.5
  done
  [[ -s $daemon_log ]] && tail -5 "$daemon_log" >&2
  fail "the engine did not start within 60 s"
}

explain() { # for a user who may not install or did not ask for it: print the commands
  local release=${ID:-} like=${ID_LIKE:-}
  if command -v dockerd > /dev/null && ! engine_answers && has_compose && has_buildx; then
    fail "the engine is installed but does not answer. Is it running, may you use it? Run these, then log in again:" \
      "  sudo systemctl enable --now docker" "  sudo usermod -aG docker $(id -un)"
  elif [[ $(id -u) -eq 0 && ($release == debian || $release == ubuntu || $like == *debian*) ]]; then
    fail "a container engine, Compose v2 and buildx are needed. To let this script install Debian's packages of them:" \
      "  INSTALL=1 $0      (or INSTALL=1 before the command that you typed)"
  elif [[ $release == debian || $release == ubuntu || $like == *debian* ]]; then
    fail "a container engine, Compose v2 and buildx are needed. Run these, then log in again:" \
      "  sudo INSTALL=1 $0" "  sudo usermod -aG docker $(id -un)"
  fi
  fail "a container engine, Compose v2 and buildx are needed:" \
    "  install Docker Engine or Docker Desktop for ${PRETTY_NAME:-this system}."
}

if engine_answers && has_compose && has_buildx; then
  : # nothing to install, so any user may run this script
else
  PRETTY_NAME=$(uname -s)
  # shellcheck disable=SC1091
  [[ -r /etc/os-release ]] && . /etc/os-release
  installed=""
  if { command -v dockerd > /dev/null || engine_answers; } && has_compose && has_buildx; then installed=yes; fi
  if [[ $(id -u) -ne 0 ]] || ! command -v apt-get > /dev/null; then explain; fi
  [[ -n $installed || ${INSTALL:-} == 1 ]] || explain
  log=$(mktemp)
  trap 'rm -f "$log"' EXIT
  export DEBIAN_FRONTEND=noninteractive
  if [[ -z $installed ]]; then
    apt-get -q update > "$log" 2>&1 || { tail -20 "$log" >&2; fail "apt-get update failed"; }
    install_packages
    missing=()
    has_compose || missing+=(docker-compose)
    has_buildx || missing+=(docker-buildx)
    ((${#missing[@]} == 0)) || install_plugins "${missing[@]}"
  fi
  engine_answers || start_daemon
fi
say "engine $(docker version --format '{{.Server.Version}}'), Compose $(docker compose version --short)," \
  "buildx $(docker buildx version | awk '{print $2}')"
