/* The keyed permutation of 0..n-1 for one number; permutation.py states it in Python.

       key, n --> permutation_of --> permute_one (this file), block_* (permute.c) --> kernels that permute on their way */

#ifndef SIXFOLD_BLENDING_PERMUTE_H
#define SIXFOLD_BLENDING_PERMUTE_H

#include "kernels.h"

#define ROUNDS 6
#define LARGEST ((int64_t)1 << 53)
#define PERMUTED_AT_ONCE 1024

typedef struct {
    uint64_t round_key[ROUNDS];
    uint64_t size;
    uint64_t mask; /* of half a number */
    int half;      /* bits of it */
} Permutation;

/* The splitmix64 finaliser. Source: Steele, Lea, Flood 2014. */
INLINE uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

/* size is 1..2^53. */
INLINE Permutation permutation_of(uint64_t key, uint64_t size) {
    Permutation made = {.size = size, .half = 1};
    for (int round = 0; round < ROUNDS; round++)
        made.round_key[round] = mix(key + (uint64_t)(round + 1) * 0x9E3779B97F4A7C15u);
    if (size > 2) made.half = (65 - __builtin_clzll(size - 1)) / 2;
    made.mask = ((uint64_t)1 << made.half) - 1;
    return made;
}

/* One pass of the Feistel network over the numbers of 2 * half bits. */
INLINE uint64_t feistel(const Permutation *by, uint64_t x) {
    uint64_t left = x >> by->half, right = x & by->mask;
    for (int round = 0; round < ROUNDS; round++) {
        uint64_t scrambled = left ^ (mix(right ^ by->round_key[round]) & by->mask);
        left = right;
        right = scrambled;
    }
    return (left << by->half) | right;
}

/* The pass backwards. */
INLINE uint64_t feistel_back(const Permutation *by, uint64_t x) {
    uint64_t left = x >> by->half, right = x & by->mask;
    for (int round = ROUNDS - 1; round >= 0; round--) {
        uint64_t scrambled = right ^ (mix(left ^ by->round_key[round]) & by->mask);
        right = left;
        left = scrambled;
    }
    return (left << by->half) | right;
}

/* Where x < size goes: passes until the result is below size. */
INLINE uint64_t permute_one(const Permutation *by, uint64_t x) {
    do x = feistel(by, x);
    while (x >= by->size);
    return x;
}

/* Permute x[0..number-1] in place, number <= PERMUTED_AT_ONCE, or say which numbers are sent there (back). One function
   per level, compiled in permute.c alone: they are large. */
typedef void (*Block)(const Permutation *by, uint64_t *x, int number);
void block_plain(const Permutation *by, uint64_t *x, int number);
void block_avx2(const Permutation *by, uint64_t *x, int number);
void block_avx512(const Permutation *by, uint64_t *x, int number);
void back_plain(const Permutation *by, uint64_t *x, int number);
void back_avx2(const Permutation *by, uint64_t *x, int number);
void back_avx512(const Permutation *by, uint64_t *x, int number);

#endif
