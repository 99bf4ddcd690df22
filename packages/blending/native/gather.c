/* Token ids of ranges into the rows of a batch, and the other arrays of a batch from its rows.

       ranges, maps --> gather (this file) --> tokens, labels, begins --> arrays_of_rows --> the rest

   A map is all ids of one source, flat, as they lie in its file. Every range is checked against its map and its row
   before the first id of any is read. Oracles: the numpy statements in gather.py and gpt_arrays.py. */

#include "views.h"

#include <string.h>

static const char MAP[] = "sixfold.blending.map";

static void free_map(PyObject *capsule) {
    View *map = PyCapsule_GetPointer(capsule, MAP);
    if (map == NULL) return;
    close_view(map);
    PyMem_Free(map);
}

/* open_map(ids) -> capsule that holds them. ids: whole numbers that int64 holds. */
KERNEL(open_map) {
    (void)module;
    if (!arguments_are("open_map", count, 1)) return NULL;
    View *map = PyMem_Calloc(1, sizeof *map);
    if (map == NULL) return PyErr_NoMemory();
    PyObject *capsule = NULL;
    if (open_view(arguments[0], "ids", "i1 u1 i2 u2 i4 u4 i8", map)) capsule = PyCapsule_New(map, MAP, free_map);
    if (capsule == NULL) {
        close_view(map);
        PyMem_Free(map);
    }
    return capsule;
}

/* ---- gather */

/* Ids to two places at once. */
#define AHEAD 2 /* ranges */
#define FETCHED_BYTES 8192

#define COPY(type)                                                              \
    {                                                                           \
        const any_##type *from = (const any_##type *)ids + begin;               \
        for (int64_t at = 0; at < items; at++) to[at] = second[at] = from[at];  \
    }

INLINE void copy_twice(const View *map, int64_t begin, int64_t items, int64_t *restrict to, int64_t *restrict second) {
    const void *ids = map->data;
    switch (map->bytes * 2 + (map->kind == 'i')) {
        case 3: COPY(i1) break;
        case 2: COPY(u1) break;
        case 5: COPY(i2) break;
        case 4: COPY(u2) break;
        case 9: COPY(i4) break;
        case 8: COPY(u4) break;
        default: COPY(i8)
    }
}

static int64_t id_at(const View *map, int64_t place) {
    int64_t one, again;
    copy_twice(map, place, 1, &one, &again);
    return one;
}

/* One range, checked before: ids 0..shown-1 are tokens, the last `labels` are labels one column before their own. */
INLINE void copy_range(const View *map, const Range *range, int64_t *tokens, int64_t *labels) {
    int64_t *to = tokens + range->column, *label_to = labels + range->column - 1;
    int64_t first = range->length - range->labels; /* 0 or 1, the first id that is a label */
    for (int64_t at = 0; at < first && at < range->shown; at++) to[at] = id_at(map, range->begin + at);
    for (int64_t at = range->shown > first ? range->shown : first; at < range->length; at++)
        label_to[at] = id_at(map, range->begin + at);
    if (range->shown > first) copy_twice(map, range->begin + first, range->shown - first, to + first, label_to + first);
}

static void copy_range_plain(const View *map, const Range *range, int64_t *tokens, int64_t *labels) {
    copy_range(map, range, tokens, labels);
}
AVX2 static void copy_range_avx2(const View *map, const Range *range, int64_t *tokens, int64_t *labels) {
    copy_range(map, range, tokens, labels);
}
AVX512 static void copy_range_avx512(const View *map, const Range *range, int64_t *tokens, int64_t *labels) {
    copy_range(map, range, tokens, labels);
}

/* Ask for the ids of a range that is copied soon: they lie anywhere in memory, and each line is some 100 ns away. */
static void fetch(const View *map, const Range *range) {
    const char *from = (const char *)map->data + range->begin * map->bytes;
    int64_t bytes = range->length * map->bytes;
    for (int64_t at = 0; at < bytes && at < FETCHED_BYTES; at += 64) __builtin_prefetch(from + at);
}

/* Whether a range lies in its row: its tokens in 0..width-1, its labels too, and those are all but maybe the first. */
static int fits_row(const Range *range, int64_t rows, int64_t width) {
    return range->row >= 0 && range->row < rows && range->column >= 0 && range->column <= width && range->length >= 0 &&
           range->length <= width - range->column + 1 && range->shown >= 0 && range->shown <= range->length &&
           range->shown <= width - range->column && range->labels >= 0 && range->labels <= range->length &&
           range->length - range->labels <= 1 &&
           (range->labels < range->length || range->column > 0 || range->length == 0);
}

