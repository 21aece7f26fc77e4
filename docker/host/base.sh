#!/usr/bin/env bash
# Prints the name of the base image: a local one, or one from a registry, or else one made from this machine's mirror.
# Run: docker/host/base.sh      (only root can make one, of the Debian or Ubuntu release of this machine)
# Edit: nothing. BASE_IMAGE in the environment or in .env sets another image.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. docker/host/settings.sh

say() { echo "base: $*" >&2; }
fail() { printf 'base: %s\n' "$@" >&2; exit 2; }
have() { docker image inspect "$1" > /dev/null 2>&1; }
has_pip() { docker run --rm --network none --entrypoint python "$1" -m pip --version > /dev/null 2>&1; }

make_base() { # IMAGE
  local work mirror
  [[ $(id -u) -eq 0 ]] || fail "making a base image needs root: sudo $0"
  command -v apt-get > /dev/null ||
    fail "only Debian and Ubuntu can make a base image: set BASE_IMAGE to a local image"
  work=$(mktemp -d)
  # shellcheck disable=SC2064  # expand the folder's name now
  trap "rm -rf '$work'" EXIT
  command -v debootstrap > /dev/null || packages debootstrap

  # List apt's archives of this release, including updates and security fixes, but not those of third parties
  # shellcheck disable=SC2016  # apt expands these, not the shell
  apt-get indextargets --format 'deb $(REPO_URI) $(CODENAME) $(COMPONENT)' 'Created-By: Packages' |
    awk -v release="$VERSION_CODENAME" '$4 ~ /^(main|universe)$/ && ($3 == release || index($3, release "-") == 1)' |
    sort -u > "$work/sources.list"
  mirror=$(awk -v release="$VERSION_CODENAME" '$3 == release {print $2; exit}' "$work/sources.list")
  [[ -n $mirror ]] || fail "apt knows no archive of $VERSION_CODENAME"

  say "making $1: $PRETTY_NAME from $mirror"
  debootstrap --variant=minbase --include=python3,python3-pip,python3-venv,python-is-python3,ca-certificates \
    "$VERSION_CODENAME" "$work/root" "$mirror"
  # Containers never read these files, so the packages that the Dockerfile adds must not install them either
  printf 'path-exclude=/usr/share/%s/*\n' doc man info locale i18n > "$work/root/etc/dpkg/dpkg.cfg.d/small"
  rm -rf "$work"/root/usr/share/{doc,man,info,locale,i18n}/*
  cp "$work/sources.list" "$work/root/etc/apt/sources.list"
  chroot "$work/root" apt-get -q update
  chroot "$work/root" apt-get -q -y upgrade
  chroot "$work/root" apt-get clean
  rm -rf "$work"/root/var/lib/apt/lists/* "$work"/root/var/cache/{apt,debconf,ldconfig}/* "$work"/root/var/log/* \
    "$work"/root/etc/{hostname,resolv.conf}
  tar -C "$work/root" -c . | docker import --change 'CMD ["/bin/sh"]' - "$1"
}

# shellcheck disable=SC1091
. /etc/os-release
own=rankup-base:${VERSION_CODENAME:-none}
default=$(sed -n 's/^ARG BASE_IMAGE=//p' docker/Dockerfile)
base=$(setting BASE_IMAGE "$default")
if [[ $base == "$default" ]] && ! have "$base" && have "$own"; then base=$own; fi
if have "$base" && { [[ $base != rankup-base:* ]] || has_pip "$base"; }; then
  say "using the local image $base"
elif [[ $base == rankup-base:* ]]; then
  base=$own
  make_base "$base" >&2
elif say "fetching $base" && timeout 300 docker pull -q "$base" > /dev/null 2>&1; then
  : # from the registry
elif [[ $base == "$default" ]]; then
  say "no registry answers for $base"
  base=$own
  make_base "$base" >&2
else
  fail "BASE_IMAGE=$base is no local image, and no registry has it"
fi
has_pip "$base" || fail "BASE_IMAGE must be an image in which python -m pip works, got $base"
# Write it to .env, where a plain `docker compose build` finds it
[[ $base == "$default" ]] || remember BASE_IMAGE "$base"
echo "$base"
