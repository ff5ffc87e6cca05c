// cublasLt.h (CPU): the part of cuBLASLt that the program uses, for the emulator build: the toolkit's names, values and
// meaning, the product by oneDNN's sgemm on fp32 copies of the operands, in the order of the stream.
//
// Stricter than the library, so that wrong use shows here rather than on a GPU:
//  - layouts, leading dimensions, types and attributes are checked as the documentation of cublasLtMatmul() and of the
//    attributes has them: CUBLAS_STATUS_INVALID_VALUE for what contradicts itself, CUBLAS_STATUS_NOT_SUPPORTED for what
//    the program has no business to ask;
//  - an algorithm is good for the problem it was found for, with pointers aligned as the heuristic was told they would
//    be, and for no other; running without one (which would query the heuristic at every call) is refused;
//  - the workspace that an algorithm asks for is overwritten.
// TRAIN_GPT_CUBLASLT_REFUSE in the environment, a list of `bias`, `gelu`, `dgelu`, `bgrad` or `all`, names epilogues
// for which the heuristic then finds nothing (`all`: no product at all), so that tests reach what is done instead.
#ifndef CPU_CUBLASLT_H
#define CPU_CUBLASLT_H

#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <math.h>
#include <oneapi/dnnl/dnnl.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

// ------------------------------------------------------------------------------------------------------------- types

typedef enum { CUDA_R_32F = 0, CUDA_R_16BF = 14 } cudaDataType_t;
typedef cudaDataType_t cudaDataType;

typedef enum {
    CUBLAS_STATUS_SUCCESS = 0,
    CUBLAS_STATUS_NOT_INITIALIZED = 1,
    CUBLAS_STATUS_ALLOC_FAILED = 3,
    CUBLAS_STATUS_INVALID_VALUE = 7,
    CUBLAS_STATUS_EXECUTION_FAILED = 13,
    CUBLAS_STATUS_NOT_SUPPORTED = 15
} cublasStatus_t;

typedef enum { CUBLAS_OP_N = 0, CUBLAS_OP_T = 1 } cublasOperation_t;

typedef enum { CUBLAS_COMPUTE_32F = 68, CUBLAS_COMPUTE_32F_FAST_TF32 = 77 } cublasComputeType_t;

typedef enum {
    CUBLASLT_EPILOGUE_DEFAULT = 1,
    CUBLASLT_EPILOGUE_BIAS = 4,
    CUBLASLT_EPILOGUE_GELU_AUX = 32 | 128,
    CUBLASLT_EPILOGUE_GELU_AUX_BIAS = 32 | 128 | 4,
    CUBLASLT_EPILOGUE_DGELU = 64 | 128,
    CUBLASLT_EPILOGUE_BGRADB = 512
} cublasLtEpilogue_t;

typedef enum {
    CUBLASLT_MATMUL_DESC_TRANSA = 3,
    CUBLASLT_MATMUL_DESC_TRANSB = 4,
    CUBLASLT_MATMUL_DESC_EPILOGUE = 7,
    CUBLASLT_MATMUL_DESC_BIAS_POINTER = 8,
    CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER = 11,
    CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD = 12
} cublasLtMatmulDescAttributes_t;

typedef enum {
    CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES = 1,
    CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK = 3,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES = 5,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES = 6,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES = 7,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES = 8
} cublasLtMatmulPreferenceAttributes_t;

typedef enum {
    CUBLASLT_REDUCTION_SCHEME_NONE = 0,
    CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE = 2,
    CUBLASLT_REDUCTION_SCHEME_MASK = 7
} cublasLtReductionScheme_t;

struct cublasLtContext {
    bool refuse_bias, refuse_gelu, refuse_dgelu, refuse_bgrad, refuse_all;
};
typedef struct cublasLtContext *cublasLtHandle_t;

// op(A) op(B) with matrices stored by columns.
typedef struct {
    cublasComputeType_t compute;
    int32_t transpose_a, transpose_b;
    uint32_t epilogue;
    void *bias; // read; written by BGRADB
    void *aux;  // GELU's input: written by GELU_AUX, read by DGELU
    int64_t aux_ld;
} cublasLtMatmulDescOpaque_t;
typedef cublasLtMatmulDescOpaque_t *cublasLtMatmulDesc_t;

