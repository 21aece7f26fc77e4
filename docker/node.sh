#!/bin/sh
# One node of a job, in its container: one process, or NPROC processes, which the program's own launcher starts.
# Run: docker compose up      (compose.yaml sets the five variables)
# Edit: nothing.
RANKUP_START=$(cat runs/.start 2> /dev/null) # prepare.sh wrote it
export RANKUP_START
if [ "${NPROC:-1}" = 1 ]; then
  exec python -m train.main "$@"
fi
# RANK and WORLD_SIZE count nodes here. A lost rank ends the container, as with one process, and the engine starts it
# again: measured, that is faster than a restart inside the container.
nodes=$WORLD_SIZE node=$RANK address=$MASTER_ADDR port=$MASTER_PORT
unset RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT
command=$1
shift
exec python -m train.main launch --command "$command" --nproc "$NPROC" --nnodes "$nodes" --node-rank "$node" \
  --master-addr "$address" --master-port "$port" --max-restarts 0 "$@"
