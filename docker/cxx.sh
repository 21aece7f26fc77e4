#!/bin/sh
# The C++ compiler for Horovod's build, which asks for C++14 and 60 MB of debug symbols. torch's headers need C++20.
# Run: nothing. docker/horovod.sh sets CXX to this file, so that Horovod needs no patch.
# Edit: nothing. RANKUP_CXX sets a compiler other than g++.
for word do
  shift
  case $word in
    -std=*) word=-std=gnu++20 ;;
    -g) continue ;;
  esac
  set -- "$@" "$word"
done
exec "${RANKUP_CXX:-g++}" "$@"
