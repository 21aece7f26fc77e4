#!/usr/bin/env bash
# Removes from a virtual environment what no training loads, 0.94 of 5.95 GB: tests, debug information, second copies.
# Run: docker/slim.sh /opt/venv      (the Dockerfile does, in pip's layer: what a later layer removes still counts)
# Edit: nothing.
set -euo pipefail
# A torch without CUDA has few of these files, so a pattern that finds nothing is no mistake
shopt -s nullglob
site=$(echo "$1"/lib/python3*/site-packages)
[[ -d $site ]] || { echo "slim: $1 is not a virtual environment" >&2; exit 2; }
before=$(du -sm "$site" | cut -f1)

# For linkers: nothing is linked against them here, and --compile links against shared libraries
find "$site" -name '*.a' -delete
# Tests of numpy, sympy, networkx and others. Nothing imports them but test runners
find "$site" -type d -name tests -not -path '*.dist-info/*' -prune -exec rm -r {} +
# For Proton, the profiler for authors of Triton kernels. PyTorch's profiler has its own CUPTI, of nvidia-cuda-cupti
rm -rf "$site"/triton/backends/nvidia/lib/cupti*
# Plugins with which Triton tests its own interface for plugins
rm -rf "$site"/triton/{plugins,instrumentation}/*.so*
# No library and no module of these packages names them: the solver for several GPUs, and a second build of NVRTC
rm -f "$site"/nvidia/cu*/lib/{libcusolverMg,libnvrtc.alt,libnvrtc-builtins.alt}.so*
# The compiler of protocol buffers; the message classes are in the wheels
rm -f "$site"/torch/bin/protoc*

# Bytecode of what no command imports: torch's helpers of its own tests, and the languages that rich could colour
find "$site" -type d -name __pycache__ \( -path "$site/torch/testing/_internal/*" -o -path "$site/pygments/*" \) -prune -exec rm -r {} +

# Debug information and symbol tables, which are for debuggers. A library is replaced only if everything that a process
# maps of it stays the same, byte by byte, so no GPU is needed to try it. The ELF header's 64 bytes may differ: they say
# where the tables are. torch's own libraries are not in this list, for strip would move parts of them.
for file in "$site"/triton/_C/lib{triton,proton}.so* "$site"/nvidia/nccl/lib/libnccl.so*; do
  strip --strip-unneeded -o "$file.new" "$file"
  end=$(readelf -lW "$file" | awk '$1 == "LOAD" {end = $2 "+" $5} END {print end}')
  if cmp --quiet --ignore-initial=64 --bytes=$((end - 64)) "$file" "$file.new"; then
    chmod --reference="$file" "$file.new"
    mv "$file.new" "$file"
  else
    echo "slim: $file keeps its symbols: without them it would be loaded in another way"
    rm "$file.new"
  fi
done
echo "slim: $before MB before, $(du -sm "$site" | cut -f1) MB after"
