// The flat layout: alignment, padding, shards, tensor-parallel slices and global indices.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include "layout.h"

static void check_units(const Layout *layout) {
    size_t at = 0, elements = 0;
    const size_t grain = (size_t)layout->cut.data_parallel * LAYOUT_ALIGN;
    for (int u = 0; u < layout->n_units; u++) {
        const Unit *unit = &layout->units[u];
        assert_int_equal(unit->offset, at);
        assert_int_equal(unit->size % grain, 0);
        size_t end = 0;
        bool vectors = false;
        for (int t = 0; t < unit->n_tensors; t++) {
            const Tensor *tensor = &unit->tensors[t];
            assert_int_equal(tensor->offset % LAYOUT_ALIGN, 0);
            assert_true(tensor->offset >= end);
            assert_int_equal(tensor->size, tensor->outer * tensor->sliced * tensor->inner);
            end = tensor->offset + tensor->size;
            // Matrices first: weight decay covers one range.
            assert_false(vectors && tensor->matrix);
            vectors = vectors || !tensor->matrix;
            assert_int_equal(tensor->matrix, end <= unit->decay_size);
            TensorRun run;
            for (size_t r = 0; tensor_run(tensor, r, &run); r++) elements += run.count;
        }
        assert_true(end <= unit->size && unit->size < end + grain);
        at += unit->size;
    }
    assert_int_equal(layout->size, at);
    if (layout->cut.tensor_parallel * layout->cut.pipeline_parallel == 1)
        assert_int_equal(elements, layout->parameters);
}

static void every_shape_and_rank_count(void **state) {
    (void)state;
    static const ModelShape shapes[] = {{4, 4, 128, 64, 256},
                                        {2, 3, 48, 32, 65},
                                        {12, 12, 768, 1024, 50257},
                                        {1, 1, 1, 1, 1},
                                        {48, 25, 1600, 1024, 50257}};
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++)
        for (int ranks = 1; ranks <= 64; ranks++) {
            Layout layout;
            LayoutCut cut = layout_whole(ranks);
            layout_init(&layout, &shapes[i], &cut);
            check_units(&layout);
            layout_free(&layout);
        }
}

// Published counts: GPT-2 124M has 124,439,808 parameters; with 50304 rows of wte 124,475,904 (llm.c).
static void published_counts(void **state) {
    (void)state;
    const ModelShape gpt2 = {12, 12, 768, 1024, 50257}, padded = {12, 12, 768, 1024, 50304};
    const ModelShape xl = {48, 25, 1600, 1024, 50257};
    assert_int_equal(model_parameters(&gpt2), 124439808);
    assert_int_equal(model_parameters(&padded), 124475904);
    assert_int_equal(model_parameters(&xl), 1557611200);
}

// Sizes beyond 32 bits: GPT-3 175B.
static void large_models(void **state) {
    (void)state;
    const ModelShape shape = {96, 96, 12288, 2048, 50257};
    Layout layout;
    const LayoutCut cut = layout_whole(1000);
    layout_init(&layout, &shape, &cut);
    check_units(&layout);
    assert_int_equal(layout.parameters, 174604259328ull);
    layout_free(&layout);
}

// The slices of all tensor ranks cover every element of the unsliced tensor exactly once.
static void tensor_slices_cover(void **state) {
    (void)state;
    const ModelShape shape = {1, 4, 16, 8, 65};
    for (int ranks = 1; ranks <= 4; ranks *= 2) {
        unsigned char *seen[2 + BLOCK_TENSORS + FINAL_TENSORS] = {0};
        size_t full[2 + BLOCK_TENSORS + FINAL_TENSORS] = {0};
        int replicas[2 + BLOCK_TENSORS + FINAL_TENSORS] = {0};
        for (int rank = 0; rank < ranks; rank++) {
            Layout layout;
            LayoutCut cut = layout_whole(3);
            cut.tensor_parallel = ranks;
            cut.tensor_rank = rank;
            layout_init(&layout, &shape, &cut);
            check_units(&layout);
            assert_int_equal(layout.padded_vocab % (128 * ranks), 0);
            for (int u = 0; u < layout.n_units; u++)
                for (int t = 0; t < layout.units[u].n_tensors; t++) {
                    const Tensor *tensor = &layout.units[u].tensors[t];
                    const int id = tensor->id;
                    full[id] = tensor->outer * tensor->sliced_full * tensor->inner;
                    if (seen[id] == NULL) seen[id] = calloc(full[id], 1);
                    // Replicated tensors are seen whole by every rank.
                    replicas[id] = tensor->sliced == tensor->sliced_full && ranks > 1 ? ranks : 1;
                    TensorRun run;
                    for (size_t r = 0; tensor_run(tensor, r, &run); r++) {
                        assert_true(run.local + run.count <= tensor->size);
                        for (size_t i = 0; i < run.count; i++) {
                            assert_true(run.global + i < full[id]);
                            seen[id][run.global + i]++;
                        }
                    }
                }
            layout_free(&layout);
        }
        for (int id = 0; id < 2 + BLOCK_TENSORS + FINAL_TENSORS; id++) {
            assert_non_null(seen[id]);
            for (size_t i = 0; i < full[id]; i++) assert_int_equal(seen[id][i], replicas[id]);
            free(seen[id]);
        }
    }
}

