// bench_kernels.cu: what each operation of a training step moves and computes, how long that must take at least, and
// how long it takes.
//
//   bench_kernels [--preset 124M|1558M] [--micro-batch B] [--sequence-length T] [--micro-batches M] [--ranks N]
//                 [--layers L --heads NH --width C --vocabulary V]
//                 [--bandwidth GB/s --rate TFLOP/s] [--network GB/s] [--markdown]
//
// Without rates it measures this GPU's: the copy bandwidth of a large buffer, and cuBLASLt's rate on the model's own
// products, the fastest of them; then it times every operation with events, medians of several runs. With rates it
// measures nothing and prints the table alone: the floor of a step on a machine of these rates. Bytes and operations
// are those that the headers in kernels/ state and the emulator's counters confirm; 1 GB is 1e9 bytes.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <algorithm>
#include <functional>
#include <string>
#include <vector>
#include "gpt.h"

// An operation of a step: how often it runs, and what one run moves and computes.
struct Entry {
    std::string name;
    double calls;    // a step
    double bytes;    // global memory, read and written once
    double products; // operations on tensor cores: 2 per multiplication and addition
    std::function<void()> run;
};

struct Bench {
    int L, NH, C, T, B, V, Vp, micro_batches, ranks;
    double bandwidth, rate, network; // bytes/s, operations/s, bytes/s that a rank sends
    bool markdown, measures;
    Ops ops;
    Memory memory;
    cudaStream_t stream;
};

static double elapsed_ms(cudaEvent_t start, cudaEvent_t stop) {
    float ms = 0;
    cuda_check(cudaEventSynchronize(stop));
    cuda_check(cudaEventElapsedTime(&ms, start, stop));
    return (double)ms;
}

// Median milliseconds of one run, of `repeats` after two that warm up.
static double time_ms(const Bench &bench, const std::function<void()> &run, int repeats) {
    cudaEvent_t start, stop;
    cuda_check(cudaEventCreate(&start));
    cuda_check(cudaEventCreate(&stop));
    std::vector<double> times;
    for (int i = -2; i < repeats; i++) {
        cuda_check(cudaEventRecord(start, bench.stream));
        run();
        cuda_check(cudaEventRecord(stop, bench.stream));
        const double ms = elapsed_ms(start, stop);
        if (i >= 0) times.push_back(ms);
    }
    cuda_check(cudaEventDestroy(start));
    cuda_check(cudaEventDestroy(stop));
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
}

template <class T> static T *buffer(Bench &bench, size_t count) {
    return (T *)memory_alloc(&bench.memory, MEMORY_ACTIVATIONS, bench.measures ? count * sizeof(T) : 0);
}

// Fills a buffer with small numbers that are not all alike; products of zeros would draw less power and run faster.
static void fill(floatX *to, size_t count) {
    std::vector<floatX> values(std::min(count, (size_t)1 << 20));
    for (size_t i = 0; i < values.size(); i++)
        values[i] = floatX_from(((float)(random_u32(7, i) >> 8) / 16777216.0f - 0.5f) * 0.1f);
    for (size_t done = 0; done < count; done += values.size())
        cuda_check(cudaMemcpy(to + done, values.data(), std::min(values.size(), count - done) * sizeof(floatX),
                              cudaMemcpyHostToDevice));
}

