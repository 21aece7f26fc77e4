#!/bin/sh
# Runs one node of a job in its container: the agent, which starts NPROC ranks and restarts them when one is lost.
# Run: docker compose up      (compose.yaml sets the variables; RANK and WORLD_SIZE count nodes)
# Edit: nothing.
# Without RANKUP_UID (make up sets it) train as the owner of runs/, but never as root
if [ "$(id -u)" = 0 ]; then
  uid=$(stat -c %u runs) gid=$(stat -c %g runs)
  if [ "$uid" = 0 ]; then uid=1000 gid=1000; fi
  exec setpriv --reuid "$uid" --regid "$gid" --clear-groups --no-new-privs sh "$0" "$@"
fi
RANKUP_START=$(cat runs/.start 2> /dev/null) # prepare.sh wrote this file
export RANKUP_START
exec python /app/train/main.py launch --nproc "${NPROC:-1}" "$@"
