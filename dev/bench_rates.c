// bench_rates.c: what this machine's cores can do at best with the products of a model's linear layers, and with
// memory.
//
//   bench_rates PRECISION ROWS C LAYERS VP         PRECISION: fp32 or bf16
//   bench_rates bandwidth                          only that of memory, which takes a moment
//
// Every product of a step (forward, gradient of the input, gradient of the weights; of each layer, and of the head) is
// timed alone, on matrices that lie as in the program: bf16 by oneDNN's primitive, fp32 by that and by its BLAS
// interface, of which the faster counts; medians of REPEATS. Prints one line of JSON: milliseconds of all of a step's
// products, their rate in operations a second, and the bandwidth of x += 2 y in bytes a second.
#include <malloc.h>
#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/mman.h>
#include <time.h>
#include "onednn.h"

enum { REPEATS = 5, MOST_ROWS = 1024 }; // more rows take as much longer as they are more

typedef struct {
    OneDnn onednn;
    dnnl_data_type_t type;
    void *x, *w, *y;
} Rates;

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static int compare(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

// Seconds of a layer's three products.
static double layer(Rates *rates, int rows, int C, int OC) {
    double total = 0, times[REPEATS];
    for (int kind = PRODUCT_FORWARD; kind <= PRODUCT_BACKWARD_WEIGHT; kind++) {
        double best = INFINITY;
        for (int blas = 0; blas <= (rates->type == dnnl_f32); blas++) {
            for (int i = -1; i < REPEATS; i++) {
                const double begin = now();
                if (blas)
                    onednn_sgemm((ProductKind)kind, rates->x, rates->w, rates->y, (size_t)rows, C, OC, 0);
                else
                    onednn_product(&rates->onednn, (ProductKind)kind, rates->type, dnnl_f32, dnnl_data_type_undef,
                                   rates->x, rates->w, rates->y, NULL, (size_t)rows, C, OC);
                if (i >= 0) times[i] = now() - begin;
            }
            qsort(times, REPEATS, sizeof times[0], compare);
            best = fmin(best, times[REPEATS / 2]);
        }
        total += best;
    }
    return total;
}

// A matrix of small numbers, all alike to bf16 and fp32: 0x3c3c3c3c is 0.0115.
static void *matrix(size_t elements) {
    const size_t page = 2 << 20, bytes = (elements * sizeof(float) + page - 1) / page * page;
    void *pointer = aligned_alloc(page, bytes);
    if (pointer == NULL) die("no room for %zu bytes", bytes);
    madvise(pointer, bytes, MADV_HUGEPAGE);
    memset(pointer, 0x3c, bytes);
    return pointer;
}

static double bandwidth(void) {
    const size_t n = 32 << 20;
    float *x = (float *)matrix(n), *y = (float *)matrix(n);
    double times[REPEATS];
    for (int i = -1; i < REPEATS; i++) {
        const double begin = now();
#pragma omp parallel for simd schedule(static)
        for (size_t k = 0; k < n; k++) x[k] += 2 * y[k];
        if (i >= 0) times[i] = now() - begin;
    }
    qsort(times, REPEATS, sizeof times[0], compare);
    free(x), free(y);
    return 3 * sizeof(float) * (double)n / times[REPEATS / 2];
}

int main(int argc, char **argv) {
    if (argc == 2 && strcmp(argv[1], "bandwidth") == 0) {
        printf("{\"bandwidth\": %.5g}\n", bandwidth());
        return 0;
    }
    if (argc != 6) die("usage: bench_rates fp32|bf16 ROWS C LAYERS VP | bandwidth");
    mallopt(M_MMAP_MAX, 0); // freed memory is kept, as the program keeps it
    mallopt(M_TRIM_THRESHOLD, -1);
    mallopt(M_TOP_PAD, 256 << 20);
    const int tokens = atoi(argv[2]), C = atoi(argv[3]), layers = atoi(argv[4]), Vp = atoi(argv[5]);
    const int rows = tokens < MOST_ROWS ? tokens : MOST_ROWS, widest = 4 * C > Vp ? 4 * C : Vp;
    static Rates rates;
    onednn_open(&rates.onednn);
    rates.type = strcmp(argv[1], "bf16") == 0 && onednn_has_bf16() ? dnnl_bf16 : dnnl_f32;
    rates.x = matrix((size_t)rows * 4 * (size_t)C);
    rates.w = matrix((size_t)widest * (size_t)C);
    rates.y = matrix((size_t)rows * (size_t)widest);
    const double blocks = layer(&rates, rows, C, 3 * C) + layer(&rates, rows, C, C) + layer(&rates, rows, C, 4 * C) +
                          layer(&rates, rows, 4 * C, C);
    const double seconds = (layers * blocks + layer(&rates, rows, C, Vp)) * tokens / rows;
    const double operations = 6.0 * tokens * C * (12.0 * layers * C + Vp);
    printf("{\"linear_ms\": %.4f, \"rate\": %.5g, \"bandwidth\": %.5g}\n", 1e3 * seconds, operations / seconds,
           bandwidth());
    onednn_close(&rates.onednn);
    return 0;
}
