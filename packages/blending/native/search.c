/* Where the tokens of samples lie: from (dataset, sample) to ranges of documents.

       finders, samples --> Grid: stretches of lines --> pieces (this file) --> ranges.c --> ranges

   The plain statement in numpy is samples/chunk_grid.py. Here it is for all datasets of a batch in one call. A pair of
   numbers names what is missing (a finder, an epoch, a string), and Python adds it. One number names what does not fit,
   and numpy reads the batch. */

#include "finder.h"
#include "permute.h"

#include <string.h>

#define EPOCHS_AT_MOST 4096 /* that one sample may touch; a longer one is left to numpy */

/* ---- sample -> stretch of the line (chunk_grid.py); false: left to numpy */

static int64_t rounded_up(int64_t a, int64_t b) { return a <= 0 ? 0 : (a - 1) / b + 1; }

/* The last grid that begins with no later sample. */
static const Grid *grid_of(const Finder *line, int64_t sample) {
    int64_t at = line->number_of_grids - 1;
    while (at > 0 && line->grids[at].first_sample > sample) at--;
    return &line->grids[at];
}

/* The stretch of the sample that is read index-th from a grid, with so many tokens more behind it where there are. */
static int stretch_of(Finder *line, const Grid *grid, int64_t index, int64_t more, Range *range) {
    int64_t S = grid->sequence_length, place, next;
    if (index < 0 || __builtin_mul_overflow(index, S, &place) || __builtin_add_overflow(place, grid->origin, &place) ||
        __builtin_add_overflow(place, line->tokens + 2 * S, &next))
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

/* ---- calls */

/* The pieces of a call, and the epochs that they hold meanwhile. */
typedef struct {
    Piece *pieces;
    int64_t number, space; /* pieces: made, and for which there is room */
    int64_t held, room;    /* epochs, the same */
    Epoch **epochs;
    long long missing_source, missing;
} Call;

/* One more piece, a stretch that goes to a row from a column on; NULL and an exception if there is no memory. */
static Piece *new_piece(Call *call, Finder *finder, int64_t source, int64_t row, int64_t column) {
    if (call->number == call->space) {
        int64_t space = call->space ? 2 * call->space : 32;
        Piece *more = PyMem_Realloc(call->pieces, (size_t)space * sizeof *more);
        if (more == NULL) return (Piece *)PyErr_NoMemory();
        call->pieces = more, call->space = space;
    }
    Piece *piece = &call->pieces[call->number++];
    *piece = (Piece){.finder = finder, .range = {.source = source, .row = row, .column = column}};
    return piece;
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
    return finder == Py_None ? NULL : finder_in(finder);
}

/* What a search lacks: an epoch, or one of these. */
enum { MISSING_FINDER = -1, MISSING_STRING = -2 /* of grid 0; -3 of grid 1, ... */ };

static int64_t missing(Call *call, int64_t source, int64_t what) {
    call->missing_source = source, call->missing = what;
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
        if (at < 0 || !reaches(line, line->epochs[at], range->begin + range->length))
            return missing(call, range->source, epoch);
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

/* Search with the GIL released and end the call: ranges found, a negative number, or (source, what is missing). */
static PyObject *answer(Call *call, int64_t status, const Array *ranges) {
    if (status > 0) {
        Found found = {.ranges = ranges->data, .room = ranges->items / RANGE_FIELDS};
        int level = current_level();
        Py_BEGIN_ALLOW_THREADS
        status = find_ranges(level, call->pieces, call->number, call->epochs, &found);
        Py_END_ALLOW_THREADS
    } else if (status == MISSING) {
        PyObject *what = PyErr_Occurred() ? NULL : Py_BuildValue("(LL)", call->missing_source, call->missing);
        end_call(call);
        return what;
    }
    end_call(call);
    return PyErr_Occurred() ? NULL : PyLong_FromLongLong(status);
}

/* The stretches of the inside-th sample that was left over. 1, a negative number, or 0 and an exception. */
static int64_t pieces_of_string(Call *call, Finder *line, const Grid *grid, int64_t inside, int64_t source,
                                int64_t row) {
    const any_i8 *string = grid->string.data;
    if (string == NULL) return missing(call, source, MISSING_STRING - (grid - line->grids));
    int64_t S = grid->sequence_length, low = inside * S, stretches = grid->string.items / 2, at = 0, length;
    for (int64_t some = stretches; some > 1;) { /* the last that begins no later is in at .. at + some - 1 */
        int64_t half = some / 2;
        at += string[2 * (at + half)] <= low ? half : 0;
        some -= half;
    }
    for (int64_t done = 0; done < S; done += length, at++) {
        if (at >= stretches) return LEFT_TO_NUMPY;
        int64_t end = at + 1 < stretches ? string[2 * at + 2] : grid->left_over_samples * S;
        length = end - low < S ? end - low - done : S - done;
        Piece *piece = new_piece(call, line, source, row, done);
        if (piece == NULL) return 0;
        piece->range.begin = string[2 * at + 1] + low + done - string[2 * at];
        piece->range.length = length + 1, piece->range.shown = length;
        int64_t status = length < 1 ? LEFT_TO_NUMPY : hold_epochs(call, piece);
        if (status < 1) return status;
    }
    return 1;
}

/* The stretches of a sample of a line. The same returns. */
static int64_t pieces_of_line(Call *call, Finder *line, int64_t sample, int64_t sequence_length, int64_t source,
                              int64_t row) {
    const Grid *grid = grid_of(line, sample);
    int64_t inside = sample - grid->first_sample, index = inside - grid->left_over_samples;
    if (inside < 0 || grid->sequence_length != sequence_length) return LEFT_TO_NUMPY;
    if (index < 0) return pieces_of_string(call, line, grid, inside, source, row);
    Piece *piece = new_piece(call, line, source, row, 0);
    if (piece == NULL) return 0;
    return stretch_of(line, grid, index, 1, &piece->range) ? hold_epochs(call, piece) : LEFT_TO_NUMPY;
}

/* The row of the sample index of a sample of indices. The same returns. */
static int64_t piece_of_index(Call *call, Finder *finder, int64_t sample, int64_t sequence_length, int64_t source,
                              int64_t row) {
    if (sample >= finder->shuffle.items || finder->sequence_length != sequence_length) return LEFT_TO_NUMPY;
    Piece *piece = new_piece(call, finder, source, row, 0);
    if (piece == NULL) return 0;
    Range *range = &piece->range;
    int64_t begin, last = finder->end - finder->extra;
    range->begin = finder->shuffle.bytes == 4 ? ((const any_u4 *)finder->shuffle.data)[sample]
                                              : ((const any_i8 *)finder->shuffle.data)[sample];
    if (range->begin < 0 || range->begin >= finder->shuffle.items ||
        __builtin_mul_overflow(range->begin, sequence_length, &begin))
        return LEFT_TO_NUMPY;
    int64_t there = finder->end - (begin < last ? begin : last);
    range->length = sequence_length + finder->extra < there ? sequence_length + finder->extra : there;
    range->shown = range->length < sequence_length ? range->length : sequence_length;
    return range->length > 0 ? 1 : LEFT_TO_NUMPY;
}

/* find_samples(finders, sequence_length, source, sample, ranges) -> how many ranges the samples are made of, in their
   order; row i of the batch is sample i. Or a negative number, or of what is to be added first (source, epoch),
   (source, -1) where finders has None, (source, -2 - n) for the string of grid n. finders: a tuple of capsules and
   None; source, sample: i8 (B,); ranges: i8 (room, RANGE_FIELDS). */
KERNEL(find_samples) {
    (void)module;
    static const Wanted wanted[] = {{"source", "i8", 0}, {"sample", "i8", 0}, {"ranges", "i8", 1}};
    int64_t sequence_length, status = 1;
    Array arrays[3];
    Call call = {.pieces = NULL};
    if (!arguments_are("find_samples", count, 5) ||
        !integer_of(arguments[1], "sequence_length", 1, (int64_t)1 << 40, &sequence_length) ||
        !open_arrays(arguments + 2, wanted, arrays, 3))
        return NULL;
    PyObject *result = NULL;
    const int64_t *source = arrays[0].data, *sample = arrays[1].data;
    if (arrays[0].items != arrays[1].items)
        refuse("find_samples: there are as many sources as samples");
    else {
        for (int64_t at = 0; status > 0 && at < arrays[0].items; at++) {
            Finder *finder = finder_of(arguments[0], source[at]);
            if (finder == NULL)
                status = missing(&call, source[at], MISSING_FINDER);
            else if (sample[at] < 0)
                status = LEFT_TO_NUMPY;
            else
                status = (finder->indexed ? piece_of_index : pieces_of_line)(&call, finder, sample[at], sequence_length,
                                                                             source[at], at);
        }
        result = answer(&call, status, &arrays[2]);
    }
    close_arrays(arrays, 3);
    return result;
}
