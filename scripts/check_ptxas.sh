#!/usr/bin/env bash
# Holds kernels to limits by what ptxas reports of them, and prints one line about all.
#   bash scripts/check_ptxas.sh REPORT...      each what nvcc -Xptxas -v has written to stderr
# A spilled register is a way through memory that the source does not show. A kernel with more than 48 KB of static
# shared memory does not start. Exit code 1 and the kernel's name where a limit is passed; 1 too if none is reported.
set -euo pipefail

result=$(awk '
  /Compiling entry function/ {
    split($0, part, "\047") # single quotes
    kernel = part[2]
    arch = part[4]
    kernels++
    archs[arch] = 1
  }
  /Function properties for/ { function_name = $NF } # of the kernel, or of what it calls
  / bytes spill stores/ {
    for (i = 1; i < NF; i++) {
      if ($i == "spill" && $(i - 2) > 0) { sub(/^ +/, ""); print "FAIL " arch " " function_name " spills registers: " $0; break }
      if ($i == "stack" && $(i - 2) > 0) frames++
    }
  }
  / Used [0-9]+ registers/ {
    for (i = 1; i < NF; i++) {
      if ($i == "Used" && $(i + 1) + 0 > registers) { registers = $(i + 1) + 0; widest = kernel }
      if ($i == "bytes" && $(i + 1) ~ /^smem/) {
        bytes = $(i - 1) + 0
        if (bytes > shared) shared = bytes
        if (bytes > 49152) print "FAIL " arch " " kernel " has " bytes " bytes of static shared memory, at most 49152 can be"
      }
    }
  }
  END {
    for (name in archs) count++
    print "LINE " (count > 0 ? kernels / count : 0) " kernels for " count + 0 " architectures: at most " registers + 0 " registers (" widest "), " \
      shared + 0 " bytes of static shared memory; " frames + 0 " with a stack frame"
  }
' "$@" | { c++filt -p 2>/dev/null || cat; })

case $result in
  *"LINE 0 kernels "*) echo "check_ptxas: no kernel is reported in $*" >&2; exit 1 ;;
  *FAIL*) printf '%s\n' "$result" | sed -n 's/^FAIL /check_ptxas: /p' >&2; exit 1 ;;
  *) printf '%s\n' "$result" | sed -n 's/^LINE //p' ;;
esac
