/* The shuffle of numpy.random.RandomState, several times faster: the same numbers drawn, the same order left.

       state of MT19937, array --> shuffle (this file) --> megatron/document_index.py

   For i = n-1 down to 1: draw j in 0..i and swap places i and j. A j is 32 bits, of which the low ones under the mask
   of i are kept, drawn again while it is above i; 64 bits, the high word first, once i > 2^32-1. Draws do not depend on
   what is shuffled, so they are made a block ahead, and the places of a block are fetched while the block before is
   swapped. */

#include "kernels.h"

#include <string.h>

#define WORDS 624 /* of MT19937's state; Matsumoto, Nishimura 1998 */
#define MIDDLE 397
#define BLOCK 256 /* swaps whose places are drawn and fetched together */

typedef struct {
    uint32_t *key;         /* (WORDS,) */
    uint32_t words[WORDS]; /* what the state gives, tempered */
    int64_t next;          /* of words; WORDS: none is left */
    void (*refill)(uint32_t *key, uint32_t *words);
} Twister;

INLINE uint32_t twisted(uint32_t one, uint32_t following, uint32_t ahead) {
    uint32_t joined = (one & 0x80000000u) | (following & 0x7fffffffu);
    return ahead ^ (joined >> 1) ^ ((0u - (joined & 1)) & 0x9908b0dfu);
}

INLINE void temper(const uint32_t *key, uint32_t *words) {
    for (int at = 0; at < WORDS; at++) {
        uint32_t y = key[at];
        y ^= y >> 11;
        y ^= (y << 7) & 0x9d2c5680u;
        y ^= (y << 15) & 0xefc60000u;
        words[at] = y ^ (y >> 18);
    }
}

/* The next state, and its words. */
INLINE void refill(uint32_t *key, uint32_t *words) {
    for (int at = 0; at < WORDS - MIDDLE; at++) key[at] = twisted(key[at], key[at + 1], key[at + MIDDLE]);
    for (int at = WORDS - MIDDLE; at < WORDS - 1; at++)
        key[at] = twisted(key[at], key[at + 1], key[at + MIDDLE - WORDS]);
    key[WORDS - 1] = twisted(key[WORDS - 1], key[0], key[MIDDLE - 1]);
    temper(key, words);
}

static void refill_plain(uint32_t *key, uint32_t *words) { refill(key, words); }
AVX2 static void refill_avx2(uint32_t *key, uint32_t *words) { refill(key, words); }
AVX512 static void refill_avx512(uint32_t *key, uint32_t *words) { refill(key, words); }

static uint32_t draw(Twister *twister) {
    if (twister->next == WORDS) {
        twister->refill(twister->key, twister->words);
        twister->next = 0;
    }
    return twister->words[twister->next++];
}

INLINE uint64_t mask_of(uint64_t i) { return ~(uint64_t)0 >> __builtin_clzll(i | 1); }

/* Places for i = top, top - 1, ..., number of them, all below 2^32 and all under one mask. No branch on a refusal: it
   would be guessed wrong; what is refused is written over. */
static void draw_places(Twister *twister, uint64_t top, int number, uint64_t *place) {
    uint32_t mask = (uint32_t)mask_of(top), i = (uint32_t)top;
    for (int made = 0; made < number;) {
        place[made] = draw(twister) & mask;
        made += place[made] <= i - (uint32_t)made;
        int64_t next = twister->next;
        /* Each word gives at most one place. */
        int64_t stop = next + (number - made) < WORDS ? next + (number - made) : WORDS;
        for (; next < stop; next++) {
            uint32_t some = twister->words[next] & mask;
            place[made] = some;
            made += some <= i - (uint32_t)made;
        }
        twister->next = next;
    }
}

static void draw_wide_places(Twister *twister, uint64_t top, int number, uint64_t *place) {
    uint64_t mask = mask_of(top);
    for (int made = 0; made < number;) {
        uint64_t high = draw(twister);
        place[made] = (high << 32 | draw(twister)) & mask;
        made += place[made] <= top - (uint64_t)made;
    }
}

/* Draw the places for i = top, top - 1, ..., lowest, at most BLOCK, and fetch them; how many they are. */
INLINE int draw_block(Twister *twister, uint64_t top, uint64_t lowest, uint64_t *place, const char *items, int bytes) {
    uint64_t under_mask = (mask_of(top) >> 1) + 1, bottom = under_mask > lowest ? under_mask : lowest;
    if (top < lowest) return 0;
    int number = top - bottom + 1 < BLOCK ? (int)(top - bottom + 1) : BLOCK;
    if (top <= UINT32_MAX)
        draw_places(twister, top, number, place);
    else
        draw_wide_places(twister, top, number, place);
    for (int at = 0; at < number; at++) __builtin_prefetch(items + place[at] * (uint64_t)bytes, 1);
    return number;
}

INLINE void shuffle_items(Twister *twister, void *items, uint64_t n, uint64_t lowest, int bytes) {
    uint64_t places[2][BLOCK], i = n ? n - 1 : 0;
    int turn = 0, number = draw_block(twister, i, lowest, places[0], items, bytes);
    while (number) {
        int following = draw_block(twister, i - (uint64_t)number, lowest, places[!turn], items, bytes);
        for (int at = 0; at < number; at++, i--) {
            uint64_t j = places[turn][at];
            if (bytes == 4) {
                uint32_t *item = items, kept = item[j];
                item[j] = item[i];
                item[i] = kept;
            } else {
                uint64_t *item = items, kept = item[j];
                item[j] = item[i];
                item[i] = kept;
            }
        }
        turn = !turn;
        number = following;
    }
}

/* shuffle(key, next, items, lowest) -> next. key: u4 (624,), the state of RandomState, which goes on; next: its "pos";
   items: of 4 or 8 bytes; lowest: the last i, >= 1, and 1 for all of the shuffle. */
KERNEL(shuffle) {
    (void)module;
    static const Wanted wanted[] = {{"key", "u4", 1}, {"items", "i4 u4 i8 u8", 1}};
    Array arrays[2];
    int64_t next, lowest;
    if (!arguments_are("shuffle", count, 4) || !integer_of(arguments[1], "next", 0, WORDS, &next) ||
        !integer_of(arguments[3], "lowest", 1, INT64_MAX, &lowest) ||
        !open_arrays((PyObject *[]){arguments[0], arguments[2]}, wanted, arrays, 2))
        return NULL;
    PyObject *result = NULL;
    if (arrays[0].items != WORDS)
        refuse("shuffle: key has 624 words");
    else {
        int level = current_level();
        Twister twister = {.key = arrays[0].data, .next = next, .refill = AT_LEVEL(level, refill)};
        Py_BEGIN_ALLOW_THREADS
        temper(twister.key, twister.words);
        uint64_t n = (uint64_t)arrays[1].items;
        if (arrays[1].item_bytes == 4)
            shuffle_items(&twister, arrays[1].data, n, (uint64_t)lowest, 4);
        else
            shuffle_items(&twister, arrays[1].data, n, (uint64_t)lowest, 8);
        Py_END_ALLOW_THREADS
        result = PyLong_FromLongLong(twister.next);
    }
    close_arrays(arrays, 2);
    return result;
}
