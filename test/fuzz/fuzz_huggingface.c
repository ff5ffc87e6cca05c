// Fuzz target: Hugging Face directories, through weights.h. The input: two bytes, the length of config.json; that file;
// the rest is model.safetensors, and, if the length is odd, its index too.
#include "fuzz_json.h"
#include "fuzz_weights.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size < 2) return 0;
    const size_t length = data[0] | (size_t)data[1] << 8, rest = size - 2;
    if (length > rest) return 0;
    const char *single = fuzz_path("model.safetensors"), *index = fuzz_path("model.safetensors.index.json");
    unlink(single);
    unlink(index);
    fuzz_file("config.json", data + 2, length);
    fuzz_file(length % 2 == 0 ? "model.safetensors" : "model.safetensors.index.json", data + 2 + length, rest - length);
    fuzz_file("shard.safetensors", data + 2 + length, rest - length);
    fuzz_weights(fuzz_folder, size);
    return 0;
}

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned seed) {
    return fuzz_mutate_json(data, size, max_size, 2, seed);
}
