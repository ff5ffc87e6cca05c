// Fuzz target: data files, dataset.h. The input is a file, once as a token shard and once as text; what opens is read
// window by window.
#include "fuzz.h"
#include "dataset.h"

enum { LENGTH = 16 };

static void read_file(const char *name, const uint8_t *data, size_t size) {
    const char *path = fuzz_file(name, data, size);
    Dataset set;
    Error error = {""};
    fuzz_begin(size);
    const bool ok = dataset_open(&set, path, &error);
    fuzz_check(ok == (error.text[0] == '\0'));
    if (ok) {
        Windows windows;
        WindowReader reader;
        windows_open(&windows, &set, LENGTH, true);
        reader_open(&reader, &windows, 50257);
        for (int64_t w = 0; w < windows.count; w++) {
            int inputs[LENGTH], targets[LENGTH];
            error.text[0] = '\0';
            if (!reader_read(&reader, w, inputs, targets, &error)) {
                fuzz_check(strstr(error.text, "but the vocabulary has") != NULL);
                continue;
            }
            for (int t = 0; t < LENGTH; t++)
                fuzz_check(inputs[t] >= 0 && inputs[t] < 50257 && targets[t] >= -1 && targets[t] < 50257);
        }
        reader_close(&reader);
        windows_close(&windows);
    }
    fuzz_end();
    if (ok) dataset_close(&set);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    read_file("data.bin", data, size);
    read_file("data.txt", data, size);
    return 0;
}
