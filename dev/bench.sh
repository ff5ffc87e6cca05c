#!/usr/bin/env bash
# Times the program beside PyTorch on this machine's cores, against what the cores could do at best.
#   bash dev/bench.sh [SETTING...] [--precision fp32|bf16] [--rounds 5]    the comparison: about 40 minutes for all
#   bash dev/bench.sh [SETTING...] --profile                               where a step's time goes, by operation
#   bash dev/bench.sh --ranks                                              two ranks against one; all-reduce
#   bash dev/bench.sh --write [SETTING...]     all of it, into README.md; or these, with what was measured before
# SETTING: gpt2-t64, gpt2-t256, gpt2-t1024, small. PyTorch is Debian's, with malloc tuned and OpenBLAS with OpenMP; as
# installed it is up to five times slower. The machine should have nothing else to do.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/install.sh build reference libopenblas0-openmp
make -s -j"$(nproc)" DEVICE=cpu train_gpt op_times build/cpu/bench_rates build/cpu/bench_comm
exec /usr/bin/python3 dev/bench_cpu.py "$@"
