/* From a stretch of the line, or a row of the sample index, to ranges of documents.

       Piece: stretch -> block -> documents (this file) --> Range --> gather.c

   The plain statements in numpy are samples/token_line.py and megatron/index_order.py. A number names what does not fit
   (damaged lengths), and numpy raises the error. */

#include "finder.h"
#include "permute.h"

#include <string.h>

/* a - b of numbers that may lie; what overflows wraps. */
INLINE int64_t difference(int64_t a, int64_t b) { return (int64_t)((uint64_t)a - (uint64_t)b); }

/* The next range of a piece of which `done` tokens are found; false if there is no room. */
INLINE int emit(Found *found, const Range *piece, int64_t done, int64_t sequence, int64_t offset, int64_t pointer_items,
                int64_t length) {
    if (found->found == found->room) return 0;
    int64_t shown = piece->shown - done;
    found->ranges[found->found++] = (Range){
        .source = piece->source,
        .sequence = sequence,
        .offset = offset,
        .begin = pointer_items + offset,
        .length = length,
        .shown = shown < 0 ? 0 : shown < length ? shown : length,
        .row = piece->row,
        .column = piece->column + done,
        .labels = done ? length : length - 1,
    };
    return 1;
}

/* Whether a sequence's length and pointer are sane, and its successor begins where it ends. */
INLINE int fits_pointer(const Finder *finder, int64_t sequence) {
    const any_i4 *lengths = finder->lengths.data;
    const any_i8 *pointers = finder->pointers.data;
    int64_t bytes = (int64_t)lengths[sequence] * finder->item_bytes;
    return bytes >= 0 && pointers[sequence] >= 0 && pointers[sequence] % finder->item_bytes == 0 &&
           (sequence + 1 == finder->lengths.items || (pointers[sequence] <= INT64_MAX - bytes &&
                                                      pointers[sequence + 1] == pointers[sequence] + bytes));
}

typedef uint8_t Bytes __attribute__((vector_size(16)));

/* table[at[i]] for each i; at below 16. One instruction from SSSE3 on. */
INLINE Bytes looked_up(Bytes table, Bytes at) {
#ifdef __clang__
    Bytes found;
    for (int lane = 0; lane < 16; lane++) found[lane] = table[at[lane]];
    return found;
#else
    return __builtin_shuffle(table, at);
#endif
}

/* Which member of a block each of its places has, size <= 256: the Feistel network on halves of at most 4 bits, so that
   a round is a table of 16, looked up for 16 numbers at a time. */
INLINE void permute_places(uint64_t key, int size, uint8_t *member) {
    uint8_t moved[BLOCK_AT_MOST];
    Bytes table[ROUNDS], x = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    Permutation by = permutation_of(key, (uint64_t)size);
    uint64_t keys[16 * ROUNDS], mixed[16 * ROUNDS];
    for (int at = 0; at < 16 * ROUNDS; at++) keys[at] = by.round_key[at >> 4];
    /* One loop over all rounds: of this the compiler makes vectors, a loop of 16 it unrolls before. */
    for (int at = 0; at < 16 * ROUNDS; at++) mixed[at] = mix((uint64_t)(at & 15) ^ keys[at]) & by.mask;
    uint8_t values[16 * ROUNDS];
    for (int at = 0; at < 16 * ROUNDS; at++) values[at] = (uint8_t)mixed[at];
    memcpy(table, values, sizeof table);
    for (int begin = 0; begin < 1 << 2 * by.half; begin += 16, x += 16) {
        Bytes left = x >> (uint8_t)by.half, right = x & (uint8_t)by.mask;
        for (int round = 0; round < ROUNDS; round++) {
            Bytes scrambled = left ^ looked_up(table[round], right);
            left = right, right = scrambled;
        }
        Bytes to = left << (uint8_t)by.half | right;
        memcpy(moved + begin, &to, sizeof to);
    }
    memcpy(member, moved, (size_t)size);
    if (size == 1 << 2 * by.half) return;
    for (int place = 0; place < size; place++)
        while (member[place] >= size) member[place] = moved[member[place]];
}

