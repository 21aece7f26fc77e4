#!/bin/sh
# Prepares runs/ for one start of the nodes: gives the folder to their user, and writes an id of this start into it.
# Run: docker compose up      (as the service prepare: before the nodes, but not when a node restarts)
# Edit: nothing.
uid=$1 gid=$2
# If Docker has just created the folder, root owns it. Do not change the owner of another user's folder: without
# RANKUP_UID the nodes run as that user, and with another RANKUP_UID the program refuses the folder
if [ "$(stat -c %u runs)" = 0 ]; then chown "${uid:-1000}:${gid:-1000}" runs; fi
uid=${uid:-$(stat -c %u runs)} gid=${gid:-$(stat -c %g runs)}
# A restarted container repeats its command. The id shows that this start has begun already, so --fresh acts only once
if [ "$(stat -c %u runs)" = "$uid" ] && cat /proc/sys/kernel/random/uuid > runs/.start; then
  chown "$uid:$gid" runs/.start
fi
