// json.h: what the readers of other programs' JSON share: parsing, unique keys, whole numbers.
//
// Such JSON is untrusted. It is parsed by cJSON, which refuses nesting beyond CJSON_NESTING_LIMIT; what cJSON lets pass
// is refused here: a zero byte or \u0000, which would end a text early, and a key that an object has twice.
#ifndef JSON_H
#define JSON_H

#include <cjson/cJSON.h>
#include <math.h>
#include <stdint.h>
#include <string.h>
#include "error.h"
#include "options.h"

enum { JSON_NAME_SHOWN = 80 }; // bytes of a foreign name that a message quotes

static inline int json_compare_keys(const void *a, const void *b) {
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

// Whether every key of an object occurs once. `what` names the object in the message.
static inline bool json_unique(const cJSON *object, const char *path, const char *what, Error *error) {
    size_t count = 0, n = 0;
    const cJSON *item = NULL;
    cJSON_ArrayForEach(item, object) count++;
    if (count < 2) return true;
    const char **keys = (const char **)malloc(count * sizeof(char *));
    if (keys == NULL) die("no memory for the %zu keys of %s", count, path);
    cJSON_ArrayForEach(item, object) keys[n++] = item->string;
    qsort(keys, n, sizeof keys[0], json_compare_keys);
    bool ok = true;
    for (size_t i = 1; i < n && ok; i++)
        if (strcmp(keys[i - 1], keys[i]) == 0)
            ok = error_set(error, "%s: %s has \"%.*s\" twice", path, what, (int)JSON_NAME_SHOWN, keys[i]);
    free(keys);
    return ok;
}

// Parses a text of `length` bytes, with a 0 after them, that must hold one object. NULL on errors; `path` is for
// messages, `what` names the text in them.
static inline cJSON *json_parse(const char *text, size_t length, const char *path, const char *what, Error *error) {
    if (strlen(text) != length || strstr(text, "\\u0000") != NULL) {
        error_set(error, "%s: %s holds a zero character, which would end a text early", path, what);
        return NULL;
    }
    const char *stop = text;
    cJSON *root = cJSON_ParseWithOpts(text, &stop, true);
    if (root == NULL)
        options_json_error(path, text, stop, error);
    else if (!cJSON_IsObject(root))
        error_set(error, "%s: %s is not a JSON object", path, what);
    else if (json_unique(root, path, what, error))
        return root;
    cJSON_Delete(root);
    return NULL;
}

// Reads a JSON file that holds one object. NULL on errors.
static inline cJSON *json_read_file(const char *path, Error *error) {
    char *text = options_read_text(path, error);
    if (text == NULL) return NULL;
    cJSON *root = json_parse(text, strlen(text), path, "this file", error);
    free(text);
    return root;
}

// Whether an item is a whole number from 0 to 2^53, which a double holds exactly.
static inline bool json_count(const cJSON *item, uint64_t *count) {
    if (!cJSON_IsNumber(item)) return false;
    const double x = item->valuedouble;
    if (!(x >= 0 && x <= 9007199254740992.0) || x != floor(x)) return false;
    *count = (uint64_t)x;
    return true;
}

#endif
