#!/usr/bin/env bash
# One task of a Slurm step: the agent of its node, in the container where there is one.
# Run: srun --ntasks-per-node=1 slurm/task.sh --nproc 4 train/main.py train --epochs 5      (slurm/ddp.sbatch does)
# Edit: nothing; the lines to edit are in ddp.sbatch.
RANKUP=${RANKUP:-$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)}
if [[ -z ${PYTHON:-} ]]; then
  PYTHON=python3
  # A container has its own
  [[ -n ${IMAGE:-} || ! -x $RANKUP/.venv/bin/python ]] || PYTHON=$RANKUP/.venv/bin/python
fi
in_image=()
if [[ ${IMAGE:-} == *.sif ]]; then
  in_image=(apptainer exec ${SLURM_GPUS_ON_NODE:+--nv} --bind "$RANKUP,$PWD,/tmp" --pwd "$PWD" "$IMAGE")
fi
# A container's hook for the node may have set them, or an earlier launcher: Slurm's own variables count
unset RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE
export PYTHONPATH=$RANKUP${PYTHONPATH:+:$PYTHONPATH}

trap 'stopped=yes' TERM USR1 INT # Slurm signals every process of a step: the agent acts on it, and this shell waits
for ((restart = 0; ; restart++)); do
  "${in_image[@]}" "$PYTHON" "$RANKUP/train/main.py" launch --max-restarts "${MAX_RESTARTS:-3}" "$@"
  code=$?
  # The agents of a job end with one code. From 128 on, except for 143, it is worth another try: the others wait for an
  # agent that was killed, and all meet again where they gave up
  if ((code < 128 || code == 143 || restart >= ${MAX_RESTARTS:-3})) || [[ -n ${stopped:-} ]]; then
    if [[ -n ${ENDED:-} ]] && ((code < 128)); then
      echo "$code" >> "$ENDED"
      # A job that has lost its first node would hold the others to its time limit: nobody waits for the step there
      shown=$(scontrol show job "$SLURM_JOB_ID" 2> /dev/null)
      [[ ! $shown =~ NodeList=([^[:space:]]+)[[:space:]]+BatchHost=([^[:space:]]+) ]] ||
        scontrol show hostnames "${BASH_REMATCH[1]}" | grep -qx "${BASH_REMATCH[2]}" || scontrol requeue "$SLURM_JOB_ID"
    fi
    exit "$code"
  fi
  echo "slurm: the agent on $(hostname) ended with $code, started again ($((restart + 1)) of ${MAX_RESTARTS:-3})" >&2
done
