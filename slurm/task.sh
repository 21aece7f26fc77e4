#!/usr/bin/env bash
# One task of a Slurm step: SLURM_* become RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and the training starts.
# Run: srun slurm/task.sh train --epochs 5      (slurm/ddp.sbatch does, with MASTER_ADDR and MASTER_PORT set)
# Edit: nothing; what is to be edited stands in ddp.sbatch.
RANKUP=${RANKUP:-$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)}
if [[ -z ${PYTHON:-} ]]; then
  PYTHON=python3
  # A container has its own
  [[ -n ${IMAGE:-} || ! -x $RANKUP/.venv/bin/python ]] || PYTHON=$RANKUP/.venv/bin/python
fi
in_image=()
if [[ ${IMAGE:-} == *.sif ]]; then
  gpus=()
  [[ -z ${SLURM_GPUS_ON_NODE:-} ]] || gpus=(--nv)
  in_image=(apptainer exec "${gpus[@]}" --bind "$RANKUP,$PWD,/tmp" --pwd "$PWD" "$IMAGE")
fi
python() { "${in_image[@]}" "$PYTHON" "$@"; }

command=$1
shift
# Set by a container's hook for the node, or left over: the ranks here are Slurm's
unset RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE
if [[ $command == progress ]]; then
  python "$RANKUP/slurm/progress.py" "$@"
  exit
fi
trap : TERM USR1 INT # Slurm signals every process of a step: the ranks heed it, and this shell waits for them
export RANKUP_PARENT=$$
if [[ ${WAY:-tasks} == torchrun ]]; then
  unset RANKUP_PARENT # the ranks' parent is torchrun
  # torchrun would die of USR1 and leave its ranks behind; it kills them 30 s after a signal, which is short for a save
  python -m torch.distributed.run --nnodes "$SLURM_NNODES" --node-rank "$SLURM_NODEID" --nproc-per-node "$NPROC" \
    --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" --rdzv-id "${RANKUP_ATTEMPT:-$SLURM_JOB_ID}" --max-restarts 0 \
    --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 --shutdown-timeout 110 "$RANKUP/train/main.py" "$command" "$@"
else
  export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS
  python "$RANKUP/train/main.py" "$command" "$@"
fi
code=$?
# srun returns the highest code of all tasks, and knows nothing of which came first: a rank that ended by a mistake or a fault
# (below 100) must not hide behind those that it took along
if [[ -n ${RANKUP_ATTEMPT:-} ]] && ((code > 0 && code < 56)); then code=$((200 + code)); fi
exit "$code"
