#!/bin/sh
# The C++ compiler for Horovod's build: its CMake files ask for C++14 and 60 MB of debugging symbols; torch's headers need C++20.
# Run: nothing, docker/horovod.sh names it in CXX; so not a line of Horovod is patched.
# Edit: nothing; RANKUP_CXX names another compiler than g++.
for word do
  shift
  case $word in
    -std=*) word=-std=gnu++20 ;;
    -g) continue ;;
  esac
  set -- "$@" "$word"
done
exec "${RANKUP_CXX:-g++}" "$@"
