#!/bin/sh
# The C++ compiler for Horovod's build: Horovod asks for C++14 and 60 MB of debugging symbols, torch's headers for C++20.
# Run: nothing, docker/horovod.sh passes it as CXX. So the build needs no patch of Horovod.
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
