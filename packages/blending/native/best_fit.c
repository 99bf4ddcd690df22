/* Items into rows of one capacity: the longest first, each to the row with the least room that holds it.

       lengths, capacity --> best_fit (this file) --> samples/best_fit.py, which states it in Python

   Rows with the same room form a bucket, a heap of runs of rows that follow each other; the first row of a bucket goes
   first. Items of one length are placed together, run by run. A bit per room, and a bit per word of those, find the
   least room that holds a length. */

#include "kernels.h"

#include <stdlib.h>
#include <string.h>

/* Rows first .. first + rows - 1, all with the same room; a node of the skew heap of its bucket, 0 for none. */
typedef struct {
    int32_t first, rows;
    int32_t left, right;
} Run;

typedef struct {
    int64_t capacity, items;
    int64_t rows;       /* begun so far */
    int32_t *count;     /* (capacity + 1,) items of each length */
    int32_t *bucket;    /* (capacity + 1,) the run at the top of each heap */
    uint64_t *rooms;    /* a bit per room that some row has */
    uint64_t *words;    /* a bit per word of those */
    Run *runs;          /* (items + 1,): each run has a row, and each row an item */
    int32_t spare, made; /* runs that were used up, linked by left; runs ever made */
    int32_t *row;       /* (items,) of each item, the longest first; NULL: rows are counted alone */
} Packing;

/* Two heaps as one; the run with the lower first row is above. */
static int32_t joined(Packing *all, int32_t one, int32_t other) {
    int32_t root = 0, *place = &root;
    while (one && other) {
        if (all->runs[other].first < all->runs[one].first) {
            int32_t kept = one;
            one = other;
            other = kept;
        }
        Run *run = &all->runs[one];
        *place = one;
        one = run->right;
        run->right = run->left;
        place = &run->left;
    }
    *place = one ? one : other;
    return root;
}

static void add_run(Packing *all, int64_t room, int64_t first, int64_t rows) {
    int32_t number = all->spare;
    if (number)
        all->spare = all->runs[number].left;
    else
        number = ++all->made;
    all->runs[number] = (Run){(int32_t)first, (int32_t)rows, 0, 0};
    if (!all->bucket[room]) {
        all->rooms[room >> 6] |= 1ull << (room & 63);
        all->words[room >> 12] |= 1ull << (room >> 6 & 63);
    }
    all->bucket[room] = joined(all, all->bucket[room], number);
}

/* The run at the top of a bucket is used up. */
static void drop_run(Packing *all, int64_t room) {
    int32_t number = all->bucket[room];
    Run *run = &all->runs[number];
    all->bucket[room] = joined(all, run->left, run->right);
    run->left = all->spare;
    all->spare = number;
    if (all->bucket[room]) return;
    all->rooms[room >> 6] &= ~(1ull << (room & 63));
    if (!all->rooms[room >> 6]) all->words[room >> 12] &= ~(1ull << (room >> 6 & 63));
}

/* The least room of a row, size or above; 0 if no row has so much. */
static int64_t fitting(const Packing *all, int64_t size) {
    int64_t word = size >> 6, last = all->capacity >> 12;
    uint64_t bits = all->rooms[word] & ~0ull << (size & 63);
    if (bits) return word << 6 | __builtin_ctzll(bits);
    word++;
    int64_t above = word >> 6;
    if (above > last) return 0;
    bits = all->words[above] & ~0ull << (word & 63);
    while (!bits) {
        if (++above > last) return 0;
        bits = all->words[above];
    }
    word = above << 6 | __builtin_ctzll(bits);
    return word << 6 | __builtin_ctzll(all->rooms[word]);
}

