// mfu.h: model FLOPs utilisation: what a model needs for a token, and what GPUs could do at best.
//
// MFU is the share of the devices' peak that a run would need at the speed it has (Chowdhery et al. 2022, PaLM,
// appendix B): recomputed activations do not count as work.
#ifndef MFU_H
#define MFU_H

#include <ctype.h>
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

// Floating-point operations of forward and backward for one token: 6 N + 12 L C T. N: parameters without positions,
// which are added and take part in no product; the embedding counts, as it is also the head. The second term is
// attention's, without the half that a causal mask saves.
static inline double mfu_flops_per_token(uint64_t parameters, int layers, int channels, int positions,
                                         int sequence_length) {
    const double N = (double)parameters - (double)positions * (double)channels;
    return 6 * N + 12.0 * layers * channels * sequence_length;
}

// Peak rates in units of 1e12 operations a second, dense (without sparsity), products summed in fp32.
typedef struct {
    const char *name; // as it stands in the name of the device
    double bf16, tf32, fp32;
} GpuPeak;

// Whether `part` stands in `name` as whole words, and not as those of a variant with a chip of its own.
static inline bool mfu_names(const char *name, const char *part) {
    static const char *const variants[] = {" Ti", " SUPER", " Laptop", " Mobile", " D"};
    const size_t length = strlen(part);
    for (size_t i = 0; i < sizeof variants / sizeof variants[0]; i++)
        if (strstr(name, variants[i]) != NULL) return false;
    for (const char *at = strstr(name, part); at != NULL; at = strstr(at + 1, part)) {
        const bool begins = at == name || !isalnum((unsigned char)at[-1]);
        if (begins && !isalnum((unsigned char)at[length])) return true;
    }
    return false;
}

typedef enum { MFU_FP32, MFU_TF32, MFU_BF16 } MfuKind;

// Operations a second of a device at best; NaN where it is not in the table. From the vendor's data sheets (which give
// most with sparsity, twice as much), for GeForce and RTX from the white papers of their architectures.
static inline double mfu_peak(const char *device, MfuKind kind) {
    static const GpuPeak table[] = {
        // of two that match the first counts
        {"A100", 312, 156, 19.5},
        {"A40", 149.7, 74.8, 37.4},
        {"A30", 165, 82, 10.3},
        {"A10", 125, 62.5, 31.2},
        {"H100 PCIe", 756.5, 378, 51.2},
        {"H100 NVL", 835.5, 417.5, 60},
        {"H100", 989.4, 494.7, 66.9},
        {"H200 NVL", 835.5, 417.5, 60},
        {"H200", 989.4, 494.7, 66.9},
        {"GH200", 989.4, 494.7, 66.9},
        {"B200", 2250, 1125, 75},
        {"GB200", 2500, 1250, 80},
        {"L4", 121, 60, 30.3},
        {"L40", 181, 90.5, 90.5},
        {"L40S", 362, 183, 91.6},
        {"RTX A6000", 154.8, 77.4, 38.7},
        {"RTX 6000 Ada", 364.2, 182.1, 91.1},
        {"RTX 3090", 71, 35.6, 35.6},
        {"RTX 4090", 165.2, 82.6, 82.6},
        {"RTX 5090", 209.5, 104.8, 104.8},
    };
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++)
        if (mfu_names(device, table[i].name))
            return 1e12 * (kind == MFU_BF16 ? table[i].bf16 : kind == MFU_TF32 ? table[i].tf32 : table[i].fp32);
    return NAN;
}

#endif