typedef struct {
    cudaDataType type;
    uint64_t rows, cols;
    int64_t ld;
} cublasLtMatrixLayoutOpaque_t;
typedef cublasLtMatrixLayoutOpaque_t *cublasLtMatrixLayout_t;

typedef struct {
    uint64_t workspace_bytes;
    uint32_t reduction_schemes;
    uint32_t alignment[4]; // of A, B, C, D, in bytes
} cublasLtMatmulPreferenceOpaque_t;
typedef cublasLtMatmulPreferenceOpaque_t *cublasLtMatmulPreference_t;

// Here: a hash of the problem; the alignments of A, B, C, D, bias and aux, a byte each, in units of 2 bytes; its number
// among the candidates.
typedef struct {
    uint64_t data[8];
} cublasLtMatmulAlgo_t;

typedef struct {
    cublasLtMatmulAlgo_t algo;
    size_t workspaceSize;
    cublasStatus_t state;
    float wavesCount;
    int reserved[4];
} cublasLtMatmulHeuristicResult_t;

enum { CPU_CUBLASLT_CANDIDATES = 3, CPU_CUBLASLT_WORKSPACE = 4096, CPU_CUBLASLT_ALIGNMENTS = 6 };

static inline const char *cublasLtGetStatusString(cublasStatus_t status) {
    switch (status) {
    case CUBLAS_STATUS_SUCCESS:
        return "success";
    case CUBLAS_STATUS_NOT_INITIALIZED:
        return "not initialized";
    case CUBLAS_STATUS_ALLOC_FAILED:
        return "allocation failed";
    case CUBLAS_STATUS_INVALID_VALUE:
        return "invalid value";
    case CUBLAS_STATUS_EXECUTION_FAILED:
        return "execution failed";
    case CUBLAS_STATUS_NOT_SUPPORTED:
        return "not supported";
    }
    return "unknown status";
}

// -------------------------------------------------------------------------------------------- handles and descriptors

static inline cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle) {
    if (handle == NULL) return CUBLAS_STATUS_INVALID_VALUE;
    *handle = (cublasLtHandle_t)calloc(1, sizeof **handle);
    if (*handle == NULL) return CUBLAS_STATUS_ALLOC_FAILED;
    struct {
        const char *word;
        bool *flag;
    } const words[] = {{"bias", &(*handle)->refuse_bias},
                       {"gelu", &(*handle)->refuse_gelu},
                       {"dgelu", &(*handle)->refuse_dgelu},
                       {"bgrad", &(*handle)->refuse_bgrad},
                       {"all", &(*handle)->refuse_all}};
    const size_t count = sizeof words / sizeof words[0];
    for (const char *at = getenv("TRAIN_GPT_CUBLASLT_REFUSE"); at != NULL && *at != '\0';) {
        const size_t length = strcspn(at, ",");
        size_t i = 0;
        while (i < count && (strlen(words[i].word) != length || strncmp(at, words[i].word, length) != 0)) i++;
        if (i == count) return CUBLAS_STATUS_NOT_INITIALIZED; // a misspelt word would test nothing
        *words[i].flag = true;
        at += length + (at[length] == ',');
    }
    return CUBLAS_STATUS_SUCCESS;
}

static inline cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
    if (handle == NULL) return CUBLAS_STATUS_NOT_INITIALIZED;
    free(handle);
    return CUBLAS_STATUS_SUCCESS;
}

static inline cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *desc, cublasComputeType_t compute,
                                                      cudaDataType scale) {
    if (desc == NULL) return CUBLAS_STATUS_INVALID_VALUE;
    if (scale != CUDA_R_32F) return CUBLAS_STATUS_NOT_SUPPORTED;
    *desc = (cublasLtMatmulDesc_t)calloc(1, sizeof **desc);
    if (*desc == NULL) return CUBLAS_STATUS_ALLOC_FAILED;
    (*desc)->compute = compute;
    (*desc)->epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    return CUBLAS_STATUS_SUCCESS;
}

static inline cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t desc) {
    if (desc == NULL) return CUBLAS_STATUS_INVALID_VALUE;
    free(desc);
    return CUBLAS_STATUS_SUCCESS;
}

