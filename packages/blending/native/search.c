/* Where the tokens of samples lie: from (dataset, sample) to ranges of documents.

       Grid: sample -> stretch of the line; Line: stretch -> block -> documents (this file) --> ranges --> gather.c

   What grid.py, line.py and megatron/index.py say in numpy, for all datasets of a batch in one call. A finder is a capsule
   that holds one dataset's lengths and pointers open, and the prefix sums of the epochs in use; whatever does not fit
   (damaged lengths, a left-over string, an epoch not yet known) is told by a number, and Python says or does the rest. */

#include "order_key.h"
#include "permute.h"
#include "views.h"

#include <string.h>

static const char FINDER[] = "sixfold.blending.finder";

#define BLOCK_AT_MOST 256
#define EPOCHS_AT_MOST 4096 /* that one sample may touch; a longer one is left to numpy */

/* What find_samples and find_pieces return besides the number of ranges found: negative numbers. */
enum { TOO_LITTLE_ROOM = -1, LEFT_TO_NUMPY = -2, MISSING = -3 };

/* The first slots of an epoch of a line, those that are known: tokens before each and behind the last (slots + 1), block in
   each (slots). */
typedef struct {
    int64_t number;
    int users; /* the finder and the calls that read it; counted with the GIL held */
    View before, block;
} Epoch;

typedef struct {
    int64_t first_sample, number, sequence_length, origin, left_over_samples;
} Grid;

typedef struct {
    int indexed; /* megatron's three indices, or a line */
    View lengths, pointers, members;
    int64_t item_bytes;
    /* a line */
    KeyStart names;
    int64_t first, sequences, tokens, block, blocks, window, chunks;
    Grid *grids;
    int64_t number_of_grids;
    Epoch **epochs; /* the oldest first */
    int64_t number_of_epochs;
    int64_t known[3], known_key; /* grid, epoch, window of the key that was made last */
    /* indices */
    View documents, samples, shuffle;
    int64_t sequence_length, extra, end;
} Finder;

/* A stretch of a line, or a sample of indices (then begin is the row of the sample index). */
typedef struct {
    Finder *finder;
    int64_t epoch;         /* the first that it touches */
    int64_t held, epochs;  /* where they are held, and how many */
    Range range;           /* source, begin on the line, length, shown, row, column */
} Piece;

/* ---- opening */

static void let_go(Epoch *epoch) {
    if (--epoch->users) return;
    close_view(&epoch->before);
    close_view(&epoch->block);
    PyMem_Free(epoch);
}

static void free_finder(PyObject *capsule) {
    Finder *finder = PyCapsule_GetPointer(capsule, FINDER);
    if (finder == NULL) return;
    for (int64_t at = 0; at < finder->number_of_epochs; at++) let_go(finder->epochs[at]);
    View *views[] = {&finder->lengths, &finder->pointers,  &finder->members,
                     &finder->samples, &finder->documents, &finder->shuffle};
    for (int at = 0; at < 6; at++) close_view(views[at]);
    PyMem_Free(finder->epochs);
    PyMem_Free(finder->grids);
    PyMem_Free(finder);
}

/* A new finder in a capsule, with lengths (i4) and pointers (i8), one each per sequence. */
static PyObject *new_finder(PyObject *lengths, PyObject *pointers, Finder **made) {
    Finder *finder = PyMem_Calloc(1, sizeof *finder);
    if (finder == NULL) return PyErr_NoMemory();
    PyObject *capsule = PyCapsule_New(finder, FINDER, free_finder);
    if (capsule == NULL) {
        PyMem_Free(finder);
        return NULL;
    }
    *made = finder;
    if (open_view(lengths, "lengths", "i4", &finder->lengths) && open_view(pointers, "pointers", "i8", &finder->pointers)) {
        if (finder->lengths.items == finder->pointers.items) return capsule;
        refuse("a finder has as many lengths as pointers");
    }
    Py_DECREF(capsule);
    return NULL;
}