/* The sequences of a block from its first on: their lengths in the order of the block; false if they are damaged. */
INLINE int lengths_of_block(const Finder *line, int64_t begin, int size, int32_t *lengths, int64_t *sum) {
    int64_t tokens = 0;
    int fits = 1;
    if (line->members.items) {
        const any_i8 *members = line->members.data;
        for (int at = 0; at < size; at++) {
            fits &= fits_pointer(line, members[begin + at]);
            tokens += lengths[at] = ((const any_i4 *)line->lengths.data)[members[begin + at]];
        }
    } else {
        const any_i4 *from = (const any_i4 *)line->lengths.data + line->first + begin;
        const any_i8 *pointers = (const any_i8 *)line->pointers.data + line->first + begin;
        int64_t wrong = 0, inner = line->first + begin + size < line->lengths.items ? size : size - 1;
        for (int at = 0; at < size; at++) tokens += lengths[at] = from[at], wrong |= from[at] < 0;
        for (int64_t at = 0; at < inner; at++)
            wrong |= difference(pointers[at + 1], pointers[at]) ^ from[at] * line->item_bytes;
        fits = !wrong && fits_pointer(line, line->first + begin) && fits_pointer(line, line->first + begin + size - 1);
    }
    *sum = tokens;
    return fits;
}

/* What gains by vector instructions, at one level; all else is compiled once. */
#define PLACES uint64_t key, int size, uint8_t *member
#define LENGTHS const Finder *line, int64_t begin, int size, int32_t *lengths, int64_t *sum
typedef struct {
    Block permute;
    void (*places)(PLACES);
    int (*lengths)(LENGTHS);
} Means;

static void places_plain(PLACES) { permute_places(key, size, member); }
AVX2 static void places_avx2(PLACES) { permute_places(key, size, member); }
AVX512 static void places_avx512(PLACES) { permute_places(key, size, member); }

static int lengths_plain(LENGTHS) { return lengths_of_block(line, begin, size, lengths, sum); }
AVX2 static int lengths_avx2(LENGTHS) { return lengths_of_block(line, begin, size, lengths, sum); }
AVX512 static int lengths_avx512(LENGTHS) { return lengths_of_block(line, begin, size, lengths, sum); }

static const Means MEANS[] = {
    [LEVEL_PLAIN] = {block_plain, places_plain, lengths_plain},
    [LEVEL_AVX2] = {block_avx2, places_avx2, lengths_avx2},
    [LEVEL_AVX512] = {block_avx512, places_avx512, lengths_avx512},
};

/* The documents at the places of a slot from `begin` on, of a line that is permuted as a whole: number in the source and
   length of each; false if one is damaged. They lie anywhere, so all are asked for before the first is looked at. */
INLINE int documents_of_places(const Finder *line, const Means *means, uint64_t key, int64_t begin, int size, uint64_t *sequence,
                               int32_t *lengths, int64_t *sum) {
    Permutation by = permutation_of(key, (uint64_t)line->sequences);
    const any_i4 *length = line->lengths.data;
    const any_i8 *pointer = line->pointers.data, *members = line->members.data;
    int64_t tokens = 0;
    int fits = 1;
    for (int at = 0; at < size; at++) sequence[at] = (uint64_t)(begin + at);
    means->permute(&by, sequence, size);
    for (int at = 0; at < size; at++) {
        sequence[at] = line->members.items ? (uint64_t)members[sequence[at]] : (uint64_t)line->first + sequence[at];
        __builtin_prefetch(length + sequence[at]);
        __builtin_prefetch(pointer + sequence[at]);
    }
    for (int at = 0; at < size; at++) {
        fits &= fits_pointer(line, (int64_t)sequence[at]);
        tokens += lengths[at] = length[sequence[at]];
    }
    *sum = tokens;
    return fits;
}

/* The ranges of one slot from its token `local` on, of a line that is permuted as a whole. 1, or a negative number. */
INLINE int64_t ranges_of_places(const Piece *piece, const Means *means, const Epoch *epoch, int64_t slot, int64_t local,
                                int64_t *done, Found *found) {
    const Finder *line = piece->finder;
    const any_i8 *before = epoch->before.data;
    int64_t begin = slot * line->block, left = line->sequences - begin, sum;
    int size = (int)(left < line->block ? left : line->block), place = 0;
    uint64_t sequence[BLOCK_AT_MOST];
    int32_t lengths[BLOCK_AT_MOST];
    uint64_t key = key_of(&line->names, &epoch->number, 1);
    if (size < 1 || !documents_of_places(line, means, key, begin, size, sequence, lengths, &sum)) return LEFT_TO_NUMPY;
    if (sum != difference(before[slot + 1], before[slot])) return LEFT_TO_NUMPY;
    if (sum == 0) return 1;
    if (local < 0 || local >= sum) return LEFT_TO_NUMPY;
    while (local >= lengths[place]) local -= lengths[place++]; /* local < sum: it ends */
    for (; place < size && *done < piece->range.length; place++, local = 0) {
        int64_t there = lengths[place] - local, want = piece->range.length - *done;
        if (there == 0) continue;
        int64_t length = there < want ? there : want;
        int64_t pointer_items = ((const any_i8 *)line->pointers.data)[sequence[place]] / line->item_bytes;
        if (!emit(found, &piece->range, *done, (int64_t)sequence[place], local, pointer_items, length))
            return TOO_LITTLE_ROOM;
        *done += length;
    }
    return 1;
}

