// checksum.h: a 64-bit checksum of a stream of bytes, for damage and for knowing a content again; no defence against
// forgery.
//
// Words of 8 bytes go to four lanes in turn, each mixed into what its lane holds, so that a core takes several bytes in
// a cycle; a last block that is not full is padded with zeros, and the length is mixed in.
#ifndef CHECKSUM_H
#define CHECKSUM_H

#include <string.h>
#include "random.h"

enum { CHECKSUM_LANES = 4, CHECKSUM_BLOCK = 8 * CHECKSUM_LANES };

typedef struct {
    uint64_t lanes[CHECKSUM_LANES];
    uint64_t bytes;
    unsigned char rest[CHECKSUM_BLOCK]; // bytes % CHECKSUM_BLOCK of them
} Checksum;

static inline void checksum_begin(Checksum *sum) {
    memset(sum, 0, sizeof *sum);
}

static inline void checksum_block(Checksum *sum, const unsigned char *block) {
    for (int i = 0; i < CHECKSUM_LANES; i++) {
        uint64_t word;
        memcpy(&word, block + 8 * i, 8);
        sum->lanes[i] = random_mix(sum->lanes[i] + 0x9e3779b97f4a7c15ull) ^ word;
    }
}

static inline void checksum_add(Checksum *sum, const void *data, size_t bytes) {
    const unsigned char *at = (const unsigned char *)data;
    const size_t held = sum->bytes % CHECKSUM_BLOCK;
    sum->bytes += bytes;
    if (held > 0) {
        const size_t room = CHECKSUM_BLOCK - held, n = bytes < room ? bytes : room;
        memcpy(sum->rest + held, at, n);
        if (n < room) return;
        checksum_block(sum, sum->rest);
        at += n;
        bytes -= n;
    }
    for (; bytes >= CHECKSUM_BLOCK; at += CHECKSUM_BLOCK, bytes -= CHECKSUM_BLOCK) checksum_block(sum, at);
    memcpy(sum->rest, at, bytes);
}

// The checksum of what was added so far.
static inline uint64_t checksum_value(const Checksum *sum) {
    Checksum end = *sum;
    const size_t held = end.bytes % CHECKSUM_BLOCK;
    if (held > 0) {
        memset(end.rest + held, 0, CHECKSUM_BLOCK - held);
        checksum_block(&end, end.rest);
    }
    uint64_t value = random_mix(end.bytes + 1);
    for (int i = 0; i < CHECKSUM_LANES; i++) value = random_mix(value + end.lanes[i]) + 0x9e3779b97f4a7c15ull;
    return value;
}

#endif