/* open_line(lengths, pointers, members, names, numbers, grids) -> capsule.
   members: i8 numbers of the part's sequences, empty if they are first, first + 1, ... names: u1, what every key begins with.
   numbers: i8 (item_bytes, first, sequences, tokens, block, window, chunks or -1). grids: i8 (number, 5), ascending. */
KERNEL(open_line) {
    (void)module;
    static const Wanted wanted[] = {{"names", "u1", 0}, {"numbers", "i8", 0}, {"grids", "i8", 0}};
    Finder *finder;
    Array arrays[3];
    if (!arguments_are("open_line", count, 6)) return NULL;
    PyObject *capsule = new_finder(arguments[0], arguments[1], &finder);
    if (capsule == NULL || !open_view(arguments[2], "members", "i8", &finder->members) ||
        !open_arrays(arguments + 3, wanted, arrays, 3)) {
        Py_XDECREF(capsule);
        return NULL;
    }
    const int64_t *numbers = arrays[1].data, held = finder->lengths.items;
    int fits = arrays[1].items == 7 && arrays[2].items >= 5 && arrays[2].items % 5 == 0;
    if (fits) {
        finder->item_bytes = numbers[0], finder->first = numbers[1], finder->sequences = numbers[2], finder->tokens = numbers[3];
        finder->block = numbers[4], finder->window = numbers[5], finder->chunks = numbers[6];
        fits = numbers[0] >= 1 && numbers[0] <= 8 && numbers[1] >= 0 && numbers[2] >= 1 && numbers[3] >= 1 && numbers[4] >= 1 &&
               numbers[4] <= BLOCK_AT_MOST && numbers[5] >= 1 && numbers[5] <= LARGEST && numbers[6] >= -1;
    }
    if (fits) /* the part's sequences are among those there are */
        fits = finder->members.items ? finder->members.items == finder->sequences
                                     : finder->first <= held && finder->sequences <= held - finder->first;
    for (int64_t at = 0; fits && at < finder->members.items; at++) {
        int64_t member = ((const any_i8 *)finder->members.data)[at];
        fits = member >= 0 && member < held;
    }
    const int64_t *grid = arrays[2].data;
    for (int64_t at = 0; fits && at < arrays[2].items; at += 5)
        fits = grid[at] >= 0 && grid[at + 1] >= 0 && grid[at + 2] >= 1 && grid[at + 3] >= 0 && grid[at + 4] >= 0;
    if (!fits)
        refuse("open_line: numbers, members or grids do not describe a line");
    else {
        finder->blocks = (finder->sequences - 1) / finder->block + 1;
        finder->names = key_start(arrays[0].data, (size_t)arrays[0].items);
        finder->known[0] = -1;
        finder->number_of_grids = arrays[2].items / 5;
        finder->grids = PyMem_Malloc((size_t)arrays[2].view.len);
        if (finder->grids == NULL)
            PyErr_NoMemory(), fits = 0;
        else
            memcpy(finder->grids, grid, (size_t)arrays[2].view.len);
    }
    close_arrays(arrays, 3);
    if (!fits) Py_CLEAR(capsule);
    return capsule;
}

/* open_index(lengths, pointers, documents, samples, shuffle, numbers) -> capsule. documents: i4, samples: i4 or i8 (rows + 1, 2),
   shuffle: u4 or i8 (rows,), numbers: i8 (item_bytes, sequence_length, extra, end). */
