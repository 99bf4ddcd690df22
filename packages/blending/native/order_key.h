/* Keys of the order: the first 8 bytes of BLAKE2b-64 of a text. Source: RFC 7693; permutation.py states it.

       names --> KeyStart; numbers --> key_of (this file, order_key.c) --> finder.c, search.c, ranges.c

   What all keys of a dataset begin with is hashed once, as far as it fills blocks of 128 bytes. */

#ifndef SIXFOLD_BLENDING_ORDER_KEY_H
#define SIXFOLD_BLENDING_ORDER_KEY_H

#include "kernels.h"

#define KEY_BLOCK 128
#define KEY_NUMBERS 3 /* at most, behind the names */

typedef struct {
    uint64_t state[8];
    uint64_t hashed; /* bytes in state */
    unsigned char rest[KEY_BLOCK];
    int rest_bytes; /* below KEY_BLOCK */
} KeyStart;

/* What every key begins with: the version and the names, joined. */
KeyStart key_start(const unsigned char *text, size_t bytes);

/* The key of those names and some numbers >= 0, at least one. */
uint64_t key_of(const KeyStart *start, const int64_t *numbers, int count);

#endif
