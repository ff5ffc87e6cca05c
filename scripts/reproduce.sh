#!/usr/bin/env bash
# Lays what configurations publish (bytes a rank, collectives in a step, throughput) beside what this program takes and
# sends: runs the cases that ask for it and fit this machine, plans the rest. configs/README.md explains the cases.
#   bash scripts/reproduce.sh [--plan-only] [--steps N] [CONFIG...]      default: all of configs/
# Exit status 1: bytes or collectives differ, each is named. Throughput is printed as a ratio and not judged.
set -euo pipefail
if [[ " $* " == *" -h "* || " $* " == *" --help "* ]]; then
  sed -n '2,5s/^#//p' "$0"
  exit
fi
command -v python3 >/dev/null || { echo "python3 is needed" >&2; exit 2; }
root=$(cd "$(dirname "$0")/.." && pwd)
make -s -C "$root" -j"$(nproc)" train_gpt
exec python3 "$root/scripts/reproduce.py" reproduce "$@"
