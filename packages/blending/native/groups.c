/* Tokens of documents in permuted order, summed up in groups.

       key, lengths, pointers --> group_sums (this file) --> samples/document_shuffle.py, which states it in numpy

   Of some groups every document lies somewhere else in memory: those of a chunk are asked for while the chunk before is
   summed up. All groups together are made the other way round, from each document to its place. */

#include "permute.h"
#include "views.h"

#include <string.h>

#define CHUNK 256 /* documents, at least a group */

/* What is summed up. */
typedef struct {
    Permutation by;
    Block block, back; /* of the level in use */
    const any_i4 *lengths;
    const any_i8 *pointers;
    int64_t documents, held, group, first, item_bytes; /* held: in the source */
} Groups;

/* Which documents stand at so many places from one on; they are asked for. */
static void fetch_documents(const Groups *all, int64_t place, int number, uint64_t *document) {
    for (int at = 0; at < number; at++) document[at] = (uint64_t)(place + at);
    all->block(&all->by, document, number);
    for (int at = 0; at < number; at++) {
        document[at] += (uint64_t)all->first;
        __builtin_prefetch(all->lengths + document[at]);
        __builtin_prefetch(all->pointers + document[at]);
    }
}

/* Whether a document has a length that fits its pointer. */
INLINE int fits(const Groups *all, uint64_t document, int64_t length) {
    int64_t begin = all->pointers[document], bytes = length * all->item_bytes;
    if (length < 0 || begin < 0 || (begin & (all->item_bytes - 1)) || begin > INT64_MAX - bytes) return 0;
    return document + 1 == (uint64_t)all->held || all->pointers[document + 1] == begin + bytes;
}

/* The sums of groups from `begin` on; how many, fewer if the next one has a document that does not fit. */
static int64_t sum_groups(const Groups *all, int64_t begin, int64_t groups, int64_t *out) {
    uint64_t document[2][CHUNK];
    int64_t together = CHUNK / all->group, place = begin * all->group, end = (begin + groups) * all->group;
    if (end > all->documents) end = all->documents;
    int64_t step = together * all->group;
    int number = (int)(end - place < step ? end - place : step), turn = 0;
    fetch_documents(all, place, number, document[0]);
    for (int64_t done = 0; number; turn = !turn) {
        int64_t next = place + number;
        int following = (int)(end - next < step ? end - next : step);
        if (following) fetch_documents(all, next, following, document[!turn]);
        for (int at = 0; at < number;) {
            int64_t sum = 0;
            int stop = at + (int)all->group < number ? at + (int)all->group : number;
            for (; at < stop; at++) {
                int64_t length = all->lengths[document[turn][at]];
                if (!fits(all, document[turn][at], length)) return done;
                sum += length;
            }
            out[done++] = sum;
        }
        place = next, number = following;
    }
    return groups;
}

/* Add the length of every document to the sum of the group that it stands in. The documents are read in their own
   order, and only the sums, a fraction of them, are met at random. Whether all fit. */
static int64_t scatter(const Groups *all, int64_t *out) {
    uint64_t place[PERMUTED_AT_ONCE];
    int shift = __builtin_ctzll((uint64_t)all->group);
    for (int64_t begin = 0; begin < all->documents; begin += PERMUTED_AT_ONCE) {
        int64_t left = all->documents - begin;
        int number = (int)(left < PERMUTED_AT_ONCE ? left : PERMUTED_AT_ONCE);
        for (int at = 0; at < number; at++) place[at] = (uint64_t)(begin + at);
        all->back(&all->by, place, number);
        for (int at = 0; at < number; at++) {
            uint64_t document = (uint64_t)(all->first + begin + at);
            int64_t length = all->lengths[document];
            if (!fits(all, document, length)) return 0;
            out[place[at] >> shift] += length;
        }
    }
    return 1;
}

/* group_sums(key, numbers, lengths, pointers, out) -> groups done. numbers: i8 (documents, first group, documents in a
   group: a power of two, number in the source of the first, item_bytes: a power of two); lengths i4, pointers i8: of the
   source; out: i8 (groups,). All groups are made in one pass over the source, some of them by a look at each document. */
KERNEL(group_sums) {
    (void)module;
    static const Wanted wanted[] = {{"numbers", "i8", 0}, {"out", "i8", 1}};
    uint64_t key;
    Array arrays[2];
    View lengths = {.data = NULL}, pointers = {.data = NULL};
    if (!arguments_are("group_sums", count, 5) || !word_of(arguments[0], "key", &key) ||
        !open_arrays((PyObject *[]){arguments[1], arguments[4]}, wanted, arrays, 2))
        return NULL;
    PyObject *result = NULL;
    const int64_t *numbers = arrays[0].data, groups = arrays[1].items;
    if (open_view(arguments[2], "lengths", "i4", &lengths) && open_view(arguments[3], "pointers", "i8", &pointers)) {
        int fit = arrays[0].items == 5 && lengths.items == pointers.items && groups >= 1;
        fit = fit && numbers[0] >= 1 && numbers[0] <= LARGEST && numbers[2] >= 1 && numbers[2] <= CHUNK &&
              !(numbers[2] & (numbers[2] - 1)) && numbers[3] >= 0 && numbers[3] <= lengths.items &&
              numbers[0] <= lengths.items - numbers[3] && numbers[4] >= 1 && numbers[4] <= 8 &&
              !(numbers[4] & (numbers[4] - 1)) && numbers[1] >= 0 && groups <= LARGEST && numbers[1] <= LARGEST &&
              numbers[1] + groups - 1 <= (numbers[0] - 1) / numbers[2];
        if (!fit)
            refuse("group_sums: numbers do not describe groups of the documents there are");
        else {
            int level = current_level();
            Groups all = {.by = permutation_of(key, (uint64_t)numbers[0]),
                          .block = AT_LEVEL(level, block),
                          .back = AT_LEVEL(level, back),
                          .lengths = lengths.data,
                          .pointers = pointers.data,
                          .documents = numbers[0],
                          .held = lengths.items,
                          .group = numbers[2],
                          .first = numbers[3],
                          .item_bytes = numbers[4]};
            int64_t done, *out = arrays[1].data;
            Py_BEGIN_ALLOW_THREADS
            if (groups == (numbers[0] - 1) / numbers[2] + 1) {
                memset(out, 0, (size_t)groups * sizeof *out);
                done = scatter(&all, out) ? groups : 0;
            } else
                done = sum_groups(&all, numbers[1], groups, out);
            Py_END_ALLOW_THREADS
            result = PyLong_FromLongLong(done);
        }
    }
    close_view(&lengths);
    close_view(&pointers);
    close_arrays(arrays, 2);
    return result;
}