KERNEL(open_index) {
    (void)module;
    static const Wanted wanted[] = {{"numbers", "i8", 0}};
    Finder *finder;
    Array array;
    if (!arguments_are("open_index", count, 6)) return NULL;
    PyObject *capsule = new_finder(arguments[0], arguments[1], &finder);
    if (capsule == NULL || !open_view(arguments[2], "documents", "i4", &finder->documents) ||
        !open_view(arguments[3], "samples", "i4 i8", &finder->samples) ||
        !open_view(arguments[4], "shuffle", "u4 i8", &finder->shuffle) || !open_arrays(arguments + 5, wanted, &array, 1)) {
        Py_XDECREF(capsule);
        return NULL;
    }
    const int64_t *numbers = array.data;
    if (array.items != 4 || numbers[0] < 1 || numbers[0] > 8 || numbers[1] < 1 || numbers[2] < 0 || numbers[2] > 1 ||
        numbers[3] < 0 || finder->samples.items % 2 || finder->samples.items / 2 != finder->shuffle.items + 1) {
        refuse("open_index: numbers or rows do not describe indices");
        Py_CLEAR(capsule);
    } else {
        finder->indexed = 1;
        finder->item_bytes = numbers[0], finder->sequence_length = numbers[1], finder->extra = numbers[2], finder->end = numbers[3];
    }
    close_arrays(&array, 1);
    return capsule;
}

/* add_epoch(finder, epoch, before, block, keep) -> None. before: i8 (slots + 1,), block: i4 (slots,), of the first slots, in
   place of what was known of that epoch. Of the epochs added
   earlier the last keep stay. */
KERNEL(add_epoch) {
    (void)module;
    int64_t number, keep;
    if (!arguments_are("add_epoch", count, 5)) return NULL;
    Finder *finder = PyCapsule_GetPointer(arguments[0], FINDER);
    if (finder == NULL || !integer_of(arguments[1], "epoch", 0, INT64_MAX, &number) ||
        !integer_of(arguments[4], "keep", 0, INT64_MAX, &keep))
        return NULL;
    if (finder->indexed) return refuse("add_epoch: indices have no epochs to add");
    Epoch *epoch = PyMem_Calloc(1, sizeof *epoch);
    Epoch **epochs = PyMem_Realloc(finder->epochs, (size_t)(finder->number_of_epochs + 1) * sizeof *epochs);
    if (epochs) finder->epochs = epochs;
    if (epoch == NULL || epochs == NULL) {
        PyMem_Free(epoch);
        return PyErr_NoMemory();
    }
    epoch->number = number, epoch->users = 1;
    if (!open_view(arguments[2], "before", "i8", &epoch->before) || !open_view(arguments[3], "block", "i4", &epoch->block)) {
        let_go(epoch);
        return NULL;
    }
    if (epoch->before.items != epoch->block.items + 1 || epoch->block.items < 1 || epoch->block.items > finder->blocks) {
        let_go(epoch);
        return refuse("add_epoch: block has at most as many items as the line has blocks, before one more");
    }
    for (int64_t at = 0; at < finder->number_of_epochs; at++)
        if (epochs[at]->number == number) {
            let_go(epochs[at]);
            memmove(epochs + at, epochs + at + 1, (size_t)(--finder->number_of_epochs - at) * sizeof *epochs);
        }
    int64_t drop = finder->number_of_epochs > keep ? finder->number_of_epochs - keep : 0;
    for (int64_t at = 0; at < drop; at++) let_go(epochs[at]);
    for (int64_t at = drop; at < finder->number_of_epochs; at++) epochs[at - drop] = epochs[at];
    finder->number_of_epochs -= drop;
    epochs[finder->number_of_epochs++] = epoch;
    return PyBool_FromLong(1);
}

/* ---- sample -> stretch of the line (grid.py); false: left to numpy */

static int64_t rounded_up(int64_t a, int64_t b) { return a <= 0 ? 0 : (a - 1) / b + 1; }