// Copies `bytes` bytes, which have to be the attribute's own size.
static inline cublasStatus_t cpu_cublaslt_set(void *attribute, size_t size, const void *value, size_t bytes) {
    if (value == NULL || bytes != size) return CUBLAS_STATUS_INVALID_VALUE;
    memcpy(attribute, value, size);
    return CUBLAS_STATUS_SUCCESS;
}

static inline cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc,
                                                            cublasLtMatmulDescAttributes_t attribute, const void *value,
                                                            size_t bytes) {
    if (desc == NULL) return CUBLAS_STATUS_INVALID_VALUE;
    switch (attribute) {
    case CUBLASLT_MATMUL_DESC_TRANSA:
        return cpu_cublaslt_set(&desc->transpose_a, sizeof desc->transpose_a, value, bytes);
    case CUBLASLT_MATMUL_DESC_TRANSB:
        return cpu_cublaslt_set(&desc->transpose_b, sizeof desc->transpose_b, value, bytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE:
        return cpu_cublaslt_set(&desc->epilogue, sizeof desc->epilogue, value, bytes);
    case CUBLASLT_MATMUL_DESC_BIAS_POINTER:
        return cpu_cublaslt_set(&desc->bias, sizeof desc->bias, value, bytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER:
        return cpu_cublaslt_set(&desc->aux, sizeof desc->aux, value, bytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD:
        return cpu_cublaslt_set(&desc->aux_ld, sizeof desc->aux_ld, value, bytes);
    }
    return CUBLAS_STATUS_INVALID_VALUE;
}

static inline cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *layout, cudaDataType type,
                                                        uint64_t rows, uint64_t cols, int64_t ld) {
    if (layout == NULL) return CUBLAS_STATUS_INVALID_VALUE;
    *layout = (cublasLtMatrixLayout_t)calloc(1, sizeof **layout);
    if (*layout == NULL) return CUBLAS_STATUS_ALLOC_FAILED;
    (*layout)->type = type;
    (*layout)->rows = rows;
    (*layout)->cols = cols;
    (*layout)->ld = ld;
    return CUBLAS_STATUS_SUCCESS;
}

static inline cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
    if (layout == NULL) return CUBLAS_STATUS_INVALID_VALUE;
    free(layout);
    return CUBLAS_STATUS_SUCCESS;
}

static inline cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *preference) {
    if (preference == NULL) return CUBLAS_STATUS_INVALID_VALUE;
    *preference = (cublasLtMatmulPreference_t)calloc(1, sizeof **preference);
    if (*preference == NULL) return CUBLAS_STATUS_ALLOC_FAILED;
    (*preference)->reduction_schemes = CUBLASLT_REDUCTION_SCHEME_MASK;
    for (int i = 0; i < 4; i++) (*preference)->alignment[i] = 256; // the library's default
    return CUBLAS_STATUS_SUCCESS;
}

static inline cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
    if (preference == NULL) return CUBLAS_STATUS_INVALID_VALUE;
    free(preference);
    return CUBLAS_STATUS_SUCCESS;
}

