#!/usr/bin/env bash
# Times the program on one rank with all cores: tokens/s, from the median step, on random tokens.
#   bash dev/bench.sh [STEPS]       default: 6 steps each, a few minutes
set -euo pipefail
cd "$(dirname "$0")/.."
steps=${1:-6}
make -s -j"$(nproc)" train_gpt
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
/usr/bin/python3 - "$work" <<'PYTHON'
import random, struct, sys
draw, count = random.Random(1), 200000
for name, vocabulary in (("gpt2", 50257), ("small", 512)):
    with open(f"{sys.argv[1]}/{name}.bin", "wb") as file:
        file.write(struct.pack("<256i", 20240520, 1, count, *([0] * 253)))
        file.write(struct.pack(f"<{count}H", *(draw.randrange(vocabulary) for _ in range(count))))
PYTHON
bench() { # name, data, flags
  local name=$1 data=$2 precision
  shift 2
  for precision in fp32 bf16; do
    ./train_gpt --train-data "$work/$data.bin" --precision "$precision" --steps "$steps" --log-dir "$work/log" "$@" >/dev/null
    /usr/bin/python3 - "$name" "$precision" "$work/log/summary.json" <<'PYTHON'
import json, sys
run = json.load(open(sys.argv[3]))
print(f"{sys.argv[1]:32s} {sys.argv[2]}  {run['tokens_per_second']:10.0f} tokens/s  {run['step_ms']['median']:9.1f} ms a step  "
      f"{run['memory_bytes']['peak'] / 1e9:6.2f} GB")
PYTHON
  done
}
bench "GPT-2 124M, B 4, T 64" gpt2 --preset gpt2-124M --micro-batch 4 --sequence-length 64
bench "GPT-2 124M, B 4, T 256" gpt2 --preset gpt2-124M --micro-batch 4 --sequence-length 256
bench "GPT-2 124M, B 4, T 1024" gpt2 --preset gpt2-124M --micro-batch 4 --sequence-length 1024
bench "6 layers, 384 wide, B 8, T 256" small --n-layer 6 --n-head 6 --n-embd 384 --context-length 256 --vocab-size 512 --micro-batch 8
