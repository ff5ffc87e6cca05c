// Fuzz target: hellaswag.h. The input is a file; what opens is read example by example.
#include "fuzz.h"
#include "hellaswag.h"

enum { T = 64 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    const char *path = fuzz_file("hellaswag.bin", data, size);
    Hellaswag h;
    Error error = {""};
    fuzz_begin(size);
    const bool ok = hellaswag_open(&h, path, T, 50257, &error);
    fuzz_check(ok == (error.text[0] == '\0'));
    for (int i = ok ? h.count - 1 : -1; i >= 0; i--) {
        int inputs[4 * T], targets[4 * T], label = -1;
        fuzz_check(hellaswag_read(&h, i, inputs, targets, &label, &error));
        fuzz_check(label >= 0 && label < 4);
        for (int t = 0; t < 4 * T; t++)
            fuzz_check(inputs[t] >= 0 && inputs[t] < 50257 && targets[t] >= -1 && targets[t] < 50257);
    }
    fuzz_end();
    if (ok) hellaswag_close(&h);
    return 0;
}
