# shellcheck shell=bash
# Reads and writes the settings of compose.yaml: the environment first, then .env, as compose itself does.
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