/* The ranges of one slot from its token `local` on, at most until the piece is done. 1, or a negative number. */
INLINE int64_t ranges_of_slot(const Piece *piece, const Means *means, const Epoch *epoch, int64_t slot, int64_t local,
                              int64_t *done, Found *found) {
    const Finder *line = piece->finder;
    const any_i8 *before = epoch->before.data;
    int64_t block = ((const any_i4 *)epoch->block.data)[slot], sum;
    if (block < 0 || block >= line->blocks) return LEFT_TO_NUMPY;
    int64_t begin = block * line->block, left = line->sequences - begin;
    int size = (int)(left < line->block ? left : line->block), place = 0;
    int32_t lengths[BLOCK_AT_MOST];
    uint8_t member[BLOCK_AT_MOST] = {0};
    if (!means->lengths(line, begin, size, lengths, &sum)) return LEFT_TO_NUMPY;
    if (sum != difference(before[slot + 1], before[slot])) return LEFT_TO_NUMPY;
    if (sum == 0) return 1; /* checked as the others are */
    if (local < 0 || local >= sum) return LEFT_TO_NUMPY;
    if (line->block > 1) {
        int64_t numbers[2] = {epoch->number, block};
        means->places(key_of(&line->names, numbers, 2), size, member);
    }
    while (local >= lengths[member[place]]) local -= lengths[member[place++]]; /* local < sum: it ends */
    for (; place < size && *done < piece->range.length; place++, local = 0) {
        int64_t sequence = begin + member[place];
        int64_t there = lengths[member[place]] - local, want = piece->range.length - *done;
        if (there == 0) continue;
        sequence = line->members.items ? ((const any_i8 *)line->members.data)[sequence] : line->first + sequence;
        int64_t length = there < want ? there : want;
        int64_t pointer_items = ((const any_i8 *)line->pointers.data)[sequence] / line->item_bytes;
        if (!emit(found, &piece->range, *done, sequence, local, pointer_items, length)) return TOO_LITTLE_ROOM;
        *done += length;
    }
    return 1;
}

INLINE int64_t ranges_of_stretch(const Piece *piece, const Means *means, Epoch *const *epochs, Found *found) {
    const Finder *line = piece->finder;
    int64_t done = 0, slot = piece->slot;
    int64_t inside = piece->range.begin - piece->epoch * line->tokens;
    int64_t local = difference(inside, ((const any_i8 *)epochs[0]->before.data)[slot]);
    for (int64_t number = 0; number < piece->epochs; number++, slot = 0) {
        for (; slot < epochs[number]->block.items; slot++, local = 0) {
            if (done == piece->range.length) return 1;
            int64_t status = line->whole ? ranges_of_places(piece, means, epochs[number], slot, local, &done, found)
                                         : ranges_of_slot(piece, means, epochs[number], slot, local, &done, found);
            if (status < 0) return status;
        }
    }
    return done == piece->range.length ? 1 : LEFT_TO_NUMPY;
}

#define CHECKED_BEHIND 64 /* documents of a row that no token is read from, as an empty one at its end */

