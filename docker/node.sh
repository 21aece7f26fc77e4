#!/bin/sh
# One node of a job, in its container: the agent that starts its NPROC ranks, and starts them again when one is lost.
# Run: docker compose up      (compose.yaml sets the variables; RANK and WORLD_SIZE count nodes)
# Edit: nothing.
# Who has not said which user trains (RANKUP_UID; make up does) trains as the owner of runs/, never as root
if [ "$(id -u)" = 0 ]; then
  uid=$(stat -c %u runs) gid=$(stat -c %g runs)
  if [ "$uid" = 0 ]; then uid=1000 gid=1000; fi
  exec setpriv --reuid "$uid" --regid "$gid" --clear-groups --no-new-privs sh "$0" "$@"
fi
RANKUP_START=$(cat runs/.start 2> /dev/null) # prepare.sh wrote it
export RANKUP_START
exec python /app/train/main.py launch --nproc "${NPROC:-1}" "$@"
