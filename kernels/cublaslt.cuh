// cublaslt.cuh: matrix products by cuBLASLt: a table of the problems seen, each with its descriptors and algorithm.
//
// The three products of a linear layer with x (rows, C), w (OC, C), y (rows, OC), all row-major and dense:
//   LINEAR_FORWARD         y = x w^T, then bias, GELU
//   LINEAR_BACKWARD_INPUT  x = y w, then times gelu'
//   LINEAR_BACKWARD_WEIGHT w (+)= y^T x, and sums of y over rows
// each 2 rows C OC operations. cuBLASLt stores matrices by columns, where row-major (rows, C) is (C, rows), so every
// product is asked for transposed and nothing is copied: y^T = w x^T, x^T = w^T y^T, w^T = x^T y.
//
// Products are summed in fp32: bf16 operands with CUBLAS_COMPUTE_32F, fp32 ones with the same or, by OpsOptions.tf32,
// as TF32. Where an algorithm splits a sum, the parts are added in fp32 too, never in bf16.
//
// The first time a problem is seen, the heuristic is asked for algorithms, and its first is taken: the same on every
// rank with the same GPU and library. cublaslt_choices_get() and _set() carry other choices, made by timing
// (matmul.cuh), from one rank to the others. After that a product allocates nothing and asks nothing.
// A problem with an epilogue can be left "apart": no algorithm, or one that is slower than a plain product and a kernel
// after it. cublaslt_product() then returns false, and the caller does it in parts.
#ifndef CUBLASLT_CUH
#define CUBLASLT_CUH

#include <cublasLt.h>
#include <string.h>
#include "error.h"

// More than a run has: four layers' products and the head's, fused and apart, adding or not, whole and last chunks.
enum { CUBLASLT_PLANS = 512, CUBLASLT_CANDIDATES = 8 };
enum { CUBLASLT_WORKSPACE = 32 << 20 }; // bytes: what NVIDIA recommends for Hopper
enum { CUBLASLT_APART = -1 };           // instead of a candidate's number

typedef enum { LINEAR_FORWARD, LINEAR_BACKWARD_INPUT, LINEAR_BACKWARD_WEIGHT } LinearKind;

// What the choice of an algorithm depends on. Compared by its bytes: no padding.
typedef struct {
    int32_t kind;       // LinearKind
    int32_t epilogue;   // cublasLtEpilogue_t
    int32_t accumulate; // 1: added to the result
    int32_t alignment;  // of all pointers, in bytes: 16, or the size of an element
    int64_t rows;
    int32_t C, OC;
} CublasLtProblem;

typedef struct {
    CublasLtProblem problem;
    int choice; // number among the heuristic's candidates, or CUBLASLT_APART
    cublasLtMatmulDesc_t operation;
    cublasLtMatrixLayout_t x, w, y;
    cublasLtMatmulAlgo_t algorithm;
} CublasLtPlan;

typedef struct {
    cublasLtHandle_t handle;
    cublasComputeType_t compute;
    void *workspace;
    CublasLtPlan plans[CUBLASLT_PLANS];
    int seen;
    bool tuning;         // time the candidates of problems that are seen for the first time
    CublasLtPlan *fused; // the last product with an epilogue that cuBLASLt took, NULL when it is to be known
} CublasLt;

// The choices of all problems seen: a block of bytes of one size, to be sent from rank to rank.
typedef struct {
    int32_t count, unused;
    struct {
        CublasLtProblem problem;
        int64_t choice;
    } entries[CUBLASLT_PLANS];
} CublasLtChoices;

// What a product works on. bias: of BIAS and GELU_AUX_BIAS, or the sums that BGRADB writes. aux: GELU's argument.
typedef struct {
    void *x, *w, *y, *bias, *aux;
} CublasLtOperands;

// Types of elements, as the library names them.
static constexpr cudaDataType cublaslt_type(size_t size) {
    return size == sizeof(float) ? CUDA_R_32F : CUDA_R_16BF;
}

