# Fuzz targets, with clang's libFuzzer and sanitizers: `make fuzz`, or by itself `make -f test/fuzz/rules.mk fuzz`.
#
#   build/fuzz/fuzz_NAME NEW_INPUTS test/fuzz/corpus/NAME -max_total_time=600
#
# NEW_INPUTS is a folder for inputs that are found; test/fuzz/fuzz.h says what a target must keep.

FUZZ_TARGETS := $(patsubst test/fuzz/%.c,build/fuzz/%,$(wildcard test/fuzz/fuzz_*.c))

fuzz: $(FUZZ_TARGETS)

$(FUZZ_TARGETS): build/fuzz/%: test/fuzz/%.c test/fuzz/rules.mk
	@mkdir -p build/fuzz
	clang -std=c11 -D_GNU_SOURCE -O1 -g -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=undefined -MMD -MP \
	  -Wall -Wextra -Werror -Itest/fuzz -Icpu -I. -o $@ $< -lcjson -lm

.PHONY: fuzz

-include $(wildcard build/fuzz/*.d)
