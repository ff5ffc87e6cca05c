// Fuzz target: manifests of checkpoints, manifest.h. The input is a manifest.json. What is accepted describes a grid of
// ranks that layout.h can make, and is written and read back as the same.
#include "fuzz_json.h"
#include "manifest.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    fuzz_file("manifest.json", data, size);
    const char *folder = fuzz_path(".");
    Manifest manifest, again;
    Error error = {""};
    fuzz_begin(size);
    const bool ok = manifest_read(&manifest, folder, &error);
    fuzz_end();
    fuzz_check(ok == (error.text[0] == '\0'));
    if (!ok) {
        fuzz_check(manifest.files == NULL && manifest.config == NULL);
        return 0;
    }
    const Grid *grid = &manifest.grid;
    fuzz_check(manifest.n_files == grid->tensor * grid->data * grid->pipeline);
    const LayoutCut cut = {grid->data,        grid->tensor, grid->tensor - 1, grid->pipeline, manifest.pipeline_chunks,
                           grid->pipeline - 1};
    Layout layout;
    layout_init(&layout, &manifest.shape, &cut);
    fuzz_check(layout.n_units > 0 && layout.size >= (size_t)manifest.shape.n_embd);
    layout_free(&layout);
    fuzz_check(!manifest_verify(&manifest, folder, 0, 1, &error)); // its files are not there

    static Config config;
    OptionTable table = config_table(&config);
    options_set_defaults(&table);
    free(manifest_changes(&manifest, &config));

    error.text[0] = '\0';
    fuzz_check(manifest_write(&manifest, folder, "{}", &error) && manifest_read(&again, folder, &error));
    ManifestField one[MANIFEST_FIELDS], two[MANIFEST_FIELDS];
    manifest_fields(&manifest, one);
    manifest_fields(&again, two);
    for (int i = 0; i < MANIFEST_FIELDS; i++)
        fuzz_check(one[i].value != NULL ? *one[i].value == *two[i].value : *one[i].number == *two[i].number);
    fuzz_check(memcmp(manifest.files, again.files, (size_t)manifest.n_files * sizeof(ManifestFile)) == 0);
    fuzz_check(manifest.data.hash == again.data.hash);
    manifest_free(&manifest);
    manifest_free(&again);
    return 0;
}

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned seed) {
    return fuzz_mutate_json(data, size, max_size, 0, seed);
}
