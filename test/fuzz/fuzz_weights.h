// fuzz_weights.h: reads whatever weights_open() accepts to its last element.
#ifndef FUZZ_WEIGHTS_H
#define FUZZ_WEIGHTS_H

#include "fuzz.h"
#include "weights.h"

static inline void fuzz_weights(const char *path, size_t size) {
    Weights weights;
    Error error = {""};
    float piece[1000];
    fuzz_begin(size);
    const bool ok = weights_open(&weights, path, &error);
    fuzz_check(ok == (error.text[0] == '\0'));
    for (int id = 0; ok && id < weights_tensors(&weights.shape); id++) {
        const size_t elements = weights_elements(weights_tensor(&weights.layout, id));
        for (size_t first = 0, n; first < elements; first += n) {
            n = elements - first < 1000 ? elements - first : 1000;
            fuzz_check(weights_read(&weights, id, first, n, piece, &error));
        }
        fuzz_check(weights_read(&weights, id, elements / 2,
                                elements - elements / 2 < 1000 ? elements - elements / 2 : 1000, piece, &error));
    }
    fuzz_end();
    if (ok) weights_close(&weights);
}

#endif