static void place_all(Packing *all) {
    int32_t *row = all->row;
    for (int64_t size = all->capacity; size; size--)
        for (int64_t count = all->count[size]; count;) {
            int64_t found = fitting(all, size), room = found ? found : all->capacity, first = all->rows;
            int64_t each = room / size < count ? room / size : count, used = count / each;
            if (found) {
                Run *run = &all->runs[all->bucket[room]];
                first = run->first;
                if (run->rows > used) {
                    run->first += (int32_t)used; /* still below all other runs of the bucket */
                    run->rows -= (int32_t)used;
                } else {
                    used = run->rows;
                    drop_run(all, room);
                }
            } else
                all->rows += used;
            if (room > each * size) add_run(all, room - each * size, first, used);
            count -= used * each;
            if (!row) continue;
            for (int64_t one = first; one < first + used; one++)
                for (int64_t item = 0; item < each; item++) *row++ = (int32_t)one;
        }
}

/* Items and their rows, row by row. below is zeros, and becomes the place of each row's next item. */
static void list_rows(Packing *all, const int64_t *length, int32_t *below, int64_t *item, int64_t *row) {
    for (int64_t at = 0; at < all->items; at++) below[all->row[at] + 1]++;
    for (int64_t at = 0; at < all->rows; at++) below[at + 1] += below[at];
    int32_t *place = all->row, longer = 0; /* of the longest item, the next, ...: where it is listed */
    for (int64_t at = 0; at < all->items; at++) {
        int32_t number = all->row[at], there = below[number]++;
        row[there] = number;
        place[at] = there;
    }
    for (int64_t size = all->capacity; size; size--) {
        int32_t items = all->count[size];
        all->count[size] = longer;
        longer += items;
    }
    for (int64_t at = 0; at < all->items; at++) item[place[all->count[length[at]]++]] = at;
}

/* best_fit(length, capacity, item, row) -> rows. length: i8 (I,), 1..capacity; item and row: i8 (I,), or both without an
   item where rows are counted alone. */
KERNEL(best_fit) {
    (void)module;
    static const Wanted wanted[] = {{"length", "i8", 0}, {"item", "i8", 1}, {"row", "i8", 1}};
    Array arrays[3];
    int64_t capacity;
    if (!arguments_are("best_fit", count, 4) ||
        !integer_of(arguments[1], "capacity", 1, INT32_MAX - 1, &capacity) ||
        !open_arrays((PyObject *[]){arguments[0], arguments[2], arguments[3]}, wanted, arrays, 3))
        return NULL;
    const int64_t *length = arrays[0].data;
    int64_t items = arrays[0].items, listed = arrays[1].items, wrong = 0;
    PyObject *result = NULL;
    if (items >= INT32_MAX || listed != arrays[2].items || (listed && listed != items)) {
        refuse("best_fit: item and row have as many items as length, or none");
        goto close;
    }
    Packing all = {.capacity = capacity, .items = items};
    size_t sizes = (size_t)capacity + 1, words = sizes / 64 + 1;
    all.count = calloc(sizes, sizeof *all.count);
    all.bucket = calloc(sizes, sizeof *all.bucket);
    all.rooms = calloc(words, sizeof *all.rooms);
    all.words = calloc(words / 64 + 1, sizeof *all.words);
    all.runs = malloc(((size_t)items + 1) * sizeof *all.runs);
    all.row = listed ? malloc((size_t)items * sizeof *all.row) : NULL;
    int32_t *below = listed ? calloc((size_t)items + 2, sizeof *below) : NULL;
    if (!all.count || !all.bucket || !all.rooms || !all.words || !all.runs || (listed && !(all.row && below)))
        PyErr_NoMemory();
    else {
        Py_BEGIN_ALLOW_THREADS
        for (int64_t at = 0; at < items && !wrong; at++) {
            if (length[at] < 1 || length[at] > capacity)
                wrong = 1;
            else
                all.count[length[at]]++;
        }
        if (!wrong) place_all(&all);
        if (!wrong && listed) list_rows(&all, length, below, arrays[1].data, arrays[2].data);
        Py_END_ALLOW_THREADS
        result = wrong ? refuse("best_fit: lengths lie in 1..capacity") : PyLong_FromLongLong(all.rows);
    }
    free(all.count);
    free(all.bucket);
    free(all.rooms);
    free(all.words);
    free(all.runs);
    free(all.row);
    free(below);
close:
    close_arrays(arrays, 3);
    return result;
}