static inline cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                                  cublasLtMatmulPreferenceAttributes_t attribute,
                                                                  const void *value, size_t bytes) {
    if (preference == NULL) return CUBLAS_STATUS_INVALID_VALUE;
    switch (attribute) {
    case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES:
        return cpu_cublaslt_set(&preference->workspace_bytes, sizeof preference->workspace_bytes, value, bytes);
    case CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK:
        return cpu_cublaslt_set(&preference->reduction_schemes, sizeof preference->reduction_schemes, value, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES:
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES:
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES:
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES:
        return cpu_cublaslt_set(&preference->alignment[attribute - CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES],
                                sizeof preference->alignment[0], value, bytes);
    }
    return CUBLAS_STATUS_INVALID_VALUE;
}

// ------------------------------------------------------------------------------------------------------------- checks

static inline bool cpu_cublaslt_has_aux(const cublasLtMatmulDescOpaque_t *desc) {
    return desc->epilogue == CUBLASLT_EPILOGUE_GELU_AUX || desc->epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS ||
           desc->epilogue == CUBLASLT_EPILOGUE_DGELU;
}

static inline bool cpu_cublaslt_has_bias(const cublasLtMatmulDescOpaque_t *desc) {
    return desc->epilogue == CUBLASLT_EPILOGUE_BIAS || desc->epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS ||
           desc->epilogue == CUBLASLT_EPILOGUE_BGRADB;
}

static inline size_t cpu_cublaslt_size(cudaDataType type) {
    return type == CUDA_R_16BF ? sizeof(__nv_bfloat16) : sizeof(float);
}

// The largest power of two, up to 256, that divides the pointer.
static inline uint64_t cpu_cublaslt_alignment(const void *pointer) {
    const uint64_t bits = (uint64_t)(uintptr_t)pointer | 256;
    return bits & (~bits + 1);
}

// What holds whatever the pointers.
static inline cublasStatus_t cpu_cublaslt_check(const cublasLtMatmulDescOpaque_t *desc, const cublasLtMatrixLayout_t a,
                                                const cublasLtMatrixLayout_t b, const cublasLtMatrixLayout_t c,
                                                const cublasLtMatrixLayout_t d) {
    if (desc == NULL || a == NULL || b == NULL || c == NULL || d == NULL) return CUBLAS_STATUS_INVALID_VALUE;
    const cublasLtMatrixLayout_t all[4] = {a, b, c, d};
    for (int i = 0; i < 4; i++)
        if (all[i]->rows == 0 || all[i]->cols == 0 || all[i]->ld < (int64_t)all[i]->rows)
            return CUBLAS_STATUS_INVALID_VALUE;
    const uint64_t m = desc->transpose_a ? a->cols : a->rows, k = desc->transpose_a ? a->rows : a->cols;
    const uint64_t n = desc->transpose_b ? b->rows : b->cols, k_of_b = desc->transpose_b ? b->cols : b->rows;
    if (k != k_of_b || d->rows != m || d->cols != n) return CUBLAS_STATUS_INVALID_VALUE;
    if (c->rows != m || c->cols != n || c->type != d->type) return CUBLAS_STATUS_INVALID_VALUE;
    // bf16 to bf16 or fp32; fp32 to fp32, where TF32 means something.
    if (a->type != b->type || (a->type == CUDA_R_32F && d->type != CUDA_R_32F)) return CUBLAS_STATUS_NOT_SUPPORTED;
    if (desc->compute != CUBLAS_COMPUTE_32F &&
        !(desc->compute == CUBLAS_COMPUTE_32F_FAST_TF32 && a->type == CUDA_R_32F))
        return CUBLAS_STATUS_NOT_SUPPORTED;
    switch (desc->epilogue) {
    case CUBLASLT_EPILOGUE_DEFAULT:
    case CUBLASLT_EPILOGUE_BIAS:
    case CUBLASLT_EPILOGUE_GELU_AUX:
    case CUBLASLT_EPILOGUE_GELU_AUX_BIAS:
    case CUBLASLT_EPILOGUE_DGELU:
        break;
    case CUBLASLT_EPILOGUE_BGRADB: // sums the columns of op(B) as they are read: B has to be stored transposed
        if (!desc->transpose_b) return CUBLAS_STATUS_NOT_SUPPORTED;
        break;
    default:
        return CUBLAS_STATUS_NOT_SUPPORTED;
    }
    // Bias and its gradient have D's type.
    if (cpu_cublaslt_has_bias(desc) && (desc->bias == NULL || (uintptr_t)desc->bias % cpu_cublaslt_size(d->type) != 0))
        return CUBLAS_STATUS_INVALID_VALUE;
    if (cpu_cublaslt_has_aux(desc) &&
        (desc->aux == NULL || desc->aux_ld % 8 != 0 || desc->aux_ld < (int64_t)m || (uintptr_t)desc->aux % 16 != 0))
        return CUBLAS_STATUS_INVALID_VALUE;
    return CUBLAS_STATUS_SUCCESS;
}

static inline uint64_t cpu_cublaslt_hash(const cublasLtMatmulDescOpaque_t *desc, const cublasLtMatrixLayout_t a,
                                         const cublasLtMatrixLayout_t b, const cublasLtMatrixLayout_t c,
                                         const cublasLtMatrixLayout_t d) {
    const cublasLtMatrixLayout_t all[4] = {a, b, c, d};
    uint64_t words[5 + 4 * 4], hash = 14695981039346656037ull;
    int n = 0;
    words[n++] = (uint64_t)desc->compute;
    words[n++] = (uint64_t)desc->transpose_a;
    words[n++] = (uint64_t)desc->transpose_b;
    words[n++] = desc->epilogue;
    words[n++] = cpu_cublaslt_has_aux(desc) ? (uint64_t)desc->aux_ld : 0;
    for (int i = 0; i < 4; i++) {
        words[n++] = (uint64_t)all[i]->type;
        words[n++] = all[i]->rows;
        words[n++] = all[i]->cols;
        words[n++] = (uint64_t)all[i]->ld;
    }
    for (int i = 0; i < n; i++) hash = (hash ^ words[i]) * 1099511628211ull;
    return hash;
}

// Every supported problem has CPU_CUBLASLT_CANDIDATES algorithms, which compute the same.
static inline cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc,
                                                            cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                                            cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                                            cublasLtMatmulPreference_t preference, int requested,
                                                            cublasLtMatmulHeuristicResult_t results[], int *returned) {
    if (returned == NULL || results == NULL || preference == NULL || requested <= 0) return CUBLAS_STATUS_INVALID_VALUE;
    *returned = 0;
    if (handle == NULL) return CUBLAS_STATUS_NOT_INITIALIZED;
    const cublasStatus_t status = cpu_cublaslt_check(desc, a, b, c, d);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    // Partial sums are to be added in fp32.
    if ((preference->reduction_schemes & ~(uint32_t)CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE) != 0)
        return CUBLAS_STATUS_NOT_SUPPORTED;
    const bool bias = cpu_cublaslt_has_bias(desc), aux = cpu_cublaslt_has_aux(desc);
    if (handle->refuse_all || (handle->refuse_bias && desc->epilogue == CUBLASLT_EPILOGUE_BIAS) ||
        (handle->refuse_gelu && aux && desc->epilogue != CUBLASLT_EPILOGUE_DGELU) ||
        (handle->refuse_dgelu && desc->epilogue == CUBLASLT_EPILOGUE_DGELU) ||
        (handle->refuse_bgrad && desc->epilogue == CUBLASLT_EPILOGUE_BGRADB) ||
        preference->workspace_bytes < CPU_CUBLASLT_WORKSPACE)
        return CUBLAS_STATUS_NOT_SUPPORTED;
    uint64_t alignments = 0;
    for (int i = 0; i < CPU_CUBLASLT_ALIGNMENTS; i++) {
        uint64_t bytes = i < 4    ? preference->alignment[i]
                         : i == 4 ? (bias ? cpu_cublaslt_alignment(desc->bias) : 2)
                                  : (aux ? cpu_cublaslt_alignment(desc->aux) : 2);
        if (bytes < 2 || bytes > 256 || (bytes & (bytes - 1)) != 0) return CUBLAS_STATUS_INVALID_VALUE;
        alignments |= (bytes / 2) << (8 * i);
    }
    for (; *returned < requested && *returned < CPU_CUBLASLT_CANDIDATES; ++*returned) {
        cublasLtMatmulHeuristicResult_t *result = &results[*returned];
        memset(result, 0, sizeof *result);
        result->algo.data[0] = cpu_cublaslt_hash(desc, a, b, c, d);
        result->algo.data[1] = alignments;
        result->algo.data[2] = (uint64_t)*returned;
        result->workspaceSize = CPU_CUBLASLT_WORKSPACE;
        result->wavesCount = 1.0f;
    }
    return CUBLAS_STATUS_SUCCESS;
}