// The operations of one training step of one rank, in the order of gpt.h and zero.h.
static std::vector<Entry> entries(Bench &bench) {
    const size_t x = sizeof(floatX), g = sizeof(gradX), rows = (size_t)bench.B * (size_t)bench.T;
    const int B = bench.B, T = bench.T, C = bench.C, NH = bench.NH, HS = C / NH, V = bench.V, Vp = bench.Vp;
    const size_t n = rows * (size_t)C, c = (size_t)C, vp = (size_t)Vp;
    const double passes = bench.micro_batches, layers = passes * bench.L;
    const size_t parameters = vp * c + (size_t)T * c + (size_t)bench.L * (12 * c * c + 13 * c) + 2 * c;
    const size_t own = (parameters / (size_t)bench.ranks + 63) / 64 * 64;
    Ops *ops = &bench.ops;
    const Dropout none = {0, 0, 0, 0};
    const Vocabulary whole = {0, V};

    floatX *in = buffer<floatX>(bench, n), *in2 = buffer<floatX>(bench, n), *out = buffer<floatX>(bench, n);
    floatX *out2 = buffer<floatX>(bench, n), *wide = buffer<floatX>(bench, 4 * n),
           *wide2 = buffer<floatX>(bench, 4 * n);
    floatX *weight = buffer<floatX>(bench, std::max(4 * c * c, vp * c)), *logits = buffer<floatX>(bench, rows * vp);
    gradX *dweight = buffer<gradX>(bench, std::max(4 * c * c, vp * c)), *dbias = buffer<gradX>(bench, 4 * c);
    float *mean = buffer<float>(bench, rows), *rstd = buffer<float>(bench, rows), *losses = buffer<float>(bench, rows);
    float *lse = buffer<float>(bench, rows * (size_t)NH);
    int *tokens = buffer<int>(bench, rows);
    gradX *grads = buffer<gradX>(bench, parameters);
    floatX *params = buffer<floatX>(bench, own);
    float *master = buffer<float>(bench, own), *m = buffer<float>(bench, own), *v = buffer<float>(bench, own);
    double *sum = buffer<double>(bench, 1);
    if (bench.measures) {
        fill(in, n), fill(in2, n), fill(wide, 4 * n), fill(wide2, 4 * n), fill(logits, rows * vp);
        fill(weight, std::max(4 * c * c, vp * c));
        std::vector<int> ids(rows);
        for (size_t i = 0; i < rows; i++) ids[i] = (int)(random_u32(3, i) % (uint32_t)V);
        cuda_check(cudaMemcpy(tokens, ids.data(), rows * sizeof(int), cudaMemcpyHostToDevice));
    }

    std::vector<Entry> list;
    const auto add = [&](const char *name, double calls, double bytes, double products, std::function<void()> run) {
        Entry entry = {name, calls, bytes, products, run};
        list.push_back(entry);
    };
    // A linear layer of IN inputs and OUT outputs: each operand and result once.
    const double r = (double)rows, X = (double)x, G = (double)g, N = (double)n;
    const auto product = [&](double in_width, double out_width) { return 2 * r * in_width * out_width; };
    const auto linear_bytes = [&](double in_width, double out_width) {
        return X * (r * in_width + r * out_width + in_width * out_width);
    };
    const auto weight_bytes = [&](double in_width, double out_width) {
        return X * (r * in_width + r * out_width) + 2 * G * in_width * out_width;
    };
    const double D = (double)C;
    add("embedding forward", passes, 3 * N * X + 4 * r, 0,
        [=] { embedding_forward(ops, out, tokens, weight, weight, B, T, C, whole, none); });
    add("layer norm forward", layers + passes, 2 * N * X + 8 * r, 0,
        [=] { layernorm_forward(ops, out, mean, rstd, in, weight, weight, rows, C); });
    add("query, key, value", layers, linear_bytes(D, 3 * D), product(D, 3 * D),
        [=] { matmul_forward(ops, wide, in, weight, weight, rows, C, 3 * C); });
    // Causal: half of the T x T scores.
    add("attention forward", layers, 4 * N * X + 4 * r * NH, 2 * 2 * r * (T + 1) / 2 * D,
        [=] { attention_forward(ops, out, lse, wide, B, T, NH, HS, none); });
    add("attention projection", layers, linear_bytes(D, D), product(D, D),
        [=] { matmul_forward(ops, out, in, weight, weight, rows, C, C); });
    add("residual and layer norm", layers, 4 * N * X + 8 * r, 0,
        [=] { residual_layernorm_forward(ops, out, out2, mean, rstd, in, in2, weight, weight, rows, C, none); });
    add("MLP in, GELU", layers, linear_bytes(D, 4 * D) + 4 * N * X, product(D, 4 * D),
        [=] { matmul_gelu_forward(ops, wide, wide2, in, weight, weight, rows, C, 4 * C); });
    add("MLP out", layers, linear_bytes(4 * D, D), product(4 * D, D),
        [=] { matmul_forward(ops, out, wide, weight, weight, rows, 4 * C, C); });
    add("residual", layers, 3 * N * X, 0, [=] { residual_forward(ops, out, in, in2, n, none); });
    add("head", passes, linear_bytes(D, Vp), product(D, Vp),
        [=] { matmul_forward(ops, logits, in, weight, NULL, rows, C, Vp); });
    add("classifier", passes, 2 * r * Vp * X + 8 * r, 0,
        [=] { classifier(ops, logits, losses, tokens, rows, V, Vp, 1.0f / (float)rows, 1); });
    add("head backward, input", passes, linear_bytes(D, Vp), product(D, Vp),
        [=] { matmul_backward_input(ops, out, logits, weight, rows, C, Vp); });
    add("head backward, weight", passes, weight_bytes(D, Vp), product(D, Vp),
        [=] { matmul_backward_weight(ops, dweight, NULL, in, logits, rows, C, Vp, 1); });
    add("layer norm backward", 2 * layers + passes, 4 * N * X + 8 * r, 0,
        [=] { layernorm_backward(ops, out, 0, dbias, dbias, in2, in, weight, mean, rstd, rows, C, 1); });
    add("MLP out backward, GELU", layers, linear_bytes(4 * D, D) + 4 * N * X, product(4 * D, D),
        [=] { matmul_gelu_backward_input(ops, wide2, in, weight, wide, rows, 4 * C, C); });
    add("MLP out backward, weight", layers, weight_bytes(4 * D, D), product(4 * D, D),
        [=] { matmul_backward_weight(ops, dweight, dbias, wide, in, rows, 4 * C, C, 1); });
    add("MLP in backward, input", layers, linear_bytes(D, 4 * D), product(D, 4 * D),
        [=] { matmul_backward_input(ops, out, wide, weight, rows, C, 4 * C); });
    add("MLP in backward, weight", layers, weight_bytes(D, 4 * D), product(D, 4 * D),
        [=] { matmul_backward_weight(ops, dweight, dbias, in, wide, rows, C, 4 * C, 1); });
    add("projection backward, input", layers, linear_bytes(D, D), product(D, D),
        [=] { matmul_backward_input(ops, out, in, weight, rows, C, C); });
    add("projection backward, weight", layers, weight_bytes(D, D), product(D, D),
        [=] { matmul_backward_weight(ops, dweight, dbias, in, in2, rows, C, C, 1); });
    // Five products of the scores' size, and two again, since dq and dk, dv come from two kernels without atomics.
    add("attention backward", layers, 8 * N * X + 8 * r * NH, 7 * 2 * r * (T + 1) / 2 * D,
        [=] { attention_backward(ops, wide2, in, wide, in2, lse, B, T, NH, HS, none); });
    add("q, k, v backward, input", layers, linear_bytes(D, 3 * D), product(D, 3 * D),
        [=] { matmul_backward_input(ops, out, wide, weight, rows, C, 3 * C); });
    add("q, k, v backward, weight", layers, weight_bytes(D, 3 * D), product(D, 3 * D),
        [=] { matmul_backward_weight(ops, dweight, dbias, in, wide, rows, C, 3 * C, 1); });
    add("position embedding backward", passes, N * X + 2 * (double)T * D * G, 0,
        [=] { wpe_backward(ops, dweight, in, B, T, C, T, 1); });
    add("token embedding backward", passes, N * X + 2 * std::min(r, (double)V) * D * G, 0,
        [=] { wte_backward(ops, dweight, in, tokens, B, T, C, whole); });
    add("gradient norm", 1, (double)own * G, 0, [=] { sum_of_squares(ops, sum, grads, own, 0); });
    AdamW hyper;
    memset(&hyper, 0, sizeof hyper);
    hyper.learning_rate = 1e-4f, hyper.beta1 = 0.9f, hyper.beta2 = 0.95f, hyper.epsilon = 1e-8f;
    hyper.grad_scale = 1.0f, hyper.step = 1;
    const bool masters = x < sizeof(float); // gradient, master or parameter, m and v in; these and the parameter out
    add("AdamW", 1, (double)own * (G + 12 + 12 + (masters ? X : 0)), 0,
        [=] { adamw_update(ops, &hyper, params, masters ? master : NULL, m, v, grads, own, own); });
    return list;
}

