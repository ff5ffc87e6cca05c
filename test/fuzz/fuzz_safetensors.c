// Fuzz target: safetensors.h. The input is a file; what opens is read to its last element, and written again.
#include "fuzz_json.h"
#include "safetensors.h"

enum { PIECE = 1000 };

// Writes F32 and BF16 tensors anew; what is read back must be the same.
static void write_again(Safetensors *st) {
    const char *path = fuzz_path("again");
    SafetensorsTensor *table = (SafetensorsTensor *)calloc((size_t)st->count + 1, sizeof(SafetensorsTensor));
    SafetensorsWriter writer;
    Error error = {""};
    float piece[PIECE], again[PIECE];
    int n = 0;
    for (int i = 0; i < st->count; i++) {
        const int type = st->tensors[i].type->float_type;
        if (type == FLOAT_F32 || type == FLOAT_BF16)
            table[n++] =
                safetensors_describe(st->tensors[i].name, (FloatType)type, st->tensors[i].rank, st->tensors[i].shape);
    }
    fuzz_check(safetensors_create(&writer, path, table, n, NULL, &error));
    for (int i = 0; i < n; i++) {
        const SafetensorsTensor *tensor = safetensors_find(st, table[i].name);
        for (uint64_t first = 0; first < tensor->elements; first += PIECE) {
            const uint64_t left = tensor->elements - first, count = left < PIECE ? left : PIECE;
            fuzz_check(safetensors_read(st, tensor, first, count, piece, &error));
            fuzz_check(safetensors_write(&writer, piece, count, &error));
        }
    }
    fuzz_check(safetensors_finish(&writer, &error));
    Safetensors copy;
    fuzz_check(safetensors_open(&copy, path, &error));
    fuzz_check(copy.count == n);
    for (int i = 0; i < n; i++) {
        const SafetensorsTensor *from = safetensors_find(st, table[i].name);
        const SafetensorsTensor *to = safetensors_find(&copy, table[i].name);
        fuzz_check(to != NULL && to->elements == from->elements && to->rank == from->rank);
        for (uint64_t first = 0; first < from->elements; first += PIECE) {
            const uint64_t left = from->elements - first, count = left < PIECE ? left : PIECE;
            fuzz_check(safetensors_read(st, from, first, count, piece, &error));
            fuzz_check(safetensors_read(&copy, to, first, count, again, &error));
            fuzz_check(memcmp(piece, again, count * sizeof(float)) == 0);
        }
    }
    safetensors_close(&copy);
    free(table);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    const char *path = fuzz_file("model.safetensors", data, size);
    Safetensors st;
    Error error = {""};
    fuzz_begin(size);
    const bool ok = safetensors_open(&st, path, &error);
    fuzz_end();
    fuzz_check(ok == (error.text[0] == '\0'));
    if (!ok) return 0;
    for (int i = 0; i < st.count; i++) {
        const SafetensorsTensor *tensor = &st.tensors[i];
        float piece[PIECE];
        fuzz_check(safetensors_find(&st, tensor->name) == tensor);
        fuzz_check(tensor->first + tensor->bytes <= size);
        for (uint64_t first = 0; first < tensor->elements; first += PIECE) {
            const uint64_t left = tensor->elements - first;
            error.text[0] = '\0';
            fuzz_check(safetensors_read(&st, tensor, first, left < PIECE ? left : PIECE, piece, &error) ==
                       (tensor->type->float_type >= 0));
        }
    }
    write_again(&st);
    safetensors_close(&st);
    return 0;
}

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned seed) {
    return fuzz_mutate_json(data, size, max_size, 8, seed);
}
