#!/usr/bin/env bash
# A real training on two simulated nodes of this machine: two torchrun agents on loopback, one process each.
# Run: make demo      (or, with torchrun on the PATH: bash train/demo.sh --epochs 3 --no-augment)
# Edit: the settings of the job, in the line that begins with `job=`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export OMP_NUM_THREADS=1
job=(train --config train/configs/fashion.yaml --device cpu --epochs 2 --name demo "$@")
port=$(python3 -c 'from rankup.env.launchers import free_port; print(free_port())')

# Like every run, the demo resumes if it was interrupted. If it has finished, it starts from the beginning.
if grep -qs '"state": "finished"' runs/demo/status.json; then
  job+=(--fresh)
fi

agents=()
node() { # NODE_RANK
  # On two machines --master-addr would be the name of node 0. Nothing else would differ.
  # Job control (set -m) gives the agent its own process group. Otherwise Ctrl-C would reach it in addition to the trap
  # below, and a second signal ends torchrun while its rank saves.
  set -m
  torchrun --nnodes 2 --node-rank "$1" --nproc-per-node 1 --master-addr 127.0.0.1 --master-port "$port" \
    -m train.main "${job[@]}" &
  agents+=($!)
  set +m
}
# On Ctrl-C, or if the terminal closes, the agents signal their ranks, which save and leave.
trap 'kill -TERM "${agents[@]}" 2> /dev/null || true' INT TERM HUP
# A rank dies with its agent, no matter how the agent dies.
trap 'kill -KILL "${agents[@]}" 2> /dev/null || true' EXIT
node 1
node 0

alive() { kill -0 "$1" 2> /dev/null; }
both() { alive "${agents[0]}" && alive "${agents[1]}"; }
one() { alive "${agents[0]}" || alive "${agents[1]}"; }
# When one agent has ended, the other follows: the run succeeded, or its rank has lost the peer. But torchrun waits a
# quarter of an hour for an agent that never comes, so end it after 15 s.
patience=75
while one; do
  both || ((patience--)) || kill -TERM "${agents[@]}" 2> /dev/null || true
  sleep 0.2 || true
done

code=0
for agent in "${agents[@]}"; do wait "$agent" || code=$?; done
exit "$code"