#define cublaslt_check(call)                                                                          \
    do {                                                                                              \
        cublasStatus_t status_ = (call);                                                              \
        if (status_ != CUBLAS_STATUS_SUCCESS) die("%s: %s", #call, cublasLtGetStatusString(status_)); \
    } while (0)

// ------------------------------------------------------------------------------------------------------ open and close

// When memory->planning, only the workspace is counted, and there is nothing to compute with.
static inline void cublaslt_open(CublasLt *self, Memory *memory, const OpsOptions *options) {
    memset(self, 0, sizeof *self);
    self->workspace = memory_alloc(memory, MEMORY_WORKSPACE, CUBLASLT_WORKSPACE);
    const bool tf32 = sizeof(floatX) == sizeof(float) && options->tf32;
    self->compute = tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
    if (!memory->planning) cublaslt_check(cublasLtCreate(&self->handle));
}

static inline void cublaslt_close(CublasLt *self, Memory *memory) {
    for (int i = 0; i < self->seen; i++) {
        CublasLtPlan *plan = &self->plans[i];
        cublaslt_check(cublasLtMatmulDescDestroy(plan->operation));
        cublaslt_check(cublasLtMatrixLayoutDestroy(plan->x));
        cublaslt_check(cublasLtMatrixLayoutDestroy(plan->w));
        cublaslt_check(cublasLtMatrixLayoutDestroy(plan->y));
    }
    if (self->handle != NULL) cublaslt_check(cublasLtDestroy(self->handle));
    memory_free(memory, MEMORY_WORKSPACE, self->workspace, CUBLASLT_WORKSPACE);
}

// ------------------------------------------------------------------------------------------------------------- plans

// The matrices of a product as cuBLASLt names them: D = op(A) op(B).
typedef struct {
    cublasLtMatrixLayout_t a, b, d;
    cublasOperation_t transpose_a, transpose_b;
} CublasLtRoles;

static inline CublasLtRoles cublaslt_roles(const CublasLtPlan *plan) {
    CublasLtRoles roles;
    const int kind = plan->problem.kind;
    roles.a = kind == LINEAR_BACKWARD_WEIGHT ? plan->x : plan->w;
    roles.b = kind == LINEAR_FORWARD ? plan->x : plan->y;
    roles.d = kind == LINEAR_FORWARD ? plan->y : kind == LINEAR_BACKWARD_INPUT ? plan->x : plan->w;
    roles.transpose_a = kind == LINEAR_FORWARD ? CUBLAS_OP_T : CUBLAS_OP_N;
    roles.transpose_b = kind == LINEAR_BACKWARD_WEIGHT ? CUBLAS_OP_T : CUBLAS_OP_N;
    return roles;
}

static inline bool cublaslt_has_bias(int epilogue) {
    return epilogue == CUBLASLT_EPILOGUE_BIAS || epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS ||
           epilogue == CUBLASLT_EPILOGUE_BGRADB;
}

static inline bool cublaslt_has_aux(int epilogue) {
    return epilogue == CUBLASLT_EPILOGUE_GELU_AUX || epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS ||
           epilogue == CUBLASLT_EPILOGUE_DGELU;
}

static inline void cublaslt_set_pointers(CublasLtPlan *plan, void *bias, void *aux) {
    if (cublaslt_has_bias(plan->problem.epilogue))
        cublaslt_check(
            cublasLtMatmulDescSetAttribute(plan->operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias, sizeof bias));
    if (cublaslt_has_aux(plan->problem.epilogue))
        cublaslt_check(cublasLtMatmulDescSetAttribute(plan->operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, &aux,
                                                      sizeof aux));
}

// Fills the plan's descriptors from its problem.
static inline void cublaslt_describe(const CublasLt *self, CublasLtPlan *plan) {
    const CublasLtProblem *problem = &plan->problem;
    const cudaDataType type = cublaslt_type(sizeof(floatX));
    const cudaDataType w_type = problem->kind == LINEAR_BACKWARD_WEIGHT ? cublaslt_type(sizeof(gradX)) : type;
    const uint64_t rows = (uint64_t)problem->rows, C = (uint64_t)problem->C, OC = (uint64_t)problem->OC;
    cublaslt_check(cublasLtMatrixLayoutCreate(&plan->x, type, C, rows, problem->C));
    cublaslt_check(cublasLtMatrixLayoutCreate(&plan->w, w_type, C, OC, problem->C));
    cublaslt_check(cublasLtMatrixLayoutCreate(&plan->y, type, OC, rows, problem->OC));
    cublaslt_check(cublasLtMatmulDescCreate(&plan->operation, self->compute, CUDA_R_32F));
    const CublasLtRoles roles = cublaslt_roles(plan);
    const int32_t transpose_a = roles.transpose_a, transpose_b = roles.transpose_b;
    const uint32_t epilogue = (uint32_t)problem->epilogue;
    cublaslt_check(
        cublasLtMatmulDescSetAttribute(plan->operation, CUBLASLT_MATMUL_DESC_TRANSA, &transpose_a, sizeof transpose_a));
    cublaslt_check(
        cublasLtMatmulDescSetAttribute(plan->operation, CUBLASLT_MATMUL_DESC_TRANSB, &transpose_b, sizeof transpose_b));
    cublaslt_check(
        cublasLtMatmulDescSetAttribute(plan->operation, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof epilogue));
    if (cublaslt_has_aux(problem->epilogue)) {
        const int64_t ld = problem->kind == LINEAR_FORWARD ? problem->OC : problem->C;
        cublaslt_check(
            cublasLtMatmulDescSetAttribute(plan->operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, &ld, sizeof ld));
    }
}

// The algorithms that the heuristic knows, the fastest first in its estimate; returns how many.
static inline int cublaslt_candidates(const CublasLt *self, CublasLtPlan *plan,
                                      cublasLtMatmulAlgo_t algorithms[CUBLASLT_CANDIDATES]) {
    const CublasLtProblem *problem = &plan->problem;
    const CublasLtRoles roles = cublaslt_roles(plan);
    // cuBLASLt takes GELU's argument only where its rows are whole multiples of 8 elements, and 16-byte aligned.
    const int aux_ld = problem->kind == LINEAR_FORWARD ? problem->OC : problem->C;
    if (cublaslt_has_aux(problem->epilogue) && (aux_ld % 8 != 0 || problem->alignment < 16)) return 0;

    cublasLtMatmulPreference_t preference;
    const uint64_t workspace_bytes = CUBLASLT_WORKSPACE;
    const uint32_t reduction = CUBLASLT_REDUCTION_SCHEME_NONE | CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    const uint32_t alignment = (uint32_t)problem->alignment;
    const cublasLtMatmulPreferenceAttributes_t matrices[] = {
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES};
    cublaslt_check(cublasLtMatmulPreferenceCreate(&preference));
    cublaslt_check(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                                        &workspace_bytes, sizeof workspace_bytes));
    cublaslt_check(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                                                        &reduction, sizeof reduction));
    for (int i = 0; i < 4; i++)
        cublaslt_check(cublasLtMatmulPreferenceSetAttribute(preference, matrices[i], &alignment, sizeof alignment));
    // Of bias and aux the heuristic takes the pointers' own alignment. Those of this call may be better aligned than
    // the next layer's, so it is shown an address that is aligned as the problem says and no better.
    void *address = (char *)self->workspace + problem->alignment;
    cublaslt_set_pointers(plan, address, address);

    cublasLtMatmulHeuristicResult_t results[CUBLASLT_CANDIDATES];
    int found = 0, usable = 0;
    const cublasStatus_t status =
        cublasLtMatmulAlgoGetHeuristic(self->handle, plan->operation, roles.a, roles.b, roles.d, roles.d, preference,
                                       CUBLASLT_CANDIDATES, results, &found);
    cublaslt_check(cublasLtMatmulPreferenceDestroy(preference));
    const bool none = status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_INVALID_VALUE;
    if (status != CUBLAS_STATUS_SUCCESS && !none)
        die("cuBLASLt finds no algorithms: %s", cublasLtGetStatusString(status));
    for (int i = 0; i < found && !none; i++)
        if (results[i].state == CUBLAS_STATUS_SUCCESS) algorithms[usable++] = results[i].algo;
    return usable;
}

