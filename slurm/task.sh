#!/usr/bin/env bash
# One task of a Slurm step: SLURM_* become RANK, LOCAL_RANK and WORLD_SIZE, and the rank's supervisor starts.
# Run: srun slurm/task.sh train --epochs 5      (slurm/ddp.sbatch does; with MASTER_ADDR and MASTER_PORT set)
# Edit: nothing; the lines to edit are in ddp.sbatch.
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

# A container's hook for the node may have set them, or an earlier launcher: the ranks here are Slurm's
unset RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE
if [[ $1 == progress ]]; then
  python "$RANKUP/slurm/progress.py" "${@:2}"
  exit
fi
trap : TERM USR1 INT # Slurm signals every process of a step: the ranks act on it, and this shell waits for them
if [[ ${LAUNCHER:-tasks} == torchrun ]]; then
  unset RANKUP_PARENT # the ranks' parent is torchrun
  # torchrun would die of USR1 and leave its ranks behind, and kill them 30 s after a signal, too early for a save
  python -m torch.distributed.run --nnodes "$SLURM_NNODES" --node-rank "$SLURM_NODEID" --nproc-per-node "$NPROC" \
    --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" --rdzv-id "${RANKUP_ATTEMPT:-$SLURM_JOB_ID}" \
    --max-restarts 0 --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 --shutdown-timeout 110 \
    "$RANKUP/train/main.py" "$@"
else
  export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS RANKUP_PARENT=$$
  python "$RANKUP/train/main.py" supervise --command "$@"
fi
code=$?
# srun returns the highest code of all tasks, so the cause needs the highest: those that lost this task end with 171, and
# with 143 where srun asks them to stop; job.py takes off what is added here
if [[ -n ${RANKUP_ATTEMPT:-} ]]; then
  if ((code > 0 && code < 56)); then code=$((200 + code)); fi     # a mistake or a fault
  if ((code > 128 && code < 143)); then code=$((50 + code)); fi   # killed by a signal: 137, 139
fi
exit "$code"