/* Whether its map holds it. */
static int fits_map(const Range *range, const View *map) {
    return range->begin >= 0 && range->begin <= map->items && range->length <= map->items - range->begin;
}

static const View LEFT_OUT; /* stands for a source whose ranges are not read here */

/* The maps of a list, NULL for None; NULL and an exception if one is something else. */
static const View **maps_of(PyObject *list, int64_t *number) {
    if (!PyTuple_Check(list)) {
        PyErr_SetString(PyExc_TypeError, "maps is no tuple");
        return NULL;
    }
    *number = PyTuple_Size(list);
    const View **maps = PyMem_Calloc((size_t)*number + 1, sizeof *maps);
    if (maps == NULL) return (const View **)PyErr_NoMemory();
    for (int64_t at = 0; at < *number; at++) {
        PyObject *object = PyTuple_GetItem(list, (Py_ssize_t)at);
        if (object == Py_None) continue;
        maps[at] = object == Py_False ? &LEFT_OUT : (const View *)PyCapsule_GetPointer(object, MAP);
        if (maps[at] == NULL) {
            PyMem_Free(maps);
            return NULL;
        }
    }
    return maps;
}

/* gather(maps, found, pad, rows, ranges, tokens, labels, begins) -> found, or the first range that does not fit its map
   or row: then nothing was read. maps: a tuple of capsules of open_map, None where no range may be, False for sources
   whose ranges are left out here. ranges: i8 (at least found, RANGE_FIELDS). tokens, labels: i8 (rows, width), every
   item is written: pad where no range is. begins: u1 (rows, width), 1 in column 0 and where a range shows its first
   token, else 0. */
KERNEL(gather) {
    (void)module;
    static const Wanted wanted[] = {{"ranges", "i8", 0}, {"tokens", "i8", 1}, {"labels", "i8", 1}, {"begins", "u1", 1}};
    int64_t found, pad, rows, number;
    if (!arguments_are("gather", count, 8) || !integer_of(arguments[1], "found", 0, INT64_MAX / RANGE_FIELDS, &found) ||
        !integer_of(arguments[2], "pad", INT64_MIN, INT64_MAX, &pad) ||
        !integer_of(arguments[3], "rows", 0, INT64_MAX, &rows))
        return NULL;
    const View **maps = maps_of(arguments[0], &number);
    if (maps == NULL) return NULL;
    Array arrays[4];
    if (!open_arrays(arguments + 4, wanted, arrays, 4)) {
        PyMem_Free(maps);
        return NULL;
    }
    PyObject *result = NULL;
    const Range *ranges = arrays[0].data;
    int64_t *tokens = arrays[1].data, *labels = arrays[2].data, items = arrays[1].items, wrong = 0;
    uint8_t *begins = arrays[3].data;
    int64_t width = rows ? items / rows : 0;
    if (found > arrays[0].items / RANGE_FIELDS)
        refuse("gather: there are fewer ranges than found");
    else if (arrays[2].items != items || arrays[3].items != items || width * rows != items)
        refuse("gather: tokens, labels and begins have equally many items, a multiple of rows");
    else {
        int level = current_level();
        void (*copy)(const View *, const Range *, int64_t *, int64_t *) = AT_LEVEL(level, copy_range);
        Py_BEGIN_ALLOW_THREADS
        int64_t shown = 0, labelled = 0;
        for (; wrong < found; wrong++) {
            const Range *range = &ranges[wrong];
            const View *map = range->source < 0 || range->source >= number ? NULL : maps[range->source];
            if (map == NULL || !fits_row(range, rows, width) || (map != &LEFT_OUT && !fits_map(range, map))) break;
            shown += range->shown;
            labelled += range->labels;
        }
        if (wrong == found) {
            if (shown < items || labelled < items)
                for (int64_t at = 0; at < items; at++) tokens[at] = labels[at] = pad;
            if (items) memset(begins, 0, (size_t)items);
            for (int64_t row = 0; width && row < rows; row++) begins[row * width] = 1;
            for (int64_t at = 0; at < found; at++) {
                const Range *range = &ranges[at], *later = range + AHEAD;
                int64_t row = range->row * width;
                if (at + AHEAD < found && maps[later->source] != &LEFT_OUT) fetch(maps[later->source], later);
                if (range->shown) begins[row + range->column] = 1;
                if (maps[range->source] != &LEFT_OUT) copy(maps[range->source], range, tokens + row, labels + row);
            }
        }
        Py_END_ALLOW_THREADS
        result = PyLong_FromLongLong(wrong);
    }
    close_arrays(arrays, 4);
    PyMem_Free(maps);
    return result;
}

