#!/bin/sh
# One node of a job, in its container: one process, or NPROC of them through the program's own launcher.
# Run: docker compose up      (compose.yaml sets the five variables)
# Edit: nothing.
RANKUP_START=$(cat runs/.start 2> /dev/null) # which prepare.sh wrote
export RANKUP_START
if [ "${NPROC:-1}" = 1 ]; then
  exec python -m train.main "$@"
fi
# RANK and WORLD_SIZE count nodes here. A lost rank ends the node and its container is started again, as with one process:
# measured, that is faster than restarts inside.
nodes=$WORLD_SIZE node=$RANK address=$MASTER_ADDR port=$MASTER_PORT
unset RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT
command=$1
shift
exec python -m train.main launch --command "$command" --nproc "$NPROC" --nnodes "$nodes" --node-rank "$node" --master-addr "$address" \
  --master-port "$port" --max-restarts 0 "$@"
