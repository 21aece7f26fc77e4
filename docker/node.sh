#!/bin/sh
# One node of a job, in its container: the supervisor of its rank, or of NPROC ranks, starts a lost one again.
# Run: docker compose up      (compose.yaml sets the five variables)
# Edit: nothing.
# Who has not said which user trains (RANKUP_UID; make up does) trains as the owner of runs/, never as root
if [ "$(id -u)" = 0 ]; then
  uid=$(stat -c %u runs) gid=$(stat -c %g runs)
  if [ "$uid" = 0 ]; then uid=1000 gid=1000; fi
  exec setpriv --reuid "$uid" --regid "$gid" --clear-groups --no-new-privs sh "$0" "$@"
fi
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