// ------------------------------------------------------------------------------------------------------------ product

typedef struct {
    const void *a, *b;
    void *d, *bias, *aux, *workspace;
    int64_t m, n, k, lda, ldb, ldd, aux_ld;
    float alpha, beta;
    uint16_t epilogue;
    uint8_t transpose_a, transpose_b, in_bf16, out_bf16, tf32, unused;
} CpuCublasLtProduct;

static inline float cpu_cublaslt_load(const void *from, bool bf16, int64_t i) {
    return bf16 ? __bfloat162float(((const __nv_bfloat16 *)from)[i]) : ((const float *)from)[i];
}

static inline void cpu_cublaslt_store(void *to, bool bf16, int64_t i, float value) {
    if (bf16)
        ((__nv_bfloat16 *)to)[i] = __float2bfloat16(value);
    else
        ((float *)to)[i] = value;
}

// To TF32: 10 bits of mantissa, to nearest, ties away from zero (PTX: cvt.rna.tf32). Infinity and NaN stay.
static inline float cpu_cublaslt_tf32(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if ((bits & 0x7f800000u) != 0x7f800000u) bits = (bits + 0x1000u) & 0xffffe000u;
    memcpy(&value, &bits, sizeof bits);
    return value;
}

// A dense fp32 copy of `lines` lines of `length` elements, `ld` apart; NULL if there is no memory.
static inline float *cpu_cublaslt_copy(const void *from, const CpuCublasLtProduct *p, int64_t lines, int64_t length,
                                       int64_t ld) {
    float *to = (float *)malloc((size_t)(lines * length) * sizeof(float));
    if (to == NULL) return NULL;
    for (int64_t line = 0; line < lines; line++)
        for (int64_t i = 0; i < length; i++) {
            const float value = cpu_cublaslt_load(from, p->in_bf16, line * ld + i);
            to[line * length + i] = p->tf32 ? cpu_cublaslt_tf32(value) : value;
        }
    return to;
}

