/* Where each sample begins, as (place in the document index, offset).

       document index, lengths --> sample_rows (this file) --> megatron/sample_index.py, which states it in closed form

   Source: megatron-core 0.16.1 helpers.cpp, build_sample_idx. */

#include "kernels.h"

#define AHEAD 32 /* places whose lengths are fetched in advance: documents are in random order */

/* Rows 0..samples; a row behind the last token is (last place, its length - extra). Returns the first place without a
   length, or places. */
INLINE int64_t fill_rows(const int32_t *document, int64_t places, const int64_t *length, int64_t documents, int64_t low,
                         int64_t sequence_length, int64_t extra, void *rows, int64_t samples, int bytes) {
#define PUT(row, place, offset)                                                                                    \
    do {                                                                                                           \
        if (bytes == 4)                                                                                            \
            ((int32_t *)rows)[2 * (row)] = (int32_t)(place), ((int32_t *)rows)[2 * (row) + 1] = (int32_t)(offset); \
        else                                                                                                       \
            ((int64_t *)rows)[2 * (row)] = (place), ((int64_t *)rows)[2 * (row) + 1] = (offset);                   \
    } while (0)
    /* The next row, the token where it begins, and the end of the places so far. */
    int64_t row = 1, token = sequence_length, end = 0;
    PUT(0, 0, 0);
    for (int64_t place = 0; place < places && row <= samples; place++) {
        if (place + AHEAD < places) {
            int64_t ahead = document[place + AHEAD] - low;
            __builtin_prefetch(&length[ahead < 0 || ahead >= documents ? 0 : ahead]);
        }
        int64_t number = document[place] - low;
        if (number < 0 || number >= documents) return place;
        int64_t begin = end;
        end += length[number];
        /* Most documents begin no row or one: so much without a branch, which would be guessed wrong. */
        do {
            PUT(row, place, token - begin);
            int64_t is_here = token <= end - extra;
            row += is_here;
            token += sequence_length & -is_here;
        } while (row <= samples && token <= end - extra);
    }
    for (; row <= samples; row++) PUT(row, places - 1, length[document[places - 1] - low] - extra);
    return places;
#undef PUT
}

/* sample_rows(document, length, low, sequence_length, extra, rows) -> place of the first document without a length, or
   how many there are. document: i4 (K,), K > 0; length: i8 of documents low and on; rows: i4 or i8 (n + 1, 2). */
KERNEL(sample_rows) {
    (void)module;
    static const Wanted wanted[] = {{"document", "i4", 0}, {"length", "i8", 0}, {"rows", "i4 i8", 1}};
    Array arrays[3];
    int64_t low, sequence_length, extra, last = INT32_MAX, done = 0;
    if (!arguments_are("sample_rows", count, 6) || !integer_of(arguments[2], "low", 0, last, &low) ||
        !integer_of(arguments[3], "sequence_length", 1, last, &sequence_length) ||
        !integer_of(arguments[4], "extra", 0, 1, &extra) ||
        !open_arrays((PyObject *[]){arguments[0], arguments[1], arguments[5]}, wanted, arrays, 3))
        return NULL;
    const int32_t *document = arrays[0].data;
    const int64_t *length = arrays[1].data, places = arrays[0].items, documents = arrays[1].items;
    int64_t samples = arrays[2].items / 2 - 1;
    PyObject *result = NULL;
    if (arrays[2].items % 2 || samples < 0 || places < 1 || documents < 1)
        refuse("sample_rows: there are documents, and rows of two numbers, one more than samples");
    else {
        Py_BEGIN_ALLOW_THREADS
        if (arrays[2].item_bytes == 4)
            done =
                fill_rows(document, places, length, documents, low, sequence_length, extra, arrays[2].data, samples, 4);
        else
            done =
                fill_rows(document, places, length, documents, low, sequence_length, extra, arrays[2].data, samples, 8);
        Py_END_ALLOW_THREADS
        result = PyLong_FromLongLong(done);
    }
    close_arrays(arrays, 3);
    return result;
}