/* ---- the other arrays */

enum { LAST_LABEL_IS_PAD = 1, HAS_EOD = 2, EOD_WITHOUT_LOSS = 4, POSITIONS_RESTART = 8, DOCUMENTS = 16 };

typedef struct {
    int64_t eod, pad, flags, width;
} Layout;

/* The first place from `at` on that holds the value, or end. */
INLINE int64_t next_of(const int64_t *items, int64_t at, int64_t end, int64_t value) {
    for (; at + 64 <= end; at += 64) {
        int64_t found = 0;
        for (int place = 0; place < 64; place++) found |= -(int64_t)(items[at + place] == value);
        if (found) break;
    }
    while (at < end && items[at] != value) at++;
    return at;
}

/* Masks, and padding made 0; ids and labels are as they were read. */
INLINE void mask_row(const Layout *layout, int64_t *restrict tokens, int64_t *restrict labels, float *restrict mask) {
    int64_t pad = layout->pad, pads = 0;
    if (layout->flags & LAST_LABEL_IS_PAD) labels[layout->width - 1] = pad;
    if (layout->flags & EOD_WITHOUT_LOSS && layout->flags & HAS_EOD) {
        for (int64_t at = 0; at < layout->width; at++) {
            mask[at] = (labels[at] != pad) & (tokens[at] != layout->eod) ? 1.0f : 0.0f;
            pads |= -(int64_t)(labels[at] == pad) | -(int64_t)(tokens[at] == pad);
        }
    } else {
        for (int64_t at = 0; at < layout->width; at++) {
            mask[at] = labels[at] != pad ? 1.0f : 0.0f;
            pads |= -(int64_t)(labels[at] == pad) | -(int64_t)(tokens[at] == pad);
        }
    }
    if (!pads) return;
    for (int64_t at = 0; at < layout->width; at++) {
        tokens[at] = tokens[at] == pad ? 0 : tokens[at];
        labels[at] = labels[at] == pad ? 0 : labels[at];
    }
}

INLINE void count_up(int64_t *to, int64_t items) {
    for (int64_t at = 0; at < items; at++) to[at] = at;
}

INLINE void position_row(const Layout *layout, const int64_t *tokens, int64_t *positions) {
    int64_t begin = 0, width = layout->width;
    while (layout->flags & POSITIONS_RESTART && layout->flags & HAS_EOD) {
        int64_t eod = next_of(tokens, begin, width, layout->eod);
        if (eod >= width - 1) break;
        count_up(positions + begin, eod + 1 - begin);
        begin = eod + 1;
    }
    count_up(positions + begin, width - begin);
}

/* Documents also begin behind each EOD. Returns how many begin in the row. */
INLINE int64_t document_row(const Layout *layout, const int64_t *tokens, uint8_t *begins, int32_t *ids) {
    int64_t width = layout->width, documents = 0;
    begins[0] = 1;
    if (layout->flags & HAS_EOD)
        for (int64_t eod = next_of(tokens, 0, width, layout->eod); eod < width - 1;
             eod = next_of(tokens, eod + 1, width, layout->eod))
            begins[eod + 1] = 1;
    for (int64_t begin = 0, end; begin < width; begin = end, documents++) {
        const uint8_t *next = memchr(begins + begin + 1, 1, (size_t)(width - begin - 1));
        end = next ? next - begins : width;
        for (int64_t at = begin; ids && at < end; at++) ids[at] = (int32_t)documents;
    }
    return documents;
}

INLINE int64_t arrays_of_row(const Layout *layout, int64_t *tokens, int64_t *labels, uint8_t *begins, float *mask,
                             int64_t *positions, int32_t *ids) {
    int64_t documents = layout->flags & DOCUMENTS ? document_row(layout, tokens, begins, ids) : 0;
    position_row(layout, tokens, positions);
    mask_row(layout, tokens, labels, mask);
    return documents;
}

