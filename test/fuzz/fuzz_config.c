// Fuzz target: configuration files, options.h and config.h. The input is a JSON file. What is accepted is written as a
// complete configuration, which must read back as the same.
#include "fuzz_json.h"
#include "config.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static char program[] = "train_gpt";
    char *arguments[] = {program, (char *)fuzz_file("run.json", data, size), NULL};
    static Config config, again;
    Error error = {""};
    fuzz_begin(size);
    bool ok = config_read(&config, 2, arguments, &error);
    fuzz_end();
    fuzz_check(ok == (error.text[0] == '\0'));
    if (!ok) return 0;
    if (!config_check(&config, 1, 1, &error)) {
        fuzz_check(error.text[0] != '\0');
        error.text[0] = '\0';
    }
    arguments[1] = (char *)fuzz_path("again.json");
    fuzz_check(config_write(&config, arguments[1], &error));
    if (!config_read(&again, 2, arguments, &error)) {
        // A value that was worked out may be beyond what the option takes, or a number that has a name.
        fuzz_check(false);
    }
    OptionTable one = config_table(&config), two = config_table(&again);
    char *text = options_to_json(&one), *text_again = options_to_json(&two);
    fuzz_check(strcmp(text, text_again) == 0);
    free(text);
    free(text_again);
    return 0;
}

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned seed) {
    return fuzz_mutate_json(data, size, max_size, 0, seed);
}