static int stretch_of(Finder *line, int64_t sample, int64_t sequence_length, int64_t more, Range *range) {
    int64_t at = line->number_of_grids - 1, S = sequence_length, place, next;
    while (at > 0 && line->grids[at].first_sample > sample) at--;
    const Grid *grid = &line->grids[at];
    int64_t index = sample - grid->first_sample - grid->left_over_samples;
    if (index < 0 || grid->sequence_length != S || __builtin_mul_overflow(index, S, &place) ||
        __builtin_add_overflow(place, grid->origin, &place) || __builtin_add_overflow(place, line->tokens + 2 * S, &next))
        return 0; /* next only shows that nothing below overflows */
    int64_t epoch = place / line->tokens, first = 0, stop = line->chunks;
    if (line->chunks >= 0) {
        epoch = 0;
        if (index >= stop) return 0;
    } else {
        int64_t begin = epoch * line->tokens - grid->origin;
        first = rounded_up(begin, S), stop = rounded_up(begin + line->tokens, S);
    }
    int64_t window = (index - first) / line->window, inside = (index - first) % line->window;
    int64_t size = stop - first - window * line->window;
    if (index < first || inside >= size) return 0;
    if (line->known[0] != grid->number || line->known[1] != epoch || line->known[2] != window) {
        line->known[0] = grid->number, line->known[1] = epoch, line->known[2] = window;
        line->known_key = (int64_t)key_of(&line->names, line->known, 3);
    }
    Permutation by = permutation_of((uint64_t)line->known_key, (uint64_t)(size < line->window ? size : line->window));
    int64_t chunk = first + window * line->window + (int64_t)permute_one(&by, (uint64_t)inside);
    range->begin = grid->origin + chunk * S;
    range->length = S + more;
    if (line->chunks >= 0 && range->length > line->tokens - range->begin) range->length = line->tokens - range->begin;
    range->shown = range->length < S ? range->length : S;
    return range->length > 0;
}

/* ---- stretch -> ranges */

typedef struct {
    Range *ranges;
    int64_t room, found;
} Found;

/* The next range of a piece of which `done` tokens are found; false if there is no room. */
INLINE int emit(Found *found, const Range *piece, int64_t done, int64_t sequence, int64_t offset, int64_t pointer_items,
                int64_t length) {
    if (found->found == found->room) return 0;
    int64_t shown = piece->shown - done;
    found->ranges[found->found++] = (Range){
        .source = piece->source, .sequence = sequence, .offset = offset, .begin = pointer_items + offset, .length = length,
        .shown = shown < 0 ? 0 : shown < length ? shown : length, .row = piece->row, .column = piece->column + done,
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

/* Which member of a block each of its places has, size <= 256: the Feistel network on halves of at most 4 bits, so that a
   round is a table of 16, looked up for 16 numbers at a time. */
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
            wrong |= (int64_t)((uint64_t)pointers[at + 1] - (uint64_t)pointers[at]) ^ (int64_t)from[at] * line->item_bytes;
        fits = !wrong && fits_pointer(line, line->first + begin) && fits_pointer(line, line->first + begin + size - 1);
    }
    *sum = tokens;
    return fits;
}

/* The slot that holds a token of an epoch: the last with no more tokens before it. */
INLINE int64_t slot_of(const Epoch *epoch, int64_t inside) {
    const any_i8 *before = epoch->before.data;
    int64_t low = 0, some = epoch->block.items;
    while (some > 1) { /* before[low] <= inside; the answer is in low .. low + some - 1 */
        int64_t half = some / 2;
        low += before[low + half] <= inside ? half : 0;
        some -= half;
    }
    return low;
}

