// Fuzz target: model files of llm.c, through weights.h. The input is a file.
#include "fuzz_weights.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    fuzz_weights(fuzz_file("model.bin", data, size), size);
    return 0;
}
