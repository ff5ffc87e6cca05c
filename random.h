// random.h: random numbers that depend on what they are for and never on who draws them.
//
// Every number is a pure function of (key, index): no state, so initialisation, dropout, shuffling and sampling come
// out the same on any number of ranks, in any order, on any device. The generator is Philox4x32-10 (Salmon, Moraes,
// Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011): a key of 64 bits and a counter of 128, four
// 32-bit words out. A key comes from the seed, a purpose and two numbers (a step, a tensor), see random_key().
#ifndef RANDOM_H
#define RANDOM_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __CUDACC__
#define HOST_DEVICE static inline __host__ __device__
#else
#define HOST_DEVICE static inline
#endif

typedef enum {
    RANDOM_INIT = 1, // a: tensor id
    RANDOM_DROPOUT,  // a: step, b: site
    RANDOM_SHUFFLE,  // a: epoch
    RANDOM_SAMPLE,   // a: step
    RANDOM_ROUND,    // a: step, b: tensor id
} RandomPurpose;

typedef struct {
    uint32_t word[4];
} Random4;

// The finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014): a bijection of 64 bits in which every input bit
// changes every output bit with probability one half.
HOST_DEVICE uint64_t random_mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

// The key for a purpose; a and b tell apart what is drawn for it.
HOST_DEVICE uint64_t random_key(uint64_t seed, RandomPurpose purpose, uint64_t a, uint64_t b) {
    uint64_t key = random_mix(seed + 0x9e3779b97f4a7c15ull * (uint64_t)purpose);
    key = random_mix(key + a + 0x9e3779b97f4a7c15ull);
    return random_mix(key + b + 0x9e3779b97f4a7c15ull);
}

// Philox4x32-10: four uniform words for one counter.
HOST_DEVICE Random4 random4(uint64_t key, uint64_t counter) {
    uint32_t c0 = (uint32_t)counter, c1 = (uint32_t)(counter >> 32), c2 = 0, c3 = 0;
    uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = (uint64_t)0xD2511F53u * c0, p1 = (uint64_t)0xCD9E8D57u * c2;
        uint32_t n0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0, n2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c1 = (uint32_t)p1;
        c3 = (uint32_t)p0;
        c0 = n0;
        c2 = n2;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    Random4 out = {{c0, c1, c2, c3}};
    return out;
}

// Word `index` of the stream of a key: element i of a tensor uses random_u32(key, i).
HOST_DEVICE uint32_t random_u32(uint64_t key, uint64_t index) {
    return random4(key, index >> 2).word[index & 3];
}

// Uniform in (0, 1): 24 bits, never 0 or 1, so that log() of it is finite.
HOST_DEVICE float random_uniform(uint32_t word) {
    return ((float)(word >> 8) + 0.5f) * (1.0f / 16777216.0f);
}

// Standard normal variate `index` of a key, by Box and Muller (1958): variates 2k and 2k+1 share two uniform words.
// In double precision, so that C libraries differ at most in the last bit of the float.
static inline float random_normal(uint64_t key, uint64_t index) {
    Random4 r = random4(key, index >> 2);
    int pair = (int)(index & 2);
    double radius = sqrt(-2.0 * log((double)random_uniform(r.word[pair])));
    double angle = 6.283185307179586 * (double)random_uniform(r.word[pair + 1]);
    return (float)(radius * ((index & 1) ? sin(angle) : cos(angle)));
}

#endif