/* A row of the sample index and the documents behind it (megatron/index_order.py). */
INLINE int64_t ranges_of_row(const Piece *piece, Found *found) {
    const Finder *index = piece->finder;
    int64_t row = piece->range.begin, done = 0, behind = 0, edge[4];
    for (int at = 0; at < 4; at++)
        edge[at] = index->samples.bytes == 4 ? ((const any_i4 *)index->samples.data)[2 * row + at]
                                             : ((const any_i8 *)index->samples.data)[2 * row + at];
    int64_t offset = edge[1] < 0 ? 0 : edge[1];
    for (int64_t place = edge[0]; place <= edge[2] && behind <= CHECKED_BEHIND; place++, offset = 0) {
        if (place < 0 || place >= index->documents.items) return LEFT_TO_NUMPY;
        int64_t sequence = ((const any_i4 *)index->documents.data)[place];
        if (sequence < 0 || sequence >= index->lengths.items || !fits_pointer(index, sequence)) return LEFT_TO_NUMPY;
        int64_t there = ((const any_i4 *)index->lengths.data)[sequence] - offset, want = piece->range.length - done;
        if (there < 0) return LEFT_TO_NUMPY;
        behind += want == 0;
        if (there == 0 || want == 0) continue;
        int64_t length = there < want ? there : want;
        int64_t pointer_items = ((const any_i8 *)index->pointers.data)[sequence] / index->item_bytes;
        if (!emit(found, &piece->range, done, sequence, offset, pointer_items, length)) return TOO_LITTLE_ROOM;
        done += length;
    }
    return done == piece->range.length && behind <= CHECKED_BEHIND ? 1 : LEFT_TO_NUMPY;
}

#define GROUP 16 /* pieces whose first slots are searched together */
#define AHEAD 2  /* pieces whose first blocks are asked for in advance */

/* The slot of each piece's first token: the last with no more tokens before it. A step of every search, then the next
   step of every search, so that they wait for memory at the same time. */
INLINE void find_slots(Piece *pieces, int64_t number, Epoch *const *epochs) {
    const any_i8 *before[GROUP];
    int64_t inside[GROUP], some[GROUP], most = 1;
    for (int64_t at = 0; at < number; at++) {
        Piece *piece = &pieces[at];
        piece->slot = 0, some[at] = 1;
        if (piece->finder->indexed) continue;
        const Epoch *epoch = epochs[piece->held];
        before[at] = epoch->before.data, some[at] = epoch->block.items;
        inside[at] = piece->range.begin - piece->epoch * piece->finder->tokens;
        if (some[at] > most) most = some[at];
    }
    for (; most > 1; most -= most / 2)
        for (int64_t at = 0; at < number; at++) {
            int64_t half = some[at] / 2; /* before[slot] <= inside; the answer is in slot .. slot + some - 1 */
            if (half) pieces[at].slot += before[at][pieces[at].slot + half] <= inside[at] ? half : 0;
            some[at] -= half;
        }
    for (int64_t at = 0; at < number; at++)
        if (!pieces[at].finder->indexed)
            __builtin_prefetch((const any_i4 *)epochs[pieces[at].held]->block.data + pieces[at].slot);
}

/* Ask for the lengths and pointers that the first slot of a stretch needs; they lie anywhere in memory. */
INLINE void fetch_block(const Piece *piece, Epoch *const *epochs) {
    const Finder *line = piece->finder;
    if (line->indexed || line->members.items || line->whole) return;
    int64_t first = line->first + (int64_t)((const any_i4 *)epochs[piece->held]->block.data)[piece->slot] * line->block;
    if (first < 0 || first + line->block > line->lengths.items) return;
    const char *lengths = (const char *)line->lengths.data + 4 * first;
    const char *pointers = (const char *)line->pointers.data + 8 * first;
    for (int64_t at = 0; at <= 4 * line->block; at += 64) __builtin_prefetch(lengths + at);
    for (int64_t at = 0; at <= 8 * line->block; at += 64) __builtin_prefetch(pointers + at);
}

int64_t find_ranges(int level, Piece *pieces, int64_t number, Epoch *const *epochs, Found *found) {
    const Means *means = &MEANS[level];
    for (int64_t begin = 0; begin < number; begin += GROUP) {
        int64_t end = number - begin < GROUP ? number : begin + GROUP;
        find_slots(pieces + begin, end - begin, epochs);
        for (int64_t at = begin; at < end && at < begin + AHEAD; at++) fetch_block(&pieces[at], epochs);
        for (int64_t at = begin; at < end; at++) {
            const Piece *piece = &pieces[at];
            if (at + AHEAD < end) fetch_block(&pieces[at + AHEAD], epochs);
            int64_t status = piece->finder->indexed ? ranges_of_row(piece, found)
                                                    : ranges_of_stretch(piece, means, epochs + piece->held, found);
            if (status < 0) return status;
        }
    }
    return found->found;
}