static double floor_ms(const Bench &bench, const Entry &entry) {
    return 1e3 * entry.calls * std::max(entry.bytes / bench.bandwidth, entry.products / bench.rate);
}

// What the ranks send in a step, each over its own link: gradients and parameters once round the ring.
static double network_ms(const Bench &bench) {
    const double c = bench.C, parameters = (bench.Vp + bench.T) * c + bench.L * (12 * c * c + 13 * c) + 2 * c;
    const double around = (double)(bench.ranks - 1) / bench.ranks;
    return 1e3 * around * parameters * (double)(sizeof(gradX) + sizeof(floatX)) / bench.network;
}

static void measure_rates(Bench &bench) {
    const size_t bytes = (size_t)1 << 30;
    char *from = (char *)memory_alloc(&bench.memory, MEMORY_WORKSPACE, bytes);
    char *to = (char *)memory_alloc(&bench.memory, MEMORY_WORKSPACE, bytes);
    const double copy = time_ms(
        bench, [&] { cuda_check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, bench.stream)); }, 9);
    bench.bandwidth = 2.0 * (double)bytes / (copy * 1e-3);
    memory_free(&bench.memory, MEMORY_WORKSPACE, from, bytes);
    memory_free(&bench.memory, MEMORY_WORKSPACE, to, bytes);
    const size_t rows = 8192, wide = 8192;
    floatX *a = (floatX *)memory_alloc(&bench.memory, MEMORY_WORKSPACE, rows * wide * sizeof(floatX));
    floatX *b = (floatX *)memory_alloc(&bench.memory, MEMORY_WORKSPACE, wide * wide * sizeof(floatX));
    floatX *c = (floatX *)memory_alloc(&bench.memory, MEMORY_WORKSPACE, rows * wide * sizeof(floatX));
    fill(a, rows * wide), fill(b, wide * wide);
    const double product = time_ms(
        bench, [&] { matmul_forward(&bench.ops, c, a, b, NULL, rows, (int)wide, (int)wide); }, 9);
    bench.rate = 2.0 * (double)rows * (double)wide * (double)wide / (product * 1e-3);
    memory_free(&bench.memory, MEMORY_WORKSPACE, a, rows * wide * sizeof(floatX));
    memory_free(&bench.memory, MEMORY_WORKSPACE, b, wide * wide * sizeof(floatX));
    memory_free(&bench.memory, MEMORY_WORKSPACE, c, rows * wide * sizeof(floatX));
}