// A pipeline stage keeps its units, with the ids that they have in the whole model.
static void stages_keep_ids(void **state) {
    (void)state;
    const ModelShape shape = {4, 2, 8, 8, 10};
    Layout whole, last;
    LayoutCut cut = layout_whole(2);
    layout_init(&whole, &shape, &cut);
    cut.pipeline_parallel = 2;
    cut.pipeline_rank = 1;
    layout_init(&last, &shape, &cut);
    assert_int_equal(last.n_units, 4); // wte (the head is tied to it), two blocks, lnf
    assert_int_equal(last.wpe, -1);
    assert_int_equal(last.n_chunks, 1);
    const Unit *block = &last.units[last.chunks[0].first_unit];
    assert_int_equal(block->layer, 2);
    assert_int_equal(block->tensors[QKV_BIAS].id, whole.units[whole.chunks[0].first_unit + 2].tensors[QKV_BIAS].id);
    assert_int_equal(last.units[last.final].tensors[LNF_BIAS].id, whole.units[whole.final].tensors[LNF_BIAS].id);
    layout_free(&whole);
    layout_free(&last);
}

// The stages of every pipeline cover the blocks once, in order, each with one at least; the ranks' units add up to the
// model and a second wte; and no other cut of as many stages has a shorter slowest one.
static void stages_cover_and_balance(void **state) {
    (void)state;
    for (int L = 1; L <= 14; L++)
        for (int C = 1; C <= 4096; C *= 8)
            for (int P = 1; P <= L; P++)
                for (int V = 1; P * V <= L && (P > 1 || V == 1); V++) {
                    const ModelShape shape = {L, 1, C, 4, 50257};
                    const int stages = P * V;
                    const double head = (double)shape.vocab_size / (12.0 * C);
                    double slowest = 0;
                    for (int s = 0, at = 0; s < stages; s++) {
                        assert_int_equal(layout_stage_begin(&shape, stages, s), at);
                        const int end = layout_stage_begin(&shape, stages, s + 1);
                        assert_true(end > at);
                        slowest = fmax(slowest, end - at + (s == stages - 1 ? head : 0));
                        at = end;
                    }
                    assert_int_equal(layout_stage_begin(&shape, stages, stages), L);
                    for (int last = 1; last <= L - stages + 1 && stages > 1; last++)
                        assert_true(slowest <= fmax(last + head, ceil((double)(L - last) / (stages - 1))));
                    int units = 0;
                    for (int p = 0; p < P; p++) {
                        LayoutCut cut = layout_whole(3);
                        cut.pipeline_parallel = P;
                        cut.pipeline_chunks = V;
                        cut.pipeline_rank = p;
                        Layout layout;
                        layout_init(&layout, &shape, &cut);
                        check_units(&layout);
                        units += layout.n_units;
                        layout_free(&layout);
                    }
                    assert_int_equal(units, L + 3 + (P > 1));
                }
}

// What tensor ranks hold in common is the end of a unit: vectors, and nothing that is sliced.
static void replicated_tensors_are_one_range(void **state) {
    (void)state;
    const ModelShape shape = {2, 4, 24, 8, 65};
    for (int ranks = 1; ranks <= 4; ranks *= 2) {
        LayoutCut cut = layout_whole(3);
        cut.tensor_parallel = ranks;
        Layout layout;
        layout_init(&layout, &shape, &cut);
        for (int u = 0; u < layout.n_units; u++) {
            const Unit *unit = &layout.units[u];
            for (int t = 0; t < unit->n_tensors; t++)
                assert_int_equal(unit->tensors[t].offset >= unit->replicated, !unit->tensors[t].is_sliced);
        }
        layout_free(&layout);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_shape_and_rank_count),
        cmocka_unit_test(published_counts),
        cmocka_unit_test(large_models),
        cmocka_unit_test(tensor_slices_cover),
        cmocka_unit_test(stages_keep_ids),
        cmocka_unit_test(stages_cover_and_balance),
        cmocka_unit_test(replicated_tensors_are_one_range),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
