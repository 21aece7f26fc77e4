#!/bin/sh
# Readies runs/ for the nodes of one start: gives it to their user, and names the start.
# Run: docker compose up      (the service prepare, before the nodes and never on a restart of one)
# Edit: nothing.
uid=$1 gid=$2
# Made by the engine just now, or left by root. What belongs to somebody else stays theirs: the program says so
if [ "$(stat -c %u runs)" = 0 ]; then chown "$uid:$gid" runs; fi
# A restarted container runs the same command: by this it knows what it began itself (--fresh begins once)
if [ "$(stat -c %u runs)" = "$uid" ] && cat /proc/sys/kernel/random/uuid > runs/.start; then chown "$uid:$gid" runs/.start; fi