/* The ranges of one slot from its token `local` on, at most until the piece is done. 1, or a negative number. */
INLINE int64_t ranges_of_slot(const Piece *piece, const Epoch *epoch, int64_t slot, int64_t local, int64_t *done, Found *found) {
    const Finder *line = piece->finder;
    const any_i8 *before = epoch->before.data;
    int64_t block = ((const any_i4 *)epoch->block.data)[slot], sum;
    if (block < 0 || block >= line->blocks) return LEFT_TO_NUMPY;
    int64_t begin = block * line->block, left = line->sequences - begin;
    int size = (int)(left < line->block ? left : line->block), place = 0;
    int32_t lengths[BLOCK_AT_MOST];
    uint8_t member[BLOCK_AT_MOST] = {0};
    if (!lengths_of_block(line, begin, size, lengths, &sum)) return LEFT_TO_NUMPY;
    if (sum != before[slot + 1] - before[slot]) return LEFT_TO_NUMPY;
    if (sum == 0) return 1; /* checked as the others are */
    if (local < 0 || local >= sum) return LEFT_TO_NUMPY;
    if (line->block > 1) {
        int64_t numbers[2] = {epoch->number, block};
        permute_places(key_of(&line->names, numbers, 2), size, member);
    }
    while (local >= lengths[member[place]]) local -= lengths[member[place++]]; /* local < sum: it ends */
    for (; place < size && *done < piece->range.length; place++, local = 0) {
        int64_t sequence = begin + member[place], there = lengths[member[place]] - local, want = piece->range.length - *done;
        if (there == 0) continue;
        sequence = line->members.items ? ((const any_i8 *)line->members.data)[sequence] : line->first + sequence;
        int64_t length = there < want ? there : want;
        int64_t pointer_items = ((const any_i8 *)line->pointers.data)[sequence] / line->item_bytes;
        if (!emit(found, &piece->range, *done, sequence, local, pointer_items, length)) return TOO_LITTLE_ROOM;
        *done += length;
    }
    return 1;
}

INLINE int64_t ranges_of_stretch(const Piece *piece, Epoch *const *epochs, Found *found) {
    const Finder *line = piece->finder;
    int64_t done = 0, slot = slot_of(epochs[0], piece->range.begin - piece->epoch * line->tokens);
    int64_t local = piece->range.begin - piece->epoch * line->tokens - ((const any_i8 *)epochs[0]->before.data)[slot];
    for (int64_t number = 0; number < piece->epochs; number++, slot = 0) {
        for (; slot < epochs[number]->block.items; slot++, local = 0) {
            if (done == piece->range.length) return 1;
            int64_t status = ranges_of_slot(piece, epochs[number], slot, local, &done, found);
            if (status < 0) return status;
        }
    }
    return done == piece->range.length ? 1 : LEFT_TO_NUMPY;
}

#define CHECKED_BEHIND 64 /* documents of a row that no token is read from, as an empty one at its end */

/* A row of the sample index and the documents behind it (megatron/index.py). */
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

/* Ask for the lengths and pointers that the first slot of a stretch needs; they lie anywhere in memory. */
INLINE void fetch_block(const Piece *piece, Epoch *const *epochs) {
    const Finder *line = piece->finder;
    int64_t slot = slot_of(epochs[0], piece->range.begin - piece->epoch * line->tokens);
    int64_t first = line->first + (int64_t)((const any_i4 *)epochs[0]->block.data)[slot] * line->block;
    if (line->members.items || first < 0 || first + line->block > line->lengths.items) return;
    const char *lengths = (const char *)line->lengths.data + 4 * first, *pointers = (const char *)line->pointers.data + 8 * first;
    for (int64_t at = 0; at <= 4 * line->block; at += 64) __builtin_prefetch(lengths + at);
    for (int64_t at = 0; at <= 8 * line->block; at += 64) __builtin_prefetch(pointers + at);
}

#define AHEAD 2 /* pieces */

INLINE int64_t find_all(const Piece *pieces, int64_t number, Epoch *const *epochs, Found *found) {
    for (int64_t at = 0; at < number; at++) {
        if (at + AHEAD < number && !pieces[at + AHEAD].finder->indexed)
            fetch_block(&pieces[at + AHEAD], epochs + pieces[at + AHEAD].held);
        const Piece *piece = &pieces[at];
        int64_t status = piece->finder->indexed ? ranges_of_row(piece, found)
                                                : ranges_of_stretch(piece, epochs + piece->held, found);
        if (status < 0) return status;
    }
    return found->found;
}

