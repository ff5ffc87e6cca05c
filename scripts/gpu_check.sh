#!/usr/bin/env bash
# For whoever has a GPU: builds, checks every operation against the CPU's, trains, measures, and prints one table. Under
# five minutes on one GPU.
#   bash scripts/gpu_check.sh [--arch 90]      default: the architecture of this machine's GPU
# Exit status: 0 all is well, 1 something failed, 3 it cannot run here, and says why.
set -uo pipefail
cd "$(dirname "$0")/.."

cannot() {
  echo "gpu_check: not run: $*"
  exit 3
}
arch=native
while [ $# -gt 0 ]; do
  case $1 in
    --arch) [ $# -gt 1 ] || cannot "--arch needs a value"; arch=$2; shift 2 ;;
    *) cannot "there is no option $1" ;;
  esac
done
command -v nvidia-smi >/dev/null || cannot "there is no nvidia-smi: no NVIDIA driver is installed"
gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU') || cannot "no GPU answers to nvidia-smi"
nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
[ -x "$nvcc" ] || cannot "there is no nvcc: the CUDA toolkit is needed"
command -v make >/dev/null || cannot "there is no make"
command -v python3 >/dev/null || cannot "there is no python3"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
table=$work/table
failed=0
begin=$SECONDS

# A line of the table: what, outcome, detail.
line() {
  printf '%-34s %-7s %s\n' "$1" "$2" "$3" | tee -a "$table"
  [ "$2" != FAIL ] || failed=1
}
# Runs a command; its output goes to a file whose end is shown if it fails.
try() {
  local log=$1
  shift
  "$@" >"$log" 2>&1 && return 0
  tail -n 15 "$log" | sed 's/^/    /'
  return 1
}
json() { python3 -c 'import json, sys; print(eval(sys.argv[2], {}, {"run": json.load(open(sys.argv[1]))}))' "$1" "$2"; }

nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.max.sm,power.limit --format=csv,noheader | sort | uniq -c
"$nvcc" --version | grep release

# The CPU's operations are the reference; without their libraries this part is left out, and said.
cpu_libraries() {
  echo '#include <dnnl.h>
int main(void) { return dnnl_version() == 0; }' >"$work/probe.c"
  gcc "$work/probe.c" -o "$work/probe" -ldnnl 2>/dev/null
}
targets=(train_gpt build/cuda/bench_kernels build/cuda/bench_comm)
if cpu_libraries; then
  targets+=(kernel_tests)
  reference=yes
else
  reference=no
fi
if try "$work/build.log" make -j"$(nproc)" DEVICE=cuda CUDA_ARCHS="$arch" "${targets[@]}"; then
  line "build for $arch" ok "$((SECONDS - begin)) s"
else
  line "build for $arch" FAIL "make DEVICE=cuda"
  exit 1
fi

if [ "$reference" = yes ]; then
  for precision in fp32 bf16 bf16_gradfp32; do
    log=$work/kernels_$precision.log
    if try "$log" timeout 120 "build/cuda/kernels/test_kernels_$precision" --set quick --seed "$RANDOM"; then
      line "operations against the CPU, $precision" ok "$(tail -n 1 "$log")"
    else
      line "operations against the CPU, $precision" FAIL "$(tail -n 1 "$log")"
    fi
  done
else
  line "operations against the CPU" skipped "oneDNN is not installed (libdnnl-dev)"
fi

# A small model on text, under every strategy's numbers on one GPU: the same bits.
python3 - "$work" <<'PYTHON'
import array, random, sys
draw = random.Random(7)
words = ["".join(draw.choice("aeiou") + draw.choice("bdklmnrst") for _ in range(draw.randint(1, 4))) for _ in range(500)]
weights = [1 / (rank + 1) for rank in range(len(words))]
for name, sentences in (("train.txt", 20000), ("val.txt", 1000)):
    with open(f"{sys.argv[1]}/{name}", "w") as file:
        for _ in range(sentences):
            file.write(" ".join(draw.choices(words, weights, k=draw.randint(4, 12))) + ".\n")
