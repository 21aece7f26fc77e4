#!/bin/sh
# One node of a job, in its container: the supervisor of its rank, or of NPROC ranks, starts a lost one again.
# Run: docker compose up      (compose.yaml sets the five variables)
# Edit: nothing.
RANKUP_START=$(cat runs/.start 2> /dev/null) # prepare.sh wrote it
export RANKUP_START
command=$1
shift
if [ "${NPROC:-1}" = 1 ]; then
  exec python -m train.main supervise --command "$command" "$@"
fi
# RANK and WORLD_SIZE count nodes here
nodes=$WORLD_SIZE node=$RANK address=$MASTER_ADDR port=$MASTER_PORT
unset RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT
exec python -m train.main launch --command "$command" --nproc "$NPROC" --nnodes "$nodes" --node-rank "$node" \
  --master-addr "$address" --master-port "$port" "$@"
