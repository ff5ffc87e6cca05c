# train_gpt: `make` builds ./train_gpt for this machine. DEVICE=cpu (gcc, OpenMP, oneDNN, MPI) or cuda (nvcc, cuBLASLt,
# NCCL). The trainer is compiled once per precision, each object exporting one function, and linked into one binary.

GPU_ANSWERS := $(shell nvidia-smi -L 2>/dev/null | grep -c '^GPU')
# A GPU is used when one answers and the CUDA kernels are in this tree.
DEVICE ?= $(if $(and $(filter-out 0,$(GPU_ANSWERS)),$(wildcard kernels/ops_device.h)),cuda,cpu)
BUILD := build/$(DEVICE)

PRECISIONS := fp32 bf16 bf16_gradfp32
DEFINE_fp32 := -DPRECISION_FP32
DEFINE_bf16 := -DPRECISION_BF16
DEFINE_bf16_gradfp32 := -DPRECISION_BF16_GRADFP32

# ARCH: the instruction set; native is the machine that builds. -ffp-contract=fast: ISO C would forbid fused
# multiply-add. No -ffast-math: NaN and infinity must be seen, and sums keep their written order.
ARCH ?= native
CC := gcc
WARN := -Wall -Wextra -Werror
CFLAGS ?= -O3
COMMON := -D_GNU_SOURCE -march=$(ARCH) -ffp-contract=fast -fno-math-errno -fno-trapping-math -fopenmp -g -MMD -MP
CPU_CFLAGS := -std=c11 $(WARN) $(CFLAGS) $(COMMON) -Icpu -I. $(shell pkg-config --cflags ompi-c libcjson 2>/dev/null)
CPU_LIBS := -ldnnl $(shell pkg-config --libs ompi-c libcjson 2>/dev/null || echo -lmpi -lcjson) -lm -lpthread

train_gpt: $(BUILD)/train_gpt
	@cp -f $< $@.new && mv -f $@.new $@

include Makefile.$(DEVICE)

clean:
	rm -rf build train_gpt

.PHONY: clean test bench
