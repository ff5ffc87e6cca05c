// MFU: the FLOPs of a token against the products counted one by one, and peaks found by the names that devices have.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#include "mfu.h"

// GPT-2 124M: a product of an (OC, C) weight takes 2 OC C operations forward and twice that backward; attention's two
// take 2 T C each without a mask. 6 N counts vectors as well, which is 0.1 % too much.
static void test_flops(void **state) {
    (void)state;
    const double L = 12, C = 768, T = 1024, V = 50257;
    const double products = L * (3 * C * C + C * C + 4 * C * C + 4 * C * C) + V * C;
    const double counted = 3 * (2 * products + L * 2 * (2 * T * C));
    const double flops = mfu_flops_per_token(124439808, 12, 768, 1024, 1024);
    assert_true(flops > counted && flops < 1.001 * counted);
    // llm.c's 140 ms for 524,288 tokens on 8 H100 is the speed of a little under half of their peak.
    const double mfu = 524288 / 0.140 * flops / (8 * mfu_peak("NVIDIA H100 80GB HBM3", MFU_BF16));
    assert_true(mfu > 0.35 && mfu < 0.55);
}

static void test_names(void **state) {
    (void)state;
    static const struct {
        const char *name;
        double bf16; // 1e12 operations a second; 0: not known
    } devices[] = {
        {"NVIDIA A100-SXM4-80GB", 312},
        {"NVIDIA A100 80GB PCIe", 312},
        {"NVIDIA A10", 125},
        {"NVIDIA H100 80GB HBM3", 989.4},
        {"NVIDIA H100 PCIe", 756.5},
        {"NVIDIA H100 NVL", 835.5},
        {"NVIDIA H200", 989.4},
        {"NVIDIA H200 NVL", 835.5},
        {"NVIDIA GH200 480GB", 989.4},
        {"NVIDIA B200", 2250},
        {"NVIDIA GB200", 2500},
        {"NVIDIA L4", 121},
        {"NVIDIA L40S", 362},
        {"NVIDIA L40", 181},
        {"NVIDIA GeForce RTX 4090", 165.2},
        {"NVIDIA GeForce RTX 5090", 209.5},
        // Others, which have something of a known name in theirs.
        {"NVIDIA A10G", 0},
        {"NVIDIA A1000", 0},
        {"NVIDIA GeForce RTX 4090 Ti", 0},
        {"NVIDIA GeForce RTX 4090 Laptop GPU", 0},
        {"Intel(R) Xeon(R) Platinum 8480C", 0},
        {"Tesla V100-SXM2-16GB", 0},
        {"", 0},
    };
    for (size_t i = 0; i < sizeof devices / sizeof devices[0]; i++) {
        const double peak = mfu_peak(devices[i].name, MFU_BF16);
        const bool right = devices[i].bf16 == 0 ? isnan(peak) : peak == devices[i].bf16 * 1e12;
        if (!right) fail_msg("%s: %g", devices[i].name, peak);
        if (devices[i].bf16 == 0) continue;
        const double tf32 = mfu_peak(devices[i].name, MFU_TF32), fp32 = mfu_peak(devices[i].name, MFU_FP32);
        // Half for TF32, to the rounding of data sheets; fp32 without tensor cores is never faster.
        if (fabs(tf32 / peak - 0.5) > 0.01 || fp32 > tf32)
            fail_msg("%s: %g, %g, %g", devices[i].name, peak, tf32, fp32);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_flops), cmocka_unit_test(test_names)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