static void print_table(Bench &bench, std::vector<Entry> &list) {
    const double tokens = (double)bench.B * bench.T * bench.micro_batches;
    const char *edge = bench.markdown ? "| " : "", *bar = bench.markdown ? " | " : " ",
               *end = bench.markdown ? " |" : "";
    const auto line = [&](const std::string &name, const std::string &calls, double bytes, double products, double ms) {
        printf("%s%-27s%s%9s%s%14.0f%s%14.3f%s%10.2f%s", edge, name.c_str(), bar, calls.c_str(), bar, bytes / tokens,
               bar, products / tokens * 1e-6, bar, ms, end);
    };
    if (bench.markdown)
        printf("| operation | calls | bytes a token | MFLOP a token | floor, ms |\n|---|---:|---:|---:|---:|\n");
    else
        printf("%-27s %9s %14s %14s %10s%s\n", "operation", "calls", "bytes a token", "MFLOP a token", "floor, ms",
               bench.measures ? "       ms   share  of floor" : "");
    double bytes = 0, products = 0, least = 0, measured = 0;
    std::vector<double> times;
    for (const Entry &entry : list) {
        times.push_back(bench.measures ? entry.calls * time_ms(bench, entry.run, 9) : 0);
        measured += times.back();
    }
    for (size_t i = 0; i < list.size(); i++) {
        const Entry &entry = list[i];
        const double ms = floor_ms(bench, entry);
        line(entry.name, std::to_string((long)entry.calls), entry.calls * entry.bytes, entry.calls * entry.products,
             ms);
        if (bench.measures) printf(" %8.3f %6.1f%% %8.2f", times[i], 100 * times[i] / measured, ms / times[i]);
        printf("\n");
        bytes += entry.calls * entry.bytes;
        products += entry.calls * entry.products;
        least += ms;
    }
    line("sum", "", bytes, products, least);
    if (bench.measures) printf(" %8.3f %6.1f%% %8.2f", measured, 100.0, least / measured);
    printf("\n\nfloor of a step of %d x %d x %d tokens a rank: %.1f ms", bench.micro_batches, bench.B, bench.T, least);
    if (bench.ranks > 1) printf("; %d ranks send for %.1f ms, beside the computation", bench.ranks, network_ms(bench));
    printf("; at %.2f TB/s and %.0f TFLOP/s\n", bench.bandwidth * 1e-12, bench.rate * 1e-12);
}