// Runs the plan with its present algorithm.
static inline cublasStatus_t cublaslt_run(const CublasLt *self, CublasLtPlan *plan, const CublasLtOperands *operands,
                                          cudaStream_t stream) {
    const CublasLtRoles roles = cublaslt_roles(plan);
    const int kind = plan->problem.kind;
    void *a = kind == LINEAR_BACKWARD_WEIGHT ? operands->x : operands->w;
    void *b = kind == LINEAR_FORWARD ? operands->x : operands->y;
    void *d = kind == LINEAR_FORWARD ? operands->y : kind == LINEAR_BACKWARD_INPUT ? operands->x : operands->w;
    const float one = 1.0f, beta = plan->problem.accumulate ? 1.0f : 0.0f;
    cublaslt_set_pointers(plan, operands->bias, operands->aux);
    return cublasLtMatmul(self->handle, plan->operation, &one, a, roles.a, b, roles.b, &beta, d, roles.d, d, roles.d,
                          &plan->algorithm, self->workspace, CUBLASLT_WORKSPACE, stream);
}

// Times `run(argument)`, which submits work to the stream and returns whether it could: the median of several runs
// after a few to warm up, in milliseconds; negative if it could not.
static inline float cublaslt_time(bool (*run)(void *argument), void *argument, cudaStream_t stream) {
    enum { WARM_UP = 2, RUNS = 7 };
    float times[RUNS];
    cudaEvent_t start, stop;
    cuda_check(cudaEventCreate(&start));
    cuda_check(cudaEventCreate(&stop));
    bool could = true;
    for (int i = 0; i < WARM_UP + RUNS && could; i++) {
        cuda_check(cudaEventRecord(start, stream));
        could = run(argument);
        cuda_check(cudaEventRecord(stop, stream));
        cuda_check(cudaEventSynchronize(stop));
        if (i < WARM_UP) continue;
        float time;
        cuda_check(cudaEventElapsedTime(&time, start, stop));
        int at = i - WARM_UP; // sorted as they come
        for (; at > 0 && times[at - 1] > time; at--) times[at] = times[at - 1];
        times[at] = time;
    }
    cuda_check(cudaEventDestroy(start));
    cuda_check(cudaEventDestroy(stop));
    return could ? times[RUNS / 2] : -1.0f;
}

