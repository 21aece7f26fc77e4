#!/bin/sh
# Prepares runs/ for one start of the nodes: gives the folder to their user, and writes an id of this start into it.
# Run: docker compose up      (the service prepare, before the nodes and never on a restart of one)
# Edit: nothing.
uid=$1 gid=$2
# root owns a folder that the engine has just made. A folder of another user stays theirs: without a RANKUP_UID the nodes
# run as that user, with one the program refuses the folder
if [ "$(stat -c %u runs)" = 0 ]; then chown "${uid:-1000}:${gid:-1000}" runs; fi
uid=${uid:-$(stat -c %u runs)} gid=${gid:-$(stat -c %g runs)}
# A restarted container runs the same command. The id tells it what this start has begun already (--fresh begins once)
if [ "$(stat -c %u runs)" = "$uid" ] && cat /proc/sys/kernel/random/uuid > runs/.start; then
  chown "$uid:$gid" runs/.start
fi