with open(f"{sys.argv[1]}/tokens.bin", "wb") as file:
    count = 1 << 22
    array.array("i", [20240520, 1, count] + [0] * 253).tofile(file)
    array.array("H", draw.choices(range(50257), k=count)).tofile(file)
PYTHON
text=(--train-data "$work/train.txt" --val-data "$work/val.txt")
if [ -f data/tinyshakespeare/train.txt ]; then # as dev/data/README.md prepares it
  text=(--train-data data/tinyshakespeare/train.txt --val-data data/tinyshakespeare/val.txt)
fi
small() { # name, flags
  local name=$1
  shift
  if try "$work/$name.log" ./train_gpt configs/tiny_shakespeare.json "${text[@]}" --log-dir "$work/$name" "$@"; then
    line "small model, $name" ok "validation loss $(json "$work/$name/summary.json" 'run["final_val_loss"]'), $(json "$work/$name/summary.json" 'round(run["tokens_per_second"])') tokens/s"
  else
    line "small model, $name" FAIL "$(tail -n 1 "$work/$name.log")"
  fi
}
small bf16 --precision bf16
small fp32 --precision fp32
small again --precision bf16
if [ -f "$work/bf16/summary.json" ] && [ -f "$work/again/summary.json" ]; then
  if [ "$(json "$work/bf16/summary.json" 'run["params_hash"]')" = "$(json "$work/again/summary.json" 'run["params_hash"]')" ]; then
    line "two runs, the same bits" ok "$(json "$work/bf16/summary.json" 'run["params_hash"]')"
  else
    line "two runs, the same bits" FAIL "parameters differ"
  fi
fi

# GPT-2 124M, as large a micro-batch as fits.
free=$(nvidia-smi --query-gpu=memory.free --format=csv,noheader,nounits | sort -n | head -n 1)
batch=4
[ "$free" -gt 16000 ] && batch=16
[ "$free" -gt 36000 ] && batch=64
for tune in false true; do
  log=$work/gpt2_$tune
  if try "$log.log" ./train_gpt --preset gpt2-124M --train-data "$work/tokens.bin" --val-every 0 --micro-batch $batch \
    --precision bf16 --steps 20 --matmul-tune $tune --log-dir "$log"; then
    line "GPT-2 124M, B $batch, tuned $tune" ok "$(json "$log/summary.json" '"%.0f tokens/s, %.2f ms a step, MFU %s" % (run["tokens_per_second"], run["step_ms"]["median"], "unknown" if run["mfu"] is None else "%.1f %%" % (100 * run["mfu"]))')"
  else
    line "GPT-2 124M, B $batch, tuned $tune" FAIL "$(tail -n 1 "$log.log")"
  fi
done
if python3 -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null; then
  if try "$work/torch.log" timeout 150 python3 dev/bench_torch.py --micro-batch $batch; then
    line "the same in PyTorch" ok "$(tail -n 1 "$work/torch.log")"
  else
    line "the same in PyTorch" FAIL "$(tail -n 1 "$work/torch.log")"
  fi
else
  line "the same in PyTorch" skipped "python3 has no torch with CUDA"
fi

if [ "$gpus" -gt 1 ]; then
  ranks=$((gpus < 8 ? gpus : 8))
  if try "$work/ladder.log" bash scripts/ladder.sh; then
    line "every strategy, the same bits" ok "$ranks GPUs"
  else
    line "every strategy, the same bits" FAIL "scripts/ladder.sh"
  fi
  if try "$work/network.log" build/cuda/bench_comm --nproc $ranks; then
    line "NCCL" ok "$(tail -n 1 "$work/network.log")"
  else
    line "NCCL" FAIL "$(tail -n 1 "$work/network.log")"
  fi
fi

echo
echo "each operation of GPT-2 124M, B $batch, T 1024, beside its floor on this GPU:"
build/cuda/bench_kernels --preset 124M --micro-batch $batch || line "operations, timed" FAIL bench_kernels
echo
cat "$table"
echo "$((SECONDS - begin)) s in all"
exit $failed