static double number(const char *text) {
    char *end;
    const double value = strtod(text, &end);
    if (*end != '\0' || end == text || !(value > 0)) {
        fprintf(stderr, "bench_kernels: %s is not a positive number\n", text);
        exit(EXIT_INPUT);
    }
    return value;
}

int main(int argc, char **argv) {
    Bench bench = {};
    bench.L = 12, bench.NH = 12, bench.C = 768, bench.T = 1024, bench.B = 16, bench.V = 50257;
    bench.micro_batches = 1, bench.ranks = 1, bench.network = 450e9;
    for (int i = 1; i < argc; i++) {
        const std::string flag = argv[i];
        if (flag == "--markdown") {
            bench.markdown = true;
            continue;
        }
        if (i + 1 == argc) {
            fprintf(stderr, "bench_kernels: %s needs a value\n", argv[i]);
            return EXIT_INPUT;
        }
        const char *value = argv[++i];
        if (flag == "--preset" && strcmp(value, "1558M") == 0)
            bench.L = 48, bench.NH = 25, bench.C = 1600;
        else if (flag == "--preset" && strcmp(value, "124M") == 0)
            bench.L = 12, bench.NH = 12, bench.C = 768;
        else if (flag == "--layers")
            bench.L = (int)number(value);
        else if (flag == "--heads")
            bench.NH = (int)number(value);
        else if (flag == "--width")
            bench.C = (int)number(value);
        else if (flag == "--vocabulary")
            bench.V = (int)number(value);
        else if (flag == "--micro-batch")
            bench.B = (int)number(value);
        else if (flag == "--sequence-length")
            bench.T = (int)number(value);
        else if (flag == "--micro-batches")
            bench.micro_batches = (int)number(value);
        else if (flag == "--ranks")
            bench.ranks = (int)number(value);
        else if (flag == "--bandwidth")
            bench.bandwidth = number(value) * 1e9;
        else if (flag == "--rate")
            bench.rate = number(value) * 1e12;
        else if (flag == "--network")
            bench.network = number(value) * 1e9;
        else {
            fprintf(stderr, "bench_kernels: there is no option %s %s\n", argv[i - 1], value);
            return EXIT_INPUT;
        }
    }
    bench.Vp = (bench.V + 127) / 128 * 128;
    bench.measures = bench.bandwidth == 0 || bench.rate == 0;
    bench.memory.planning = !bench.measures;
    if (bench.measures) cuda_check(cudaStreamCreate(&bench.stream));
    const OpsShape shape = {bench.B, bench.T, bench.C, bench.NH, bench.V, bench.Vp, bench.B * bench.T};
    const OpsOptions options = {false, bench.measures};
    ops_init(&bench.ops, &bench.memory, &shape, &options, bench.stream);
    if (bench.measures) measure_rates(bench);
    std::vector<Entry> list = entries(bench);
    print_table(bench, list);
    return 0;
}
