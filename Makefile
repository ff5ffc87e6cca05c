# train_gpt: `make` builds ./train_gpt for this machine.
#
#   make                    the program, for DEVICE=cpu (gcc, OpenMP, oneDNN, MPI), cuda (nvcc, cuBLASLt, NCCL), or
#                           emulator (the CUDA program on the CPU, slowly: for tests)
#   make test               build and run all tests (scripts/test.sh installs what they need first)
#   make unit               build the unit tests into build/DEVICE/test/
#   make delayed            build/DEVICE/delayed/train_gpt, for tests: streams pause at random (cpu/stream.h)
#   make op_times           build/DEVICE/op_times/train_gpt, for dev/bench.sh: operations are timed (dev/op_times.h)
#   make bench              time the program
#   make clean
#
# DEVICE=cuda: CUDA_ARCHS="80 90" or native; NCCL=0 and MPI=0 build without; see below.
#
# The trainer, train_gpt.cu, is compiled once per precision, each object exporting one function, and once more for main.

GPU_ANSWERS := $(filter-out 0,$(shell nvidia-smi -L 2>/dev/null | grep -c '^GPU'))
# A GPU is used where one answers and this tree has the CUDA kernels.
DEVICE ?= $(if $(and $(GPU_ANSWERS),$(wildcard kernels/*.cuh)),cuda,cpu)
BUILD := build/$(DEVICE)

PRECISIONS := fp32 bf16 bf16_gradfp32
DEFINE_fp32 := -DPRECISION_FP32
DEFINE_bf16 := -DPRECISION_BF16
DEFINE_bf16_gradfp32 := -DPRECISION_BF16_GRADFP32

WARNINGS := -Wall -Wextra -Werror
# ARCH: the instruction set; native is that of the machine that builds.
ARCH ?= native
OPTIMIZE ?= -O3
# -ffp-contract=fast: ISO C alone would forbid fused multiply-add. No -ffast-math: NaN and infinity must be seen, and
# sums keep the order in which they are written.
CFLAGS_ALL := -D_GNU_SOURCE $(OPTIMIZE) -march=$(ARCH) -ffp-contract=fast -fno-math-errno -fno-trapping-math -fopenmp \
              -g -MMD -MP $(WARNINGS)

MPI_FLAGS := $(shell pkg-config --cflags ompi-c libcjson 2>/dev/null)
MPI_LIBRARIES := $(shell pkg-config --libs ompi-c libcjson 2>/dev/null || echo -lmpi -lcjson)

CPU_COMPILE = gcc -x c -std=c11 $(CFLAGS_ALL) -Icpu -I. $(MPI_FLAGS)
CPU_LIBRARIES := -ldnnl $(MPI_LIBRARIES) -lm -lpthread

ifeq ($(DEVICE),cpu)
COMPILE = $(CPU_COMPILE)
LINK = gcc -fopenmp
LIBRARIES := $(CPU_LIBRARIES)
else ifeq ($(DEVICE),emulator)
# The GPU program's source, kernels included, for the CPU (cpu/emulator.h). SANITIZE: address, undefined, thread.
# Type punning through vectors is CUDA's habit, hence -fno-strict-aliasing. Denormals and sums must come out as written.
# -ftls-model=local-exec: shared memory is thread-local, and all of it is the executable's; some linkers fail at the
# general form.
EMULATOR_FLAGS := -D_GNU_SOURCE -DTRAIN_GPT_EMULATOR -std=c++17 -march=$(ARCH) -ffp-contract=fast -fno-math-errno \
                  -fno-strict-aliasing -ftls-model=local-exec -fopenmp -g -MMD -MP $(WARNINGS) -Wno-unknown-pragmas -Ikernels -Icpu -I. \
                  $(MPI_FLAGS)
COMPILE = g++ -x c++ -O2 $(EMULATOR_FLAGS)
LINK = g++ -fopenmp
LIBRARIES := $(CPU_LIBRARIES)
DEVICE_OBJECTS := $(BUILD)/emulator.o
else ifeq ($(DEVICE),cuda)
NVCC ?= $(firstword $(shell command -v nvcc) /usr/local/cuda/bin/nvcc)
ifeq ($(shell command -v $(NVCC)),)
$(error DEVICE=cuda needs nvcc of the CUDA toolkit; $(NVCC) is not there. DEVICE=cpu needs none)
endif
# CUDA_ARCHS: compute capabilities to compile for; the last also as PTX, for GPUs to come. native: this machine's.
CUDA_ARCHS ?= 80 90 100
ifeq ($(CUDA_ARCHS),native)
GENCODE := -arch=native
else
GENCODE := $(foreach a,$(CUDA_ARCHS),-gencode arch=compute_$(a),code=sm_$(a)) \
           -gencode arch=compute_$(lastword $(CUDA_ARCHS)),code=compute_$(lastword $(CUDA_ARCHS))
endif
# NCCL, MPI: 1 or 0; what is not given is found out by linking a program, once. Several ranks need NCCL; where mpirun
# starts them they meet through MPI.
ifeq ($(filter clean,$(MAKECMDGOALS)),)
include $(BUILD)/libraries.mk
endif
COMMA := ,
# Of pkg-config's answer nvcc understands folders and libraries.
CUDA_INCLUDES := $(filter -I%,$(MPI_FLAGS)) -Ikernels/cuda -Ikernels -I.
CUDA_LIBRARIES := -lcublasLt $(filter -L% -l%,$(MPI_LIBRARIES)) -lpthread
ifeq ($(NCCL),1)
CUDA_LIBRARIES += -lnccl
else
CUDA_INCLUDES := -Ikernels/cuda/without_nccl $(CUDA_INCLUDES)
endif
CUDA_MPI := $(if $(filter 11,$(NCCL)$(MPI)),1,0)
ifeq ($(CUDA_MPI),0)
CUDA_LIBRARIES := $(filter-out -lmpi,$(CUDA_LIBRARIES))
endif
# No -lineinfo: with it several kernels spill registers.
COMPILE = $(NVCC) -x cu -std=c++17 $(GENCODE) $(OPTIMIZE) -D_GNU_SOURCE -DTRAIN_GPT_MPI=$(CUDA_MPI) -MMD -MP \
          $(CUDA_INCLUDES) \
          -Werror all-warnings -Xcompiler -Wall,-Wextra,-Werror,-fopenmp,-fno-strict-aliasing
# What ptxas reports of the kernels is checked before their object counts as made.
CHECKED = -Xptxas -v 2> $@.ptxas || { grep -v '^ptxas info\|bytes stack frame' $@.ptxas >&2; exit 1; } && \
          bash scripts/check_ptxas.sh $@.ptxas
CUDA_FOLDER := $(realpath $(dir $(realpath $(shell command -v $(NVCC))))/../lib64)
LINK = $(NVCC) $(GENCODE) -Xcompiler -fopenmp $(if $(CUDA_FOLDER),-Xlinker -rpath$(COMMA)$(CUDA_FOLDER))
LIBRARIES := $(CUDA_LIBRARIES)
else
$(error DEVICE=$(DEVICE) is not one of: cpu cuda emulator)
endif

MAKEFLAGS += --no-builtin-rules
OBJECTS := $(BUILD)/main.o $(PRECISIONS:%=$(BUILD)/train_%.o)

ifeq ($(DEVICE),emulator)
train_gpt: $(BUILD)/train_gpt
	@echo "$(BUILD)/train_gpt is the CUDA program, emulated"
else
train_gpt: $(BUILD)/train_gpt
	@cp -f $< $@.new && mv -f $@.new $@
endif

$(BUILD)/train_gpt: $(OBJECTS) $(DEVICE_OBJECTS)
	$(LINK) -o $@ $^ $(LIBRARIES)

$(BUILD)/main.o: train_gpt.cu Makefile | $(BUILD)/test
	$(COMPILE) -c -o $@ $<

$(PRECISIONS:%=$(BUILD)/train_%.o): $(BUILD)/train_%.o: train_gpt.cu Makefile | $(BUILD)/test
	$(COMPILE) $(DEFINE_$*) -c -o $@ $< $(CHECKED)

ifeq ($(DEVICE),cuda)
# Other options make other objects.
$(OBJECTS): $(BUILD)/command
$(BUILD)/command: FORCE | $(BUILD)/test
	@echo '$(subst ','\'',$(COMPILE))' | cmp -s - $@ || echo '$(subst ','\'',$(COMPILE))' > $@

$(BUILD)/libraries.mk: | $(BUILD)/test
	@printf '#include <nccl.h>\nint main() { void *p; return ncclMemAlloc(&p, 1) + ncclCommSplit(0, 0, 0, 0, 0); }\n' \
	  > $(BUILD)/probe_NCCL.cu
	@printf '#include <mpi.h>\nint main() { return MPI_Init(0, 0); }\n' > $(BUILD)/probe_MPI.cu
	@for library in NCCL MPI; do \
	  $(NVCC) -o $(BUILD)/probe $(BUILD)/probe_$$library.cu $(filter -I%,$(MPI_FLAGS)) -DOMPI_SKIP_MPICXX \
	    $$([ $$library = NCCL ] && echo -lnccl || echo $(filter -L% -l%,$(MPI_LIBRARIES))) >/dev/null 2>&1 && \
	    found=1 || found=0; \
	  echo "$$library ?= $$found"; \
	done > $@.new && mv $@.new $@
	@echo "found (1) or not (0): $$(tr '\n' ' ' < $@)(NCCL from version 2.19 on; rm $@ looks again)"
endif

$(BUILD)/emulator.o: cpu/emulator.cpp Makefile | $(BUILD)/test
	$(COMPILE) -c -o $@ $<

$(BUILD)/test:
	@mkdir -p $@

# The operations' floors and times, in bf16 (DEVICE=emulator and cuda); what ranks exchange in a second.
BENCHES := $(BUILD)/bench_kernels $(BUILD)/bench_comm
$(BENCHES): $(BUILD)/%: dev/%.cu $(DEVICE_OBJECTS) Makefile | $(BUILD)/test
	$(COMPILE) $(DEFINE_bf16) -MT $@ -c -o $@.o $<
	$(LINK) -o $@ $@.o $(DEVICE_OBJECTS) $(LIBRARIES)

# For dev/bench.sh: the rates that the cores reach; the program with every operation timed (dev/op_times.h).
$(BUILD)/bench_rates: dev/bench_rates.c Makefile | $(BUILD)/test
	$(COMPILE) -o $@ $< -ldnnl -lm

OP_TIMES := $(PRECISIONS:%=$(BUILD)/op_times/train_%.o)

op_times: $(BUILD)/op_times/train_gpt

$(BUILD)/op_times/train_gpt: $(BUILD)/main.o $(OP_TIMES)
	$(LINK) -o $@ $^ $(LIBRARIES)

$(OP_TIMES): $(BUILD)/op_times/train_%.o: train_gpt.cu Makefile | $(BUILD)/op_times
	$(COMPILE) $(DEFINE_$*) -include dev/op_times.h -c -o $@ $<

$(BUILD)/op_times:
	@mkdir -p $@

# For tests: the program with streams that pause at random, from the seed in TRAIN_GPT_STREAM_DELAY.
DELAYED := $(PRECISIONS:%=$(BUILD)/delayed/train_%.o)

delayed: $(BUILD)/delayed/train_gpt

$(BUILD)/delayed/train_gpt: $(BUILD)/main.o $(DELAYED)
	$(LINK) -o $@ $^ $(LIBRARIES)

$(DELAYED): $(BUILD)/delayed/train_%.o: train_gpt.cu Makefile | $(BUILD)/delayed
	$(COMPILE) $(DEFINE_$*) -DTRAIN_GPT_STREAM_DELAY -c -o $@ $<

$(BUILD)/delayed:
	@mkdir -p $@

# Unit tests, with cmocka. test/unit/test_NAME.c is built once; those in PER_PRECISION once for each precision.
PER_PRECISION := $(wildcard test/unit/test_ops*.c test/unit/test_gpt*.c test/unit/test_golden*.c)
ONCE := $(filter-out $(PER_PRECISION),$(wildcard test/unit/test_*.c))
UNIT_TESTS := $(ONCE:test/unit/%.c=$(BUILD)/test/%) \
              $(foreach p,$(PRECISIONS),$(PER_PRECISION:test/unit/%.c=$(BUILD)/test/%_$(p)))

# TEST_DIR: where tests find their files, from whatever directory they are run.
UNIT_FLAGS := -Itest/unit -DTEST_DIR='"$(CURDIR)/test"'

unit: $(UNIT_TESTS)

define per_precision_rule
$(BUILD)/test/%_$(1): test/unit/%.c Makefile | $(BUILD)/test
	$$(COMPILE) $$(DEFINE_$(1)) $$(UNIT_FLAGS) -o $$@ $$< -lcmocka $$(LIBRARIES)
endef
$(foreach p,$(PRECISIONS),$(eval $(call per_precision_rule,$(p))))

$(BUILD)/test/%: test/unit/%.c Makefile | $(BUILD)/test
	$(COMPILE) $(UNIT_FLAGS) -o $@ $< -lcmocka $(LIBRARIES)

# Kernels against the CPU's operations: DEVICE=emulator and cuda.
include $(wildcard test/kernels/rules.mk)

# Readers of foreign files, under libFuzzer: make fuzz.
include $(wildcard test/fuzz/rules.mk)

test:
	bash scripts/test.sh

bench:
	bash dev/bench.sh

clean:
	rm -rf build train_gpt

.PHONY: delayed op_times unit test bench clean FORCE
.DELETE_ON_ERROR:
-include $(wildcard $(BUILD)/*.d $(BUILD)/delayed/*.d $(BUILD)/op_times/*.d $(BUILD)/test/*.d)
