# Kernels against the CPU's operations: build/DEVICE/kernels/test_kernels_PRECISION, and on the emulator the same with
# sanitizers: test_kernels_asan_PRECISION (addresses, undefined behaviour), test_kernels_tsan_PRECISION (races).
#
# A program is the device's operations (ops_table.cu, compiled as the device's code is), the CPU's (ops_table.cu, by
# gcc), and what compares them (test_kernels.c). Sanitizers see the first, and AddressSanitizer the emulator.
#
#   make DEVICE=emulator kernel_tests

KERNELS := $(BUILD)/kernels
KERNEL_TEST_FLAGS := -Itest/kernels

kernel_tests: $(PRECISIONS:%=$(KERNELS)/test_kernels_%)

$(KERNELS):
	@mkdir -p $@

define kernel_test_rules
$(KERNELS)/cpu_$(1).o: test/kernels/ops_table.cu Makefile test/kernels/rules.mk | $(KERNELS)
	$$(CPU_COMPILE) $$(DEFINE_$(1)) $$(KERNEL_TEST_FLAGS) -DOPS_TABLE=cpu_table -c -o $$@ $$<

$(KERNELS)/main_$(1).o: test/kernels/test_kernels.c Makefile test/kernels/rules.mk | $(KERNELS)
	$$(CPU_COMPILE) $$(DEFINE_$(1)) $$(KERNEL_TEST_FLAGS) -c -o $$@ $$<

$(KERNELS)/device_$(1).o: test/kernels/ops_table.cu Makefile test/kernels/rules.mk | $(KERNELS)
	$$(COMPILE) $$(DEFINE_$(1)) $$(KERNEL_TEST_FLAGS) -DOPS_TABLE=device_table -c -o $$@ $$<

$(KERNELS)/test_kernels_$(1): $(KERNELS)/device_$(1).o $(KERNELS)/cpu_$(1).o $(KERNELS)/main_$(1).o $(DEVICE_OBJECTS)
	$$(LINK) -o $$@ $$^ $$(LIBRARIES) -ldnnl -lm
endef
$(foreach p,$(PRECISIONS),$(eval $(call kernel_test_rules,$(p))))

# EMULATOR_TSAN: emulator.cpp tells ThreadSanitizer what orders threads, and is not itself instrumented.
SANITIZE_asan := -fsanitize=address,undefined -fno-sanitize-recover=undefined
SANITIZE_tsan := -fsanitize=thread
EMULATOR_asan := $(SANITIZE_asan)
EMULATOR_tsan := -DEMULATOR_TSAN

define sanitized_emulator_rule
$(KERNELS)/emulator_$(1).o: cpu/emulator.cpp Makefile test/kernels/rules.mk | $(KERNELS)
	$$(COMPILE) $$(EMULATOR_$(1)) -c -o $$@ $$<
endef
define sanitized_kernel_rules
$(KERNELS)/device_$(1)_$(2).o: test/kernels/ops_table.cu Makefile test/kernels/rules.mk | $(KERNELS)
	$$(COMPILE) -O1 $$(SANITIZE_$(1)) $$(DEFINE_$(2)) $$(KERNEL_TEST_FLAGS) -DOPS_TABLE=device_table -c -o $$@ $$<

$(KERNELS)/test_kernels_$(1)_$(2): $(KERNELS)/device_$(1)_$(2).o $(KERNELS)/cpu_$(2).o $(KERNELS)/main_$(2).o $(KERNELS)/emulator_$(1).o
	$$(LINK) $$(SANITIZE_$(1)) -o $$@ $$^ $$(LIBRARIES)
endef
ifeq ($(DEVICE),emulator)
$(foreach s,asan tsan,$(eval $(call sanitized_emulator_rule,$(s))))
$(foreach s,asan tsan,$(foreach p,$(PRECISIONS),$(eval $(call sanitized_kernel_rules,$(s),$(p)))))
endif

.PHONY: kernel_tests
-include $(wildcard $(KERNELS)/*.d)