typedef struct {
    const CublasLt *self;
    CublasLtPlan *plan;
    const CublasLtOperands *operands;
    cudaStream_t stream;
} CublasLtTrial;

static inline bool cublaslt_try(void *argument) {
    CublasLtTrial *trial = (CublasLtTrial *)argument;
    return cublaslt_run(trial->self, trial->plan, trial->operands, trial->stream) == CUBLAS_STATUS_SUCCESS;
}

// Gives the plan the fastest of its candidates. Runs the product several times on the operands as they are, which must
// be scratch.
static inline void cublaslt_tune(const CublasLt *self, CublasLtPlan *plan, const CublasLtOperands *operands,
                                 cudaStream_t stream) {
    cublasLtMatmulAlgo_t algorithms[CUBLASLT_CANDIDATES];
    const int count = cublaslt_candidates(self, plan, algorithms);
    float best = -1.0f;
    plan->choice = CUBLASLT_APART;
    CublasLtTrial trial = {self, plan, operands, stream};
    for (int i = 0; i < count; i++) {
        plan->algorithm = algorithms[i];
        const float time = cublaslt_time(cublaslt_try, &trial, stream);
        if (time < 0.0f || (best >= 0.0f && time >= best)) continue;
        best = time;
        plan->choice = i;
    }
    if (plan->choice != CUBLASLT_APART) plan->algorithm = algorithms[plan->choice];
}