static inline float cpu_cublaslt_gelu(float x) {
    return 0.5f * x * (1.0f + tanhf(0.7978845608f * (x + 0.044715f * x * x * x)));
}

static inline float cpu_cublaslt_gelu_derivative(float x) {
    const float t = tanhf(0.7978845608f * (x + 0.044715f * x * x * x));
    return 0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * 0.7978845608f * (1.0f + 3.0f * 0.044715f * x * x);
}

static inline void cpu_cublaslt_epilogue(const CpuCublasLtProduct *p, const float *sums) {
    const bool gelu = p->epilogue == CUBLASLT_EPILOGUE_GELU_AUX || p->epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
    const bool bias = p->epilogue == CUBLASLT_EPILOGUE_BIAS || p->epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
    const bool out_bf16 = p->out_bf16;
    for (int64_t j = 0; j < p->n; j++)
        for (int64_t i = 0; i < p->m; i++) {
            float value = sums[j * p->m + i];
            if (p->beta != 0.0f) value += p->beta * cpu_cublaslt_load(p->d, out_bf16, j * p->ldd + i);
            if (bias) value += cpu_cublaslt_load(p->bias, out_bf16, i);
            if (gelu) {
                cpu_cublaslt_store(p->aux, out_bf16, j * p->aux_ld + i, value);
                value = cpu_cublaslt_gelu(value);
            }
            if (p->epilogue == CUBLASLT_EPILOGUE_DGELU)
                value *= cpu_cublaslt_gelu_derivative(cpu_cublaslt_load(p->aux, out_bf16, j * p->aux_ld + i));
            cpu_cublaslt_store(p->d, out_bf16, j * p->ldd + i, value);
        }
    if (p->epilogue == CUBLASLT_EPILOGUE_BGRADB)
        for (int64_t j = 0; j < p->n; j++) {
            double sum = 0.0;
            for (int64_t k = 0; k < p->k; k++) sum += (double)cpu_cublaslt_load(p->b, p->in_bf16, k * p->ldb + j);
            cpu_cublaslt_store(p->bias, out_bf16, j, (float)sum);
        }
}