#define FIND_ARGUMENTS const Piece *pieces, int64_t number, Epoch *const *epochs, Found *found
static int64_t find_plain(FIND_ARGUMENTS) { return find_all(pieces, number, epochs, found); }
AVX2 static int64_t find_avx2(FIND_ARGUMENTS) { return find_all(pieces, number, epochs, found); }
AVX512 static int64_t find_avx512(FIND_ARGUMENTS) { return find_all(pieces, number, epochs, found); }

/* ---- calls */

/* The pieces of a call, and the epochs that they hold meanwhile. */
typedef struct {
    Piece *pieces;
    int64_t number, held, room;
    Epoch **epochs;
    long long missing_source, missing_epoch;
} Call;

static int begin_call(Call *call, int64_t pieces) {
    memset(call, 0, sizeof *call);
    call->number = pieces;
    if (pieces <= INT64_MAX / (int64_t)sizeof(Piece) - 1) call->pieces = PyMem_Malloc((size_t)(pieces + 1) * sizeof(Piece));
    if (call->pieces == NULL) PyErr_NoMemory();
    return call->pieces != NULL;
}

static void end_call(Call *call) {
    for (int64_t at = 0; at < call->held; at++) let_go(call->epochs[at]);
    PyMem_Free(call->epochs);
    PyMem_Free(call->pieces);
}

/* The finder of a source; NULL if it is None, and with an exception if there is no such source. */
static Finder *finder_of(PyObject *finders, int64_t source) {
    if (!PyTuple_Check(finders) || source < 0 || source >= PyTuple_Size(finders)) {
        PyErr_Format(PyExc_ValueError, "source %lld is none of the tuple of finders", (long long)source);
        return NULL;
    }
    PyObject *finder = PyTuple_GetItem(finders, (Py_ssize_t)source);
    return finder == Py_None ? NULL : PyCapsule_GetPointer(finder, FINDER);
}

static int64_t missing(Call *call, int64_t source, int64_t epoch) {
    call->missing_source = source, call->missing_epoch = epoch;
    return MISSING;
}

/* Whether all slots of the epoch are known up to a token of the line, or to the epoch's end. */
static int reaches(const Finder *line, const Epoch *epoch, int64_t end) {
    int64_t slots = epoch->block.items;
    return slots == line->blocks || ((const any_i8 *)epoch->before.data)[slots] >= end - epoch->number * line->tokens;
}

/* Hold the epochs that a piece of a line touches. 1, a negative number, or 0 and an exception. */
static int64_t hold_epochs(Call *call, Piece *piece) {
    const Finder *line = piece->finder;
    const Range *range = &piece->range;
    if (range->begin < 0 || range->length < 1 || range->length > INT64_MAX - range->begin) return LEFT_TO_NUMPY;
    piece->epoch = range->begin / line->tokens;
    piece->epochs = (range->begin + range->length - 1) / line->tokens + 1 - piece->epoch;
    piece->held = call->held;
    if (piece->epochs > EPOCHS_AT_MOST) return LEFT_TO_NUMPY;
    for (int64_t epoch = piece->epoch; epoch < piece->epoch + piece->epochs; epoch++) {
        int64_t at = line->number_of_epochs - 1;
        while (at >= 0 && line->epochs[at]->number != epoch) at--;
        if (at < 0 || !reaches(line, line->epochs[at], range->begin + range->length)) return missing(call, range->source, epoch);
        if (call->held == call->room) {
            int64_t room = call->room ? 2 * call->room : 64;
            Epoch **more = PyMem_Realloc(call->epochs, (size_t)room * sizeof *more);
            if (more == NULL) {
                PyErr_NoMemory();
                return 0;
            }
            call->epochs = more, call->room = room;
        }
        call->epochs[call->held++] = line->epochs[at];
        line->epochs[at]->users++;
    }
    return 1;
}

