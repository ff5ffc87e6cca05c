#!/usr/bin/env bash
# Runs the small configuration under every strategy and prints the ladder: bytes a parameter and rank and communication
# in units of S, the size of the bf16 parameters, measured and planned; tokens/s, final loss and hash of the parameters.
#   bash scripts/ladder.sh [--steps N] [CONFIG]         default: configs/ladder.json
# Exit status 1: the strategies' parameters differ, or a run differs from its plan.
set -euo pipefail
if [[ " $* " == *" -h "* || " $* " == *" --help "* ]]; then
  sed -n '2,5s/^#//p' "$0"
  exit
fi
command -v python3 >/dev/null || { echo "python3 is needed" >&2; exit 2; }
root=$(cd "$(dirname "$0")/.." && pwd)
make -s -C "$root" -j"$(nproc)" train_gpt
exec python3 "$root/scripts/reproduce.py" ladder "$@"
