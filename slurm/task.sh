#!/usr/bin/env bash
# Runs one task of a Slurm step: the agent of a node, in a container if IMAGE names one.
# Run: srun --ntasks-per-node=1 slurm/task.sh --nproc 4 train/main.py train --epochs 5      (slurm/job.sh does)
# Edit: nothing. The lines to edit are in ddp.sbatch.
RANKUP=${RANKUP:-$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)}
if [[ -z ${PYTHON:-} ]]; then
  PYTHON=python3
  # A container has a Python of its own
  [[ -n ${IMAGE:-} || ! -x $RANKUP/.venv/bin/python ]] || PYTHON=$RANKUP/.venv/bin/python
fi
in_image=()
if [[ ${IMAGE:-} == *.sif ]]; then
  in_image=(apptainer exec ${SLURM_GPUS_ON_NODE:+--nv} --bind "$RANKUP,$PWD,/tmp" --pwd "$PWD" "$IMAGE")
fi
# A container's hook or an earlier launcher may have set these. The agent must read Slurm's own variables
unset RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE
export PYTHONPATH=$RANKUP${PYTHONPATH:+:$PYTHONPATH}

trap 'stopped=yes' TERM USR1 INT # Slurm signals every process of a step. The agent acts on it, and this shell waits
for ((restart = 0; ; restart++)); do
  "${in_image[@]}" "$PYTHON" "$RANKUP/train/main.py" launch --max-restarts "${MAX_RESTARTS:-3}" "$@"
  code=$?
  # All agents of a job end with the same code. Retry if it is 128 or above, except 143: the other agents wait for one
  # that was killed, and if all of them gave up, they meet again
  if ((code < 128 || code == 143 || restart >= ${MAX_RESTARTS:-3})) || [[ -n ${stopped:-} ]]; then
    if [[ -n ${ENDED:-} ]] && ((code < 128)); then
      echo "$code" >> "$ENDED"
      # Without its first node a job has no batch script, and would hold its other nodes to the time limit: requeue it
      shown=$(scontrol show job "$SLURM_JOB_ID" 2> /dev/null)
      [[ ! $shown =~ NodeList=([^[:space:]]+)[[:space:]]+BatchHost=([^[:space:]]+) ]] ||
        scontrol show hostnames "${BASH_REMATCH[1]}" | grep -qx "${BASH_REMATCH[2]}" || scontrol requeue "$SLURM_JOB_ID"
    fi
    exit "$code"
  fi
  echo "slurm: the agent on $(hostname) ended with $code, restarted ($((restart + 1)) of ${MAX_RESTARTS:-3})" >&2
done