/* Search with the GIL released and end the call: ranges found, a negative number, or (source, epoch) of what is missing. */
static PyObject *answer(Call *call, int64_t status, const Array *ranges) {
    if (status > 0) {
        Found found = {.ranges = ranges->data, .room = ranges->items / RANGE_FIELDS};
        int level = current_level();
        int64_t (*find)(FIND_ARGUMENTS) = AT_LEVEL(level, find);
        Py_BEGIN_ALLOW_THREADS
        status = find(call->pieces, call->number, call->epochs, &found);
        Py_END_ALLOW_THREADS
    } else if (status == MISSING) {
        PyObject *what = PyErr_Occurred() ? NULL : Py_BuildValue("(LL)", call->missing_source, call->missing_epoch);
        end_call(call);
        return what;
    }
    end_call(call);
    return PyErr_Occurred() ? NULL : PyLong_FromLongLong(status);
}

/* The stretch or row of sample `at` of a call. 1, a negative number, or 0 and an exception. */
static int64_t piece_of_sample(Call *call, int64_t at, PyObject *finders, int64_t source, int64_t sample, int64_t sequence_length) {
    Piece *piece = &call->pieces[at];
    *piece = (Piece){.finder = finder_of(finders, source), .range = {.source = source, .row = at}};
    Finder *finder = piece->finder;
    Range *range = &piece->range;
    if (finder == NULL) return missing(call, source, -1);
    if (!finder->indexed) return stretch_of(finder, sample, sequence_length, 1, range) ? hold_epochs(call, piece) : LEFT_TO_NUMPY;
    if (sample < 0 || sample >= finder->shuffle.items || finder->sequence_length != sequence_length) return LEFT_TO_NUMPY;
    int64_t row = finder->shuffle.bytes == 4 ? ((const any_u4 *)finder->shuffle.data)[sample]
                                             : ((const any_i8 *)finder->shuffle.data)[sample];
    int64_t begin, last = finder->end - finder->extra;
    if (row < 0 || row >= finder->shuffle.items || __builtin_mul_overflow(row, sequence_length, &begin)) return LEFT_TO_NUMPY;
    int64_t there = finder->end - (begin < last ? begin : last);
    range->begin = row;
    range->length = sequence_length + finder->extra < there ? sequence_length + finder->extra : there;
    range->shown = range->length < sequence_length ? range->length : sequence_length;
    return range->length > 0 ? 1 : LEFT_TO_NUMPY;
}

/* find_samples(finders, sequence_length, source, sample, ranges) -> how many ranges the samples are made of, in their order;
   row i of the batch is sample i. Or a negative number, or (source, epoch) of an epoch to add, (source, -1) where finders
   has None. finders: a tuple of capsules and None; source, sample: i8 (B,); ranges: i8 (room, RANGE_FIELDS). */
KERNEL(find_samples) {
    (void)module;
    static const Wanted wanted[] = {{"source", "i8", 0}, {"sample", "i8", 0}, {"ranges", "i8", 1}};
    int64_t sequence_length, status = 1;
    Array arrays[3];
    Call call;
    if (!arguments_are("find_samples", count, 5) ||
        !integer_of(arguments[1], "sequence_length", 1, (int64_t)1 << 40, &sequence_length) ||
        !open_arrays(arguments + 2, wanted, arrays, 3))
        return NULL;
    PyObject *result = NULL;
    const int64_t *source = arrays[0].data, *sample = arrays[1].data;
    if (arrays[0].items != arrays[1].items)
        refuse("find_samples: there are as many sources as samples");
    else if (begin_call(&call, arrays[0].items)) {
        for (int64_t at = 0; status > 0 && at < call.number; at++)
            status = piece_of_sample(&call, at, arguments[0], source[at], sample[at], sequence_length);
        result = answer(&call, status, &arrays[2]);
    }
    close_arrays(arrays, 3);
    return result;
}
