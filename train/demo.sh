#!/usr/bin/env bash
# A real training on two simulated nodes of this machine: two torchrun agents on loopback, one process each.
# Run: make demo      (or, with torchrun on the PATH: bash train/demo.sh --epochs 3 --no-augment)
# Edit: the settings of the job, in the line that begins with `job=`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export OMP_NUM_THREADS=1
job=(train --config train/configs/fashion.yaml --device cpu --epochs 2 --name demo "$@")
port=$(python3 -c 'from rankup.env.launchers import free_port; print(free_port())')

# Interrupted, the demo goes on where it stopped, as every run does; finished, it trains anew.
if grep -qs '"state": "finished"' runs/demo/status.json; then
  job+=(--fresh)
fi

agents=()
node() { # NODE_RANK
  # On two machines --master-addr is node 0's name; nothing else differs.
  # Job control gives the agent a process group of its own: Ctrl-C would reach it beside the trap below, and a second
  # signal ends torchrun while its rank saves.
  set -m
  torchrun --nnodes 2 --node-rank "$1" --nproc-per-node 1 --master-addr 127.0.0.1 --master-port "$port" \
    -m train.main "${job[@]}" &
  agents+=($!)
  set +m
}
# Ctrl-C, or the terminal closed: the agents tell their ranks, which save and leave.
trap 'kill -TERM "${agents[@]}" 2> /dev/null || true' INT TERM HUP
# A rank dies with its agent, however that dies.
trap 'kill -KILL "${agents[@]}" 2> /dev/null || true' EXIT
node 1
node 0

alive() { kill -0 "$1" 2> /dev/null; }
both() { alive "${agents[0]}" && alive "${agents[1]}"; }
one() { alive "${agents[0]}" || alive "${agents[1]}"; }
# When one has ended, the other follows: all is well, or its rank has lost the peer. But torchrun would wait for an agent
# that never came a quarter of an hour; it gets 15 s.
patience=75
while one; do
  both || ((patience--)) || kill -TERM "${agents[@]}" 2> /dev/null || true
  sleep 0.2 || true
done

code=0
for agent in "${agents[@]}"; do wait "$agent" || code=$?; done
exit "$code"
