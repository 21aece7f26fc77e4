# shellcheck shell=bash
# Reads and writes the settings of compose.yaml: the environment first, then .env, as compose itself does. Installs packages.
# Run: nothing. Other scripts source this file.
# Edit: nothing.

setting() { # NAME [DEFAULT]
  local value
  value=$(printenv "$1" || sed -nE "s/^$1=([\"']?)(.*)\\1\$/\\2/p" .env 2> /dev/null | tail -1)
  echo "${value:-${2:-}}"
}

remember() { # NAME VALUE: write it to .env, where a later `docker compose up` finds it; other lines do not change
  touch .env
  if grep -q "^$1=" .env; then sed -i "s|^$1=.*|$1=$2|" .env; else echo "$1=$2" >> .env; fi
}

packages() { # PACKAGE...: install Debian's packages if INSTALL=1 and root asks for it, or else say how, and end with 2
  if [[ ${INSTALL:-} != 1 || $(id -u) -ne 0 ]] || ! command -v apt-get > /dev/null; then
    echo "$(basename "$0" .sh): this needs \`apt-get install $*\`. As root, INSTALL=1 lets this command do it" >&2
    exit 2
  fi
  { apt-get -q update && apt-get install -q -y --no-install-recommends "$@"; } > /dev/null
}