static inline cudaError_t cpu_cublaslt_run(void *argument) {
    const CpuCublasLtProduct *p = (const CpuCublasLtProduct *)argument;
    memset(p->workspace, 0xff, CPU_CUBLASLT_WORKSPACE);
    // Stored by columns, a matrix is its transpose stored by rows, and sgemm works by rows: D^T = op(B)^T op(A)^T.
    const int64_t a_lines = p->transpose_a ? p->m : p->k, a_length = p->transpose_a ? p->k : p->m;
    const int64_t b_lines = p->transpose_b ? p->k : p->n, b_length = p->transpose_b ? p->n : p->k;
    float *a = cpu_cublaslt_copy(p->a, p, a_lines, a_length, p->lda);
    float *b = cpu_cublaslt_copy(p->b, p, b_lines, b_length, p->ldb);
    float *sums = (float *)malloc((size_t)(p->m * p->n) * sizeof(float));
    cudaError_t status = a == NULL || b == NULL || sums == NULL ? cudaErrorMemoryAllocation : cudaSuccess;
    if (status == cudaSuccess && dnnl_sgemm(p->transpose_b ? 'T' : 'N', p->transpose_a ? 'T' : 'N', p->n, p->m, p->k,
                                            p->alpha, b, b_length, a, a_length, 0.0f, sums, p->m) != dnnl_success)
        status = cudaErrorLaunchFailure;
    if (status == cudaSuccess) cpu_cublaslt_epilogue(p, sums);
    free(a);
    free(b);
    free(sums);
    return status;
}

// D = epilogue(alpha op(A) op(B) + beta C), with C and D the same matrix. alpha and beta: in host memory.
static inline cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, const void *alpha,
                                            const void *A, cublasLtMatrixLayout_t a, const void *B,
                                            cublasLtMatrixLayout_t b, const void *beta, const void *C,
                                            cublasLtMatrixLayout_t c, void *D, cublasLtMatrixLayout_t d,
                                            const cublasLtMatmulAlgo_t *algo, void *workspace, size_t workspace_bytes,
                                            cudaStream_t stream) {
    if (handle == NULL) return CUBLAS_STATUS_NOT_INITIALIZED;
    const cublasStatus_t status = cpu_cublaslt_check(desc, a, b, c, d);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    if (alpha == NULL || beta == NULL || A == NULL || B == NULL || D == NULL) return CUBLAS_STATUS_INVALID_VALUE;
    if (C != D || c->ld != d->ld || algo == NULL) return CUBLAS_STATUS_NOT_SUPPORTED;
    if (algo->data[0] != cpu_cublaslt_hash(desc, a, b, c, d)) return CUBLAS_STATUS_INVALID_VALUE;
    const void *pointers[CPU_CUBLASLT_ALIGNMENTS] = {A, B, C, D, desc->bias, desc->aux};
    for (int i = 0; i < CPU_CUBLASLT_ALIGNMENTS; i++) {
        if ((i == 4 && !cpu_cublaslt_has_bias(desc)) || (i == 5 && !cpu_cublaslt_has_aux(desc))) continue;
        if ((uintptr_t)pointers[i] % (2 * ((algo->data[1] >> (8 * i)) & 255)) != 0) return CUBLAS_STATUS_INVALID_VALUE;
    }
    if (workspace == NULL || (uintptr_t)workspace % 16 != 0 || workspace_bytes < CPU_CUBLASLT_WORKSPACE)
        return CUBLAS_STATUS_INVALID_VALUE;
    CpuCublasLtProduct p;
    memset(&p, 0, sizeof p);
    p.a = A;
    p.b = B;
    p.d = D;
    p.bias = desc->bias;
    p.aux = desc->aux;
    p.workspace = workspace;
    p.m = (int64_t)d->rows;
    p.n = (int64_t)d->cols;
    p.k = (int64_t)(desc->transpose_a ? a->rows : a->cols);
    p.lda = a->ld;
    p.ldb = b->ld;
    p.ldd = d->ld;
    p.aux_ld = desc->aux_ld;
    memcpy(&p.alpha, alpha, sizeof p.alpha);
    memcpy(&p.beta, beta, sizeof p.beta);
    p.epilogue = (uint16_t)desc->epilogue;
    p.transpose_a = desc->transpose_a != 0;
    p.transpose_b = desc->transpose_b != 0;
    p.in_bf16 = a->type == CUDA_R_16BF;
    p.out_bf16 = d->type == CUDA_R_16BF;
    p.tf32 = desc->compute == CUBLAS_COMPUTE_32F_FAST_TF32;
    return cpu_stream_run(stream, cpu_cublaslt_run, &p, sizeof p) == cudaSuccess ? CUBLAS_STATUS_SUCCESS
                                                                                 : CUBLAS_STATUS_EXECUTION_FAILED;
}

#endif
