#!/usr/bin/env bash
# Trains on simulated nodes with one command, shows the output, and ends with every node's exit code.
# Run: make up      (NNODES=4 NPROC=2 ARGS="--epochs 5" make up; on a bare Debian or Ubuntu as root it installs the engine)
# Edit: nothing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. docker/settings.sh

fail() { printf 'up: %s\n' "$@" >&2; exit 2; }

# What is in runs/ shall belong to who runs this; where that is root, to the owner of the checkout; never to root
uid=$(id -u) gid=$(id -g)
if [[ $uid -eq 0 ]]; then read -r uid gid < <(stat -c '%u %g' .); fi
if [[ $uid -eq 0 ]]; then uid=1000 gid=1000; fi
remember RANKUP_UID "$uid"
remember RANKUP_GID "$gid"
num_nodes=$(setting NNODES 2)
[[ $num_nodes =~ ^[2-8]$ ]] || fail "NNODES must be from 2 to 8, got $num_nodes: compose.yaml has so many services"
# The profile of that many nodes; in .env it holds for a plain `docker compose up` too
# shellcheck disable=SC2016  # compose replaces it
remember COMPOSE_PROFILES '${NNODES:-2}'
export COMPOSE_PROFILES=$num_nodes
if [[ -n $(setting IMAGE) ]]; then docker/setup.sh; else docker/image.sh; fi

mapfile -t nodes < <(docker compose config --services | grep '^node' | sort)
declare -A id=()
scratch=$(mktemp -d)
began=$(date +%s)
stopping=""
stop() { # REASON: every node saves and leaves
  [[ -z $stopping ]] || return 0
  stopping=yes
  echo "up: $1"
  docker compose stop "${nodes[@]}" 2> /dev/null
}
trap 'kill $(jobs -p) 2> /dev/null; rm -rf "$scratch"' EXIT
trap 'stop "stopping, every node saves and leaves"' INT TERM

# In sessions of their own, here and below: Ctrl-C is for this script. Cut off, the start would leave nodes behind that nobody
# watches; and the nodes' last lines are still to be seen
setsid docker compose up -d --no-build "${nodes[@]}" 2> "$scratch/up" || { cat "$scratch/up" >&2; fail "the nodes could not be started"; }
if [[ -n $stopping ]]; then setsid docker compose stop "${nodes[@]}" 2> /dev/null; fi # it may have come before there were any
# Once more: Ctrl-C may have come before it had its session
for node in "${nodes[@]}"; do
  id[$node]=$(setsid docker compose ps -aq "$node") || id[$node]=$(setsid docker compose ps -aq "$node")
done
setsid docker compose --ansi never logs -f --no-log-prefix --since "$began" "${nodes[@]}" 2> /dev/null &
logs=$!
# `docker compose up` reports 0 although a node failed, and with its options another node's code: the events tell each end
setsid docker events --since "$began" --filter event=die "${id[@]/#/--filter=container=}" \
  --format '{{.ID}} {{.Actor.Attributes.exitCode}}' > "$scratch/events" &

set +e # from here on Ctrl-C may end any command below, and the loop goes on until the nodes have ended
# A node's last end, but one below 128 says more than whatever its next start came to
code_of() { awk -v id="${id[$1]}" '$1 == id && !(code > 0 && code < 128) {code = $2} END {print code}' "$scratch/events"; }

# A look that fails says nothing of the nodes, unless they were removed
alive() {
  local states tries
  for ((tries = 0; tries < 20; tries++)); do
    if states=$(setsid docker inspect -f '{{.State.Status}}' "${id[@]}" 2> /dev/null); then
      [[ $states =~ running|restarting ]]
      return
    fi
    sleep 0.5
  done
  gone
}
gone() { fail "the engine knows nothing of the nodes any more: were they removed?"; }

while alive; do
  for node in "${nodes[@]}"; do
    code=$(code_of "$node")
    # Nothing is gained by trying again, and the engine would
    if ((code > 0 && code < 128)); then
      stop "$node ended with $code, which no restart mends: ending the others"
    # With that very code: the events may lag behind a start that has ended well meanwhile
    elif ((code > 0)) && [[ $(docker inspect -f '{{.State.Status}} {{.State.ExitCode}}' "${id[$node]}") == "exited $code" ]]; then
      stop "$node ended with $code and is not started again: ending the others"
    fi
  done
  sleep 0.5
done
# The last lines are still on their way. Nobody tells their end where all nodes had ended before they were followed
for ((tries = 0; tries < 25; tries++)); do
  kill -0 "$logs" 2> /dev/null || break
  sleep 0.2
done

worst=0
for node in "${nodes[@]}"; do
  code=$(code_of "$node")
  # The last event may still be on its way; the engine itself knows how the last start ended
  if last=$(docker inspect -f '{{.State.ExitCode}}' "${id[$node]}" 2> /dev/null) && ! ((code > 0 && code < 128)); then code=$last; fi
  [[ -n $code ]] || gone
  more=$(docker inspect -f '{{if .State.OOMKilled}}, out of memory{{end}}, {{.RestartCount}} restarts' "${id[$node]}" 2> /dev/null)
  echo "up: $node ended with $code$more"
  # A mistake or a fault, below 128, is why the other nodes lost that one; 143 is what those have that were stopped then
  if ((code > 0 && (worst == 0 || worst == 143 || code < 128))); then worst=$code; fi
done
exit "$worst"