#define ROW_ARGUMENTS const Layout *l, int64_t *t, int64_t *b, uint8_t *s, float *m, int64_t *p, int32_t *i
static int64_t row_plain(ROW_ARGUMENTS) { return arrays_of_row(l, t, b, s, m, p, i); }
AVX2 static int64_t row_avx2(ROW_ARGUMENTS) { return arrays_of_row(l, t, b, s, m, p, i); }
AVX512 static int64_t row_avx512(ROW_ARGUMENTS) { return arrays_of_row(l, t, b, s, m, p, i); }

/* arrays_of_rows(eod, pad, flags, rows, tokens, labels, begins, loss_mask, positions, ids) -> documents that begin in
   the batch, 0 without the flag DOCUMENTS. All (rows, width): tokens, labels i8 (padding becomes 0), begins u1
   (documents behind an EOD are added), loss_mask f4, positions i8, ids i4 or empty. */
KERNEL(arrays_of_rows) {
    (void)module;
    static const Wanted wanted[] = {{"tokens", "i8", 1},    {"labels", "i8", 1},    {"begins", "u1", 1},
                                    {"loss_mask", "f4", 1}, {"positions", "i8", 1}, {"ids", "i4", 1}};
    Layout layout;
    int64_t rows, documents = 0;
    if (!arguments_are("arrays_of_rows", count, 10) ||
        !integer_of(arguments[0], "eod", INT64_MIN, INT64_MAX, &layout.eod) ||
        !integer_of(arguments[1], "pad", INT64_MIN, INT64_MAX, &layout.pad) ||
        !integer_of(arguments[2], "flags", 0, 31, &layout.flags) ||
        !integer_of(arguments[3], "rows", 0, INT64_MAX, &rows))
        return NULL;
    Array arrays[6];
    if (!open_arrays(arguments + 4, wanted, arrays, 6)) return NULL;
    int64_t items = arrays[0].items, fit = 1;
    PyObject *result = NULL;
    layout.width = rows ? items / rows : 0;
    for (int at = 1; at < 6; at++) fit &= arrays[at].items == items || (at == 5 && arrays[at].items == 0);
    if (!fit || layout.width * rows != items)
        refuse("arrays_of_rows: the arrays have equally many items, a multiple of rows");
    else {
        int level = current_level();
        int64_t (*row_of)(ROW_ARGUMENTS) = AT_LEVEL(level, row);
        Py_BEGIN_ALLOW_THREADS
        for (int64_t row = 0; layout.width && row < rows; row++) {
            int64_t at = row * layout.width;
            int32_t *ids = arrays[5].items ? (int32_t *)arrays[5].data + at : NULL;
            documents += row_of(&layout, (int64_t *)arrays[0].data + at, (int64_t *)arrays[1].data + at,
                                (uint8_t *)arrays[2].data + at, (float *)arrays[3].data + at,
                                (int64_t *)arrays[4].data + at, ids);
        }
        Py_END_ALLOW_THREADS
        result = PyLong_FromLongLong(documents);
    }
    close_arrays(arrays, 6);
    return result;
}

/* boundaries(begins, cu_seqlens) -> True: the places of the ones in begins (u1), then how many items begins has.
   cu_seqlens: i4, one item more than there are ones. */
KERNEL(boundaries) {
    (void)module;
    static const Wanted wanted[] = {{"begins", "u1", 0}, {"cu_seqlens", "i4", 1}};
    Array arrays[2];
    if (!arguments_are("boundaries", count, 2) || !open_arrays(arguments, wanted, arrays, 2)) return NULL;
    const uint8_t *begins = arrays[0].data;
    int32_t *places = arrays[1].data;
    int64_t items = arrays[0].items, room = arrays[1].items, found = 0;
    PyObject *result = NULL;
    if (items <= INT32_MAX) {
        Py_BEGIN_ALLOW_THREADS
        for (int64_t at = 0; at < items && found < room; at++) {
            const uint8_t *next = memchr(begins + at, 1, (size_t)(items - at));
            at = next ? next - begins : items;
            places[found++] = (int32_t)at;
        }
        if (found < room && (found == 0 || places[found - 1] < items)) places[found++] = (int32_t)items;
        Py_END_ALLOW_THREADS
    }
    if (found == room && found && places[found - 1] == items)
        result = PyBool_FromLong(1);
    else
        refuse("boundaries: cu_seqlens has one item more than begins has ones, and begins at most 2^31 - 1 items");
    close_arrays(arrays, 2);
    return result;
}