// The plan of a problem, made now if it is new: then *is_new is set, and it has the heuristic's first algorithm.
static inline CublasLtPlan *cublaslt_plan(CublasLt *self, const CublasLtProblem *problem, bool *is_new) {
    *is_new = false;
    for (int i = 0; i < self->seen; i++)
        if (memcmp(&self->plans[i].problem, problem, sizeof *problem) == 0) return &self->plans[i];
    if (self->seen == CUBLASLT_PLANS)
        die("more than %d different matrix products: raise CUBLASLT_PLANS", CUBLASLT_PLANS);
    CublasLtPlan *plan = &self->plans[self->seen++];
    plan->problem = *problem;
    cublaslt_describe(self, plan);
    cublasLtMatmulAlgo_t algorithms[CUBLASLT_CANDIDATES];
    plan->choice = cublaslt_candidates(self, plan, algorithms) > 0 ? 0 : CUBLASLT_APART;
    if (plan->choice == 0) plan->algorithm = algorithms[0];
    if (plan->choice == CUBLASLT_APART && problem->epilogue == CUBLASLT_EPILOGUE_DEFAULT && error_identity()->rank == 0)
        fprintf(stderr,
                "train_gpt: note: cuBLASLt has no algorithm for the product of %lld rows, %d to %d channels (kind %d): "
                "a slow kernel computes it\n",
                (long long)problem->rows, problem->C, problem->OC, problem->kind);
    *is_new = true;
    return plan;
}

// Submits a product to the stream; false if it is to be done apart, and nothing has been submitted.
static inline bool cublaslt_product(CublasLt *self, LinearKind kind, cublasLtEpilogue_t epilogue, int accumulate,
                                    const CublasLtOperands *operands, size_t rows, int C, int OC, cudaStream_t stream) {
    const uintptr_t addresses = (uintptr_t)operands->x | (uintptr_t)operands->w | (uintptr_t)operands->y |
                                (uintptr_t)operands->bias | (uintptr_t)operands->aux;
    CublasLtProblem problem;
    problem.kind = kind;
    problem.epilogue = epilogue;
    problem.accumulate = accumulate != 0;
    problem.alignment = addresses % 16 == 0 ? 16 : (int32_t)sizeof(floatX);
    problem.rows = (int64_t)rows;
    problem.C = C;
    problem.OC = OC;
    bool is_new;
    CublasLtPlan *plan = cublaslt_plan(self, &problem, &is_new);
    if (is_new && self->tuning) cublaslt_tune(self, plan, operands, stream);
    if (plan->choice == CUBLASLT_APART) return false;
    if (epilogue != CUBLASLT_EPILOGUE_DEFAULT) self->fused = plan;
    const cublasStatus_t status = cublaslt_run(self, plan, operands, stream);
    if (status != CUBLAS_STATUS_SUCCESS)
        die("the matrix product of %zu rows, %d to %d channels (kind %d, epilogue %d) failed: %s", rows, C, OC, kind,
            epilogue, cublasLtGetStatusString(status));
    return true;
}

// ----------------------------------------------------------------------------------------------------------- choices

static inline void cublaslt_choices_get(const CublasLt *self, CublasLtChoices *choices) {
    memset(choices, 0, sizeof *choices);
    choices->count = self->seen;
    for (int i = 0; i < self->seen; i++) {
        choices->entries[i].problem = self->plans[i].problem;
        choices->entries[i].choice = self->plans[i].choice;
    }
}

// Takes over another rank's choices; problems not seen here yet are made.
static inline void cublaslt_choices_set(CublasLt *self, const CublasLtChoices *choices) {
    for (int i = 0; i < choices->count; i++) {
        bool is_new;
        CublasLtPlan *plan = cublaslt_plan(self, &choices->entries[i].problem, &is_new);
        const int choice = (int)choices->entries[i].choice;
        if (choice != CUBLASLT_APART) {
            cublasLtMatmulAlgo_t algorithms[CUBLASLT_CANDIDATES];
            if (choice >= cublaslt_candidates(self, plan, algorithms))
                die("cuBLASLt offers other algorithms here than on the rank that chose: are the GPUs and libraries the "
                    "same? --matmul-tune false does without");
            plan->algorithm = algorithms[choice];
        }
        plan->choice = choice;
    }
}

#endif
