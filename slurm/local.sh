#!/usr/bin/env bash
# A real Slurm of two nodes on this machine, to try the job files: each has its own host name, address and processes.
# Run: make slurm-local      (root, on Debian or Ubuntu; it prints what to do next; make slurm-local-down removes it)
# Edit: NODES, CPUS, NET, PORT and FIRST_JOB, here or in the environment.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
NODES=${NODES:-2}
CPUS=${CPUS:-4}            # of each node, as Slurm counts them; they share this machine's
NET=${NET:-192.168.78}     # the nodes are .10, .11, ...
DIR=${RANKUP_SLURM_DIR:-/var/lib/rankup-slurm} # everything is here: the configuration, the state, the logs
CONF=$DIR/slurm.conf
SWITCH=${SWITCH:-rankup-slurm} # the name of the nodes' network
PORT=${PORT:-16817}        # of slurmctld, and the next of slurmd; Slurm's own is 6817, which a real one may have
FIRST_JOB=${FIRST_JOB:-1}  # its number. The nodes share this machine's /tmp, also with those of another such Slurm

fail() { printf 'slurm-local: %s\n' "$@" >&2; exit 2; }
say() { echo "slurm-local: $*"; }

packages() {
  local tool missing=""
  for tool in slurmctld slurmd sbatch munged ip unshare; do command -v "$tool" > /dev/null || missing=$tool; done
  [[ -n $missing ]] || return 0
  command -v apt-get > /dev/null || fail "no $missing, and this is neither Debian nor Ubuntu: install Slurm and munge"
  say "installing Slurm and munge"
  apt-get update -q > /dev/null
  # Debian starts no daemon of them: there is no configuration in /etc/slurm
  DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends slurm-wlm munge iproute2 util-linux \
    > "$DIR/apt.log" 2>&1 || { tail -5 "$DIR/apt.log" >&2; fail "apt-get could not install them"; }
}

configure() {
  install -d -m 755 "$DIR" "$DIR/state" "$DIR/spool" "$DIR/log" "$DIR/munge"
  head -c 1024 /dev/urandom > "$DIR/munge/key"
  chmod 400 "$DIR/munge/key"
  {
    printf '127.0.0.1 localhost\n%s %s\n' "$NET.1" "$(hostname -s)"
    for ((i = 0; i < NODES; i++)); do echo "$NET.$((10 + i)) node$i"; done
  } > "$DIR/hosts"
  # Names come from that file alone: a lookup that goes out of a node would wait for an answer
  echo "hosts: files" > "$DIR/nsswitch.conf"
  cat > "$CONF" << END
ClusterName=rankup
SlurmctldHost=$(hostname -s)($NET.1)
SlurmctldPort=$PORT
SlurmdPort=$((PORT + 1))
SlurmUser=root
FirstJobId=$FIRST_JOB
AuthType=auth/munge
# A requeued job waits until its old credential has expired: 120 s by default
AuthInfo=socket=$DIR/munge/socket,cred_expire=15
StateSaveLocation=$DIR/state
SlurmdSpoolDir=$DIR/spool/%n
SlurmctldPidFile=$DIR/slurmctld.pid
SlurmdPidFile=$DIR/%n.pid
SlurmctldLogFile=$DIR/log/slurmctld.log
SlurmdLogFile=$DIR/log/%n.log
# Finds a task's processes in /proc: cgroups would be the machine's own
ProctrackType=proctrack/linuxproc
ReturnToService=2
SlurmdTimeout=20
# 10 s each by default: here the nodes share one machine with all that they run
MessageTimeout=30
BatchStartTimeout=60
MinJobAge=3600
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
# As many CPUs as are given here, not as the machine has
SlurmdParameters=config_overrides
END
  for ((i = 0; i < NODES; i++)); do
    echo "NodeName=node$i NodeAddr=$NET.$((10 + i)) CPUs=$CPUS RealMemory=16000 State=UNKNOWN" >> "$CONF"
  done
  echo "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES:4" >> "$CONF"
}

network() { # a switch in its own namespace, where no firewall of this machine stands between the nodes
  no_network # a machine that went down in the middle leaves the name behind
  ip netns add "$SWITCH"
  ip -n "$SWITCH" link add switch type bridge
  ip -n "$SWITCH" link set switch up
  ip link add "$SWITCH" type veth peer name host netns "$SWITCH"
  ip -n "$SWITCH" link set host master switch up
  ip addr add "$NET.1/24" dev "$SWITCH"
  ip link set "$SWITCH" up
}

