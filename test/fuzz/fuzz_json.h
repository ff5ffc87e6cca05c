// fuzz_json.h: mutations that know where a JSON text stands, for targets whose input holds one, perhaps after its
// length: most random changes to such an input break the length or the syntax, and never get further.
#ifndef FUZZ_JSON_H
#define FUZZ_JSON_H

#include <ctype.h>
#include "fuzz.h"

size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t max_size); // libFuzzer's own

static inline uint32_t fuzz_draw(uint32_t *state, uint32_t n) {
    *state = *state * 1664525u + 1013904223u;
    return (*state >> 8) % n;
}

// A random run of digits in a text: where it begins; its length is 0 if there is none.
static inline size_t fuzz_pick_number(const uint8_t *text, size_t length, uint32_t *draw, size_t *digits) {
    size_t picked = 0;
    uint32_t seen = 0;
    *digits = 0;
    for (size_t i = 0, end; i < length; i = end + 1) {
        for (end = i; end < length && isdigit(text[end]); end++) {
        }
        if (end == i || fuzz_draw(draw, ++seen) != 0) continue;
        picked = i;
        *digits = end - i;
    }
    return picked;
}

// Replaces a number in a text by one near it, by one that is known for trouble, or by another one of the text.
static inline size_t fuzz_mutate_number(uint8_t *text, size_t length, size_t room, uint32_t *draw) {
    static const char *const trouble[] = {"0",
                                          "1",
                                          "-1",
                                          "255",
                                          "65535",
                                          "65536",
                                          "2147483647",
                                          "2147483648",
                                          "4294967295",
                                          "4294967296",
                                          "9007199254740992",
                                          "9007199254740993",
                                          "9223372036854775808",
                                          "18446744073709551616",
                                          "1e308",
                                          "1e999",
                                          "0.5"};
    size_t digits;
    const size_t at = fuzz_pick_number(text, length, draw, &digits);
    if (digits == 0) return length;
    char number[32] = "", old[20] = "";
    memcpy(old, text + at, digits < 19 ? digits : 19);
    const uint32_t way = fuzz_draw(draw, 4);
    if (way == 0) {
        snprintf(number, sizeof number, "%s", trouble[fuzz_draw(draw, sizeof trouble / sizeof trouble[0])]);
    } else if (way == 1) {
        size_t other;
        const size_t from = fuzz_pick_number(text, length, draw, &other);
        memcpy(number, text + from, other < 19 ? other : 19);
    } else {
        const long long step = (long long)fuzz_draw(draw, 9) - 4;
        snprintf(number, sizeof number, "%lld",
                 way == 2 ? (long long)(strtoull(old, NULL, 10) + (uint64_t)step)
                          : (long long)(strtoull(old, NULL, 10) * (uint64_t)(step + 4)));
    }
    const size_t n = strlen(number);
    if (length - digits + n > room) return length;
    memmove(text + at + n, text + at + digits, length - at - digits);
    memcpy(text + at, number, n);
    return length - digits + n;
}

// Mutates an input that begins with the little-endian length, of `prefix` bytes, of the JSON text that follows; with no
// prefix the text is all of the input.
static inline size_t fuzz_mutate_json(uint8_t *data, size_t size, size_t max_size, size_t prefix, uint32_t seed) {
    uint32_t draw = seed;
    uint64_t length = size;
    if (prefix > 0) {
        length = 0;
        memcpy(&length, data, prefix < size ? prefix : size);
    }
    if (size < prefix || length > size - prefix || length == 0 || fuzz_draw(&draw, 4) == 0)
        return LLVMFuzzerMutate(data, size, max_size);
    const size_t rest = size - prefix - length;
    uint8_t *text = (uint8_t *)malloc(max_size);
    if (text == NULL) abort();
    memcpy(text, data + prefix, length);
    const size_t room = max_size - prefix - rest;
    size_t new_length =
        fuzz_draw(&draw, 2) == 0 ? LLVMFuzzerMutate(text, length, room) : fuzz_mutate_number(text, length, room, &draw);
    if (prefix == 2 && new_length > 65535) new_length = 65535;
    memmove(data + prefix + new_length, data + prefix + length, rest);
    memcpy(data + prefix, text, new_length);
    const uint64_t stored = new_length;
    memcpy(data, &stored, prefix);
    free(text);
    return prefix + new_length + rest;
}

#endif
