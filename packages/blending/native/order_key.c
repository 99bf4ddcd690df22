/* BLAKE2b of the order's keys, compiled once: its rounds are unrolled.

       names, numbers --> key_start, key_of (this file) --> finder.c, search.c, ranges.c */

#include "order_key.h"

#include <string.h>

static const uint64_t BLAKE2B_START[8] = {
    0x6A09E667F3BCC908u, 0xBB67AE8584CAA73Bu, 0x3C6EF372FE94F82Bu, 0xA54FF53A5F1D36F1u,
    0x510E527FADE682D1u, 0x9B05688C2B3E6C1Fu, 0x1F83D9ABFB41BD6Bu, 0x5BE0CD19137E2179u,
};

static const uint8_t BLAKE2B_ORDER[10][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4}, {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13}, {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11}, {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5}, {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0},
};

INLINE uint64_t rotated(uint64_t x, int bits) { return x >> bits | x << (64 - bits); }

INLINE void blake2b_mix(uint64_t *v, int a, int b, int c, int d, uint64_t x, uint64_t y) {
    v[a] += v[b] + x;
    v[d] = rotated(v[d] ^ v[a], 32);
    v[c] += v[d];
    v[b] = rotated(v[b] ^ v[c], 24);
    v[a] += v[b] + y;
    v[d] = rotated(v[d] ^ v[a], 16);
    v[c] += v[d];
    v[b] = rotated(v[b] ^ v[c], 63);
}

/* One block into the state; hashed counts the bytes of the text up to its end. */
static void blake2b_block(uint64_t *state, const unsigned char *block, uint64_t hashed, int last) {
    uint64_t v[16], m[16];
    for (int at = 0; at < 16; at++) { /* little-endian words */
        m[at] = 0;
        for (int byte = 7; byte >= 0; byte--) m[at] = m[at] << 8 | block[8 * at + byte];
    }
    for (int at = 0; at < 8; at++) v[at] = state[at], v[8 + at] = BLAKE2B_START[at];
    v[12] ^= hashed;
    if (last) v[14] = ~v[14];
#pragma GCC unroll 12
    for (int round = 0; round < 12; round++) {
        const uint8_t *s = BLAKE2B_ORDER[round % 10];
        for (int column = 0; column < 4; column++)
            blake2b_mix(v, column, 4 + column, 8 + column, 12 + column, m[s[2 * column]], m[s[2 * column + 1]]);
        for (int column = 0; column < 4; column++)
            blake2b_mix(v, column, 4 + (column + 1) % 4, 8 + (column + 2) % 4, 12 + (column + 3) % 4,
                        m[s[8 + 2 * column]], m[s[9 + 2 * column]]);
    }
    for (int at = 0; at < 8; at++) state[at] ^= v[at] ^ v[8 + at];
}

KeyStart key_start(const unsigned char *text, size_t bytes) {
    KeyStart start = {.rest_bytes = (int)(bytes % KEY_BLOCK)};
    memcpy(start.state, BLAKE2B_START, sizeof start.state);
    start.state[0] ^= 0x01010000u ^ 8; /* no key, a digest of 8 bytes */
    size_t full = bytes - (size_t)start.rest_bytes;
    for (size_t at = 0; at < full; at += KEY_BLOCK) blake2b_block(start.state, text + at, start.hashed += KEY_BLOCK, 0);
    if (start.rest_bytes) memcpy(start.rest, text + full, (size_t)start.rest_bytes);
    return start;
}

uint64_t key_of(const KeyStart *start, const int64_t *numbers, int count) {
    unsigned char text[2 * KEY_BLOCK] = {0}; /* 127 bytes and three times 21 at most */
    uint64_t state[8];
    int bytes = start->rest_bytes;
    memcpy(state, start->state, sizeof state);
    memcpy(text, start->rest, (size_t)bytes);
    for (int at = 0; at < count; at++) {
        unsigned char digits[20];
        int some = 0;
        for (uint64_t left = (uint64_t)numbers[at]; some == 0 || left; left /= 10)
            digits[some++] = (unsigned char)('0' + left % 10);
        text[bytes++] = 0x1f;
        while (some) text[bytes++] = digits[--some];
    }
    uint64_t hashed = start->hashed;
    if (bytes > KEY_BLOCK) blake2b_block(state, text, hashed + KEY_BLOCK, 0);
    blake2b_block(state, text + (bytes > KEY_BLOCK ? KEY_BLOCK : 0), hashed + (uint64_t)bytes, 1);
    return state[0];
}