node_up() { # NODE: a machine of namespaces; its first process only lives and collects processes that ended
  local node=$1 number=${1#node} init
  # shellcheck disable=SC2016  # expanded in the node
  setsid unshare --net --uts --mount --pid --fork --kill-child --mount-proc bash -c '
    mount --bind "$2/hosts" /etc/hosts; mount --bind "$2/nsswitch.conf" /etc/nsswitch.conf; ip link set lo up
    trap : TERM INT HUP; hostname "$1"; while :; do sleep 1000 & wait; done' \
    "$node" "$node" "$DIR" < /dev/null > "$DIR/log/$node.boot" 2>&1 &
  echo $! > "$DIR/$node.unshare"
  until init=$(pgrep -P "$(cat "$DIR/$node.unshare")"); do sleep 0.05; done
  echo "$init" > "$DIR/$node.pid1"
  until [[ $(nsenter -t "$init" -u hostname) == "$node" ]]; do sleep 0.05; done # the last that it sets
  # A node that lost its power may still hold its cable
  ip -n "$SWITCH" link del "$node" 2> /dev/null || true
  # The same hardware address each time: the others remember it for a while
  ip link add name eth0 address "02:00:00:00:00:$((10 + number))" netns "$init" \
    type veth peer name "$node" netns "$SWITCH"
  ip -n "$SWITCH" link set "$node" master switch up
  on "$node" ip addr add "$NET.$((10 + number))/24" dev eth0
  on "$node" ip link set eth0 up
  slurmd_up "$node"
}

on() { # NODE COMMAND...: run it there
  local node=$1
  shift
  nsenter -t "$(cat "$DIR/$node.pid1")" --net --uts --mount --pid "$@"
}

slurmd_up() { on "$1" env -i PATH="$PATH" SLURM_CONF="$CONF" slurmd -N "$1" -f "$CONF"; }

up() {
  [[ $(id -u) -eq 0 ]] || fail "namespaces and Slurm's daemons take root: sudo make slurm-local"
  mkdir -p "$DIR"
  packages
  [[ ! -e $CONF ]] || down
  ! ip -n "$SWITCH" link show node0 > /dev/null 2>&1 \
    || fail "a Slurm named $SWITCH runs already: choose another SWITCH, NET and PORT, or end it \
(RANKUP_SLURM_DIR=... slurm/local.sh down)"
  mkdir -p "$DIR"
  configure
  munged --socket="$DIR/munge/socket" --key-file="$DIR/munge/key" --pid-file="$DIR/munge/pid" \
    --log-file="$DIR/munge/log" --seed-file="$DIR/munge/seed" --force 2> "$DIR/log/munged"
  network
  env -i PATH="$PATH" SLURM_CONF="$CONF" slurmctld -c -f "$CONF"
  for ((i = 0; i < NODES; i++)); do node_up "node$i"; done
  export SLURM_CONF=$CONF
  # shellcheck disable=SC2016  # expanded by that shell
  timeout 120 bash -c 'until [[ $(sinfo -h -t idle -o %D 2> /dev/null) == "$0" ]]; do sleep 0.1; done' "$NODES" ||
    fail "the nodes did not come up: see $DIR/log"
  say "$NODES nodes are up. Go on with: export SLURM_CONF=$CONF; sbatch slurm/ddp.sbatch --dataset digits"
}

kill_pid() { # FILE NAME: SIGKILL for the process whose id is in the file, unless that id is another program's by now
  local pid
  pid=$(cat "$1" 2> /dev/null) || return 0
  rm -f "$1"
  [[ $(cat "/proc/$pid/comm" 2> /dev/null) == "$2" ]] || return 0
  kill -9 "$pid" 2> /dev/null || true
  for ((tries = 0; tries < 600; tries++)); do
    [[ $(ps -o stat= -p "$pid") == [!Z]* ]] || break
    sleep 0.05
  done
}

no_network() {
  ip netns del "$SWITCH" 2> /dev/null || true
  ip link del "$SWITCH" 2> /dev/null || true
}

down() {
  for file in "$DIR"/node*.pid1; do [[ ! -e $file ]] || kill_pid "$file" bash; done
  for file in "$DIR"/node*.unshare; do [[ ! -e $file ]] || kill_pid "$file" unshare; done
  kill_pid "$DIR/slurmctld.pid" slurmctld
  kill_pid "$DIR/munge/pid" munged
  no_network
  [[ ! -e $CONF ]] || rm -rf "$DIR" # not a folder that somebody named by mistake
}

case ${1:-up} in
  up) up ;;
  down) down; say "removed" ;;
  kill) kill_pid "$DIR/$2.pid1" bash ;;    # NODE loses its power: every process of it ends at once
  start) node_up "$2" ;;                # NODE comes back
  kill-slurmd) on "$2" kill -9 "$(cat "$DIR/$2.pid")" ;; # its jobs go on without it
  start-slurmd) slurmd_up "$2" ;;
  on) node=$2; shift 2; on "$node" "$@" ;;
  *) fail "up, down, kill NODE, start NODE, kill-slurmd NODE, start-slurmd NODE, on NODE COMMAND; got $1" ;;
esac
