#!/usr/bin/env bash
# Starts a real Slurm of two nodes on this machine. Each node has its own host name, address and processes.
# Run: make slurm-local      (as root on Debian or Ubuntu; prints what to type next; make slurm-local-down removes it)
# Edit: NODES, CPUS, NET, PORT and FIRST_JOB, here or in the environment.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
NODES=${NODES:-2}
CPUS=${CPUS:-4}            # on each node, as Slurm counts them; all nodes share this machine's CPUs
NET=${NET:-192.168.78}     # the nodes have the addresses .10, .11, ...
DIR=${RANKUP_SLURM_DIR:-/var/lib/rankup-slurm} # for the configuration, the state and the logs
CONF=$DIR/slurm.conf
SWITCH=${SWITCH:-rankup-slurm} # the name of the nodes' network
PORT=${PORT:-16817}        # of slurmctld; slurmd uses the next one. A real Slurm may use the default, 6817
FIRST_JOB=${FIRST_JOB:-1}  # its id. All nodes share /tmp, so another such Slurm on this machine needs other ids

fail() { printf 'slurm-local: %s\n' "$@" >&2; exit 2; }
say() { echo "slurm-local: $*"; }

packages() {
  local tool missing=""
  for tool in slurmctld slurmd sbatch munged ip unshare; do command -v "$tool" > /dev/null || missing=$tool; done
  [[ -n $missing ]] || return 0
  command -v apt-get > /dev/null || fail "no $missing here, and no apt-get to install it: install Slurm and munge"
  say "installing Slurm and munge"
  apt-get update -q > /dev/null
  # Debian does not start these daemons, because /etc/slurm has no configuration
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
  # Look up names in that file alone: a DNS query from a node would wait for an answer
  echo "hosts: files" > "$DIR/nsswitch.conf"
  cat > "$CONF" << END
ClusterName=rankup
SlurmctldHost=$(hostname -s)($NET.1)
SlurmctldPort=$PORT
SlurmdPort=$((PORT + 1))
SlurmUser=root
FirstJobId=$FIRST_JOB
AuthType=auth/munge
# A requeued job waits until its old credential has expired. The default is 120 s
AuthInfo=socket=$DIR/munge/socket,cred_expire=15
StateSaveLocation=$DIR/state
SlurmdSpoolDir=$DIR/spool/%n
SlurmctldPidFile=$DIR/slurmctld.pid
SlurmdPidFile=$DIR/%n.pid
SlurmctldLogFile=$DIR/log/slurmctld.log
SlurmdLogFile=$DIR/log/%n.log
# Find a task's processes in /proc, because the cgroups are those of this machine
ProctrackType=proctrack/linuxproc
ReturnToService=2
SlurmdTimeout=20
# Both default to 10 s, which is too short if all nodes and their jobs share one machine
MessageTimeout=30
BatchStartTimeout=60
MinJobAge=3600
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
# Use the number of CPUs given below, not that of this machine
SlurmdParameters=config_overrides
END
  for ((i = 0; i < NODES; i++)); do
    echo "NodeName=node$i NodeAddr=$NET.$((10 + i)) CPUs=$CPUS RealMemory=16000 State=UNKNOWN" >> "$CONF"
  done
  echo "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES:4" >> "$CONF"
}

network() { # a switch in its own namespace, so that no firewall of this machine is between the nodes
  no_network # the name is left if this machine went down while Slurm ran
  ip netns add "$SWITCH"
  ip -n "$SWITCH" link add switch type bridge
  ip -n "$SWITCH" link set switch up
  ip link add "$SWITCH" type veth peer name host netns "$SWITCH"
  ip -n "$SWITCH" link set host master switch up
  ip addr add "$NET.1/24" dev "$SWITCH"
  ip link set "$SWITCH" up
}

node_up() { # NODE: make a machine of namespaces; its first process only stays alive and reaps orphans
  local node=$1 number=${1#node} init
  # shellcheck disable=SC2016  # expanded in the node
  setsid unshare --net --uts --mount --pid --fork --kill-child --mount-proc bash -c '
    mount --bind "$2/hosts" /etc/hosts; mount --bind "$2/nsswitch.conf" /etc/nsswitch.conf; ip link set lo up
    trap : TERM INT HUP; hostname "$1"; while :; do sleep 1000 & wait; done' \
    "$node" "$node" "$DIR" < /dev/null > "$DIR/log/$node.boot" 2>&1 &
  echo $! > "$DIR/$node.unshare"
  until init=$(pgrep -P "$(cat "$DIR/$node.unshare")"); do sleep 0.05; done
  echo "$init" > "$DIR/$node.pid1"
  until [[ $(nsenter -t "$init" -u hostname) == "$node" ]]; do sleep 0.05; done # bash sets it last
  # A node that was killed may have left its link behind
  ip -n "$SWITCH" link del "$node" 2> /dev/null || true
  # Always the same hardware address, because the other nodes cache it for a while
  ip link add name eth0 address "02:00:00:00:00:$((10 + number))" netns "$init" \
    type veth peer name "$node" netns "$SWITCH"
  ip -n "$SWITCH" link set "$node" master switch up
  on "$node" ip addr add "$NET.$((10 + number))/24" dev eth0
  on "$node" ip link set eth0 up
  slurmd_up "$node"
}

on() { # NODE COMMAND...: run the command on the node
  local node=$1
  shift
  nsenter -t "$(cat "$DIR/$node.pid1")" --net --uts --mount --pid "$@"
}

slurmd_up() { on "$1" env -i PATH="$PATH" SLURM_CONF="$CONF" slurmd -N "$1" -f "$CONF"; }

up() {
  [[ $(id -u) -eq 0 ]] || fail "namespaces and Slurm's daemons need root: sudo make slurm-local"
  mkdir -p "$DIR"
  packages
  [[ ! -e $CONF ]] || down
  ! ip -n "$SWITCH" link show node0 > /dev/null 2>&1 \
    || fail "a Slurm named $SWITCH runs already: choose another SWITCH, NET and PORT, or remove it \
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
  say "$NODES nodes are up. Now type: export SLURM_CONF=$CONF; sbatch slurm/ddp.sbatch --dataset digits"
}

kill_pid() { # FILE NAME: kill the process whose id is in the file, unless that id now belongs to another program
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
  [[ ! -e $CONF ]] || rm -rf "$DIR" # a folder without slurm.conf is not ours
}

case ${1:-up} in
  up) up ;;
  down) down; say "removed" ;;
  kill) kill_pid "$DIR/$2.pid1" bash ;;    # power failure of NODE: all its processes end at once
  start) node_up "$2" ;;                # NODE comes back
  kill-slurmd) on "$2" kill -9 "$(cat "$DIR/$2.pid")" ;; # the node's jobs continue
  start-slurmd) slurmd_up "$2" ;;
  on) node=$2; shift 2; on "$node" "$@" ;;
  *) fail "must be up, down, kill NODE, start NODE, kill-slurmd NODE, start-slurmd NODE or on NODE COMMAND, got $1" ;;
esac
