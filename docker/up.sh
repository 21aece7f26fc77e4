#!/usr/bin/env bash
# Trains on simulated nodes with one command, shows their output, and returns the exit code of the cause.
# Run: make up      (NNODES=4 NPROC=2 ARGS="--epochs 5" make up; INSTALL=1 installs Docker, as root on Debian or Ubuntu)
# Edit: nothing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. docker/host/settings.sh

say() { echo "up: $*"; }
fail() { printf 'up: %s\n' "$@" >&2; exit 2; }

# The files in runs/ belong to the user, or to the owner of the checkout if root runs this, but never to root
uid=$(id -u) gid=$(id -g)
if [[ $uid -eq 0 ]]; then read -r uid gid < <(stat -c '%u %g' .); fi
if [[ $uid -eq 0 ]]; then uid=1000 gid=1000; fi
remember RANKUP_UID "$uid"
remember RANKUP_GID "$gid"
num_nodes=$(setting NNODES 2)
[[ $num_nodes =~ ^[2-8]$ ]] || fail "NNODES must be from 2 to 8, got $num_nodes: the compose files have eight nodes"

# The compose files are those in COMPOSE_FILE, or those that compose reads by default, and docker/compose.nodes.yaml. If
# COMPOSE_FILE is set, compose does not read compose.override.yaml by default, so this script adds that file to it
nodes_file=docker/compose.nodes.yaml
default=compose.yaml$([[ ! -f compose.override.yaml ]] || echo :compose.override.yaml)
files=$(setting COMPOSE_FILE "$default")
files=${files/":$nodes_file"/}
if [[ $files == compose.yaml || $files == "$default" || $files == compose.yaml:compose.override.yaml ]]; then
  # Write these to .env, so that a plain `docker compose up` starts the same nodes. Compose expands NNODES there
  files=$default
  remember COMPOSE_FILE "${files/compose.yaml/compose.yaml:$nodes_file}"
  # shellcheck disable=SC2016
  remember COMPOSE_PROFILES '${NNODES:-2}'
