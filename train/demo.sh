#!/usr/bin/env bash
# Trains on two simulated nodes of this machine: two torchrun agents on loopback, with one process each.
# Run: INSTALL=1 make demo      (or, with torchrun on the PATH: bash train/demo.sh --epochs 3 --no-augment)
# Edit: the settings in the line that begins with `job=`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export OMP_NUM_THREADS=1
# Where no server with data answers, Debian's package has Fashion-MNIST
if [[ ${INSTALL:-} == 1 && $(id -u) -eq 0 && ! -d /usr/share/datasets/fashion-mnist ]] && command -v apt-get > /dev/null; then
  { apt-get -q update && apt-get install -q -y --no-install-recommends dataset-fashion-mnist; } > /dev/null 2>&1 ||
    echo "demo: apt-get can't install dataset-fashion-mnist: the program will ask the web" >&2
fi
job=(train --config train/configs/fashion.yaml --device cpu --epochs 2 --name demo "$@")
port=$(python3 -c 'from rankup.env.launchers import free_port; print(free_port())')

# If the demo was interrupted, it resumes, as every run does. If it has finished, it starts anew.
if grep -qs '"state": "finished"' runs/demo/status.json; then
  job+=(--fresh)
fi

agents=()
node() { # NODE_RANK
  # On two machines --master-addr would be node 0's name. Nothing else would differ.
  # Job control gives the agent its own process group. Otherwise the agent would get Ctrl-C itself, and a second signal
  # from the trap below, which ends torchrun while its rank saves.
  set -m
  torchrun --nnodes 2 --node-rank "$1" --nproc-per-node 1 --master-addr 127.0.0.1 --master-port "$port" \
    -m train.main "${job[@]}" &
  agents+=($!)
  set +m
}
# On Ctrl-C, or when the terminal closes, the agents tell their ranks to save and leave.
trap 'kill -TERM "${agents[@]}" 2> /dev/null || true' INT TERM HUP
# A rank ends with its agent, even if the agent is killed.
trap 'kill -KILL "${agents[@]}" 2> /dev/null || true' EXIT
node 1
node 0

alive() { kill -0 "$1" 2> /dev/null; }
both() { alive "${agents[0]}" && alive "${agents[1]}"; }
one() { alive "${agents[0]}" || alive "${agents[1]}"; }
# When one agent has ended, the other ends too: the job has finished, or its rank has lost the peer. But torchrun would
# wait a quarter of an hour for an agent that never came, so end it after 15 s.
patience=75
while one; do
  both || ((patience--)) || kill -TERM "${agents[@]}" 2> /dev/null || true
  sleep 0.2 || true
done

code=0
for agent in "${agents[@]}"; do wait "$agent" || code=$?; done
exit "$code"