fi
for file in ${files//:/ }; do
  if [[ $file != compose.yaml ]] && grep -q '\bnode1:' "$file" && ! grep -q "\bnode$((num_nodes - 1)):" "$file"; then
    say "$file changes node1 and not node$((num_nodes - 1)): add a line for each node that it should change"
  fi
done
export COMPOSE_FILE=${files/compose.yaml/compose.yaml:$nodes_file} COMPOSE_PROFILES=$num_nodes
if [[ -n $(setting IMAGE) ]]; then docker/host/setup.sh; else docker/image.sh; fi
target=$(setting TARGET)
if [[ -n $target && -z $(setting IMAGE) ]]; then export IMAGE=rankup:$target TMP=exec,mode=1777,size=2g; fi
# Compose knows a project only by its name, so these nodes would replace those of another checkout's job
while read -r folder; do
  [[ $folder -ef . ]] || fail "a job of $folder runs under the same name: COMPOSE_PROJECT_NAME=second make up"
done < <(docker ps --filter "label=com.docker.compose.project=$(setting COMPOSE_PROJECT_NAME rankup)" \
  --format '{{.Label "com.docker.compose.project.working_dir"}}')

mapfile -t nodes < <(docker compose config --services | grep '^node' | sort)
declare -A id=()
scratch=$(mktemp -d)
began=$(date +%s)
interrupted="" stopping=""
stop() { # REASON: make every node save and end
  [[ -z $stopping ]] || return 0
  stopping=yes
  say "$1"
  docker compose stop "${nodes[@]}" 2> /dev/null
}
trap 'kill $(jobs -p) 2> /dev/null; rm -rf "$scratch"' EXIT
trap 'interrupted=yes; stop "stopping: every node saves and ends"' INT TERM

# From here on each docker command runs under setsid, so that Ctrl-C reaches only this script. An interrupted `up`
# would leave nodes that nobody watches, and an interrupted `logs` would hide the nodes' last lines
setsid docker compose up -d --no-build "${nodes[@]}" 2> "$scratch/up" ||
  { cat "$scratch/up" >&2; fail "the nodes could not be started"; }
# Ctrl-C may have come before the nodes existed
if [[ -n $stopping ]]; then setsid docker compose stop "${nodes[@]}" 2> /dev/null; fi
# Try twice, because Ctrl-C may end a command before setsid has detached it
for node in "${nodes[@]}"; do
  id[$node]=$(setsid docker compose ps -aq "$node") || id[$node]=$(setsid docker compose ps -aq "$node")
done
# Compose 2.26 writes "erase this line" before every line, even to a file and with --ansi never
setsid docker compose --ansi never logs -f --no-log-prefix --since "$began" "${nodes[@]}" 2> /dev/null |
  setsid sed -u 's/\x1b\[2K//g' &
logs=$!
# `docker compose up` returns 0 although a node failed, or with some options the code of another node. Docker's events
# name the node and its exit code each time a node ends
setsid docker events --since "$began" --filter event=die "${id[@]/#/--filter=container=}" \
  --format '{{.ID}} {{.Actor.Attributes.exitCode}}' > "$scratch/events" &

set +e # Ctrl-C may end any command below, but the loop must run until the nodes have ended
# Prints the exit code of a node's last start, or of an earlier one if that was from 1 to 127: it says more
code_of() {
  awk -v id="${id[$1]}" '$1 == id && !(code > 0 && code < 128) {code = $2} END {print code}' "$scratch/events"
}
state_of() { docker inspect -f "$2" "${id[$1]}" 2> /dev/null; } # NODE FORMAT

# Docker may fail to answer once, which says nothing about the nodes. For nodes that were removed it always fails
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
gone() { fail "Docker does not know the nodes any more: were they removed?"; }

while alive; do
  for node in "${nodes[@]}"; do
    code=$(code_of "$node")
    # A restart cannot help, but Docker would try one
    if ((code > 0 && code < 128)); then
      stop "$node ended with $code, which a restart cannot fix: stopping the others"
    # Compare with Docker's own state: events may come late, and a later start may have succeeded
    elif ((code > 0)) && [[ $(state_of "$node" '{{.State.Status}} {{.State.ExitCode}}') == "exited $code" ]]; then
      stop "$node ended with $code and is not restarted: stopping the others"
    fi
  done
  sleep 0.5
done
# The last lines may still be on their way. Wait at most 5 s: if compose began to follow the logs after all nodes had
# ended, it never ends
for ((tries = 0; tries < 25; tries++)); do
  kill -0 "$logs" 2> /dev/null || break
  sleep 0.2
done

codes=()
for node in "${nodes[@]}"; do
  code=$(code_of "$node")
  # The last event may still be on its way, but Docker knows how the last start ended
  if last=$(state_of "$node" '{{.State.ExitCode}}') && ! ((code > 0 && code < 128)); then code=$last; fi
  [[ -n $code ]] || gone
  more=$(state_of "$node" '{{if .State.OOMKilled}}, out of memory{{end}}, {{.RestartCount}} restarts')
  say "$node ended with $code$more"
  codes+=("$code")
done
[[ ${codes[*]} =~ [1-9] ]] || exit 0
# rankup's own rule says which code counts. It runs inside the image, because this machine may have no Python
image=$(state_of node0 '{{.Image}}')
exit "$(setsid docker run --rm --network none --entrypoint python3 "$image" -c '
import sys
from rankup.errors import STOPPED, root_cause
codes = [*map(int, sys.argv[2:])]
cause = root_cause([code for code in codes if code not in (0, STOPPED)] or codes)  # this script stopped the rest
print(STOPPED if sys.argv[1] and cause >= 128 else cause)
' "$interrupted" "${codes[@]}" || echo 1)"
