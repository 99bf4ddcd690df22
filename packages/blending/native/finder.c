/* Finders: what is open of one dataset, so that its samples can be searched.

       lengths, pointers, grids, epochs --> Finder in a capsule (this file) --> search.c, ranges.c

   A finder holds the arrays open; epochs of a line and strings of left-over tokens are added when a search asks for
   them. */

#include "finder.h"
#include "permute.h"

#include <string.h>

static const char FINDER[] = "sixfold.blending.finder";

#define LONGEST_SAMPLE ((int64_t)1 << 40) /* tokens */

void let_go(Epoch *epoch) {
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
    for (int64_t at = 0; at < finder->number_of_grids; at++) close_view(&finder->grids[at].string);
    PyMem_Free(finder->epochs);
    PyMem_Free(finder->grids);
    PyMem_Free(finder);
}

Finder *finder_in(PyObject *capsule) { return PyCapsule_GetPointer(capsule, FINDER); }

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
    if (open_view(lengths, "lengths", "i4", &finder->lengths) &&
        open_view(pointers, "pointers", "i8", &finder->pointers)) {
        if (finder->lengths.items == finder->pointers.items) return capsule;
        refuse("a finder has as many lengths as pointers");
    }
    Py_DECREF(capsule);
    return NULL;
}

/* open_line(lengths, pointers, members, names, numbers, grids) -> capsule.
   members: i8 numbers of the part's sequences, empty if they are first, first + 1, ... names: u1, what every key begins
   with. numbers: i8 (item_bytes, first, sequences, tokens, block, window, chunks or -1, whole). grids: i8 (number,
   GRID_NUMBERS), ascending. */
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
    int fits = arrays[1].items == 8 && arrays[2].items >= GRID_NUMBERS && arrays[2].items % GRID_NUMBERS == 0;
    if (fits) {
        finder->item_bytes = numbers[0], finder->first = numbers[1], finder->sequences = numbers[2],
        finder->tokens = numbers[3];
        finder->block = numbers[4], finder->window = numbers[5], finder->chunks = numbers[6];
        finder->whole = numbers[7] == 1;
        fits = numbers[0] >= 1 && numbers[0] <= 8 && numbers[1] >= 0 && numbers[2] >= 1 && numbers[3] >= 1 &&
               numbers[3] <= INT64_MAX / 4 && numbers[4] >= 1 && numbers[4] <= BLOCK_AT_MOST && numbers[5] >= 1 &&
               numbers[5] <= LARGEST && numbers[6] >= -1 && (numbers[7] == 0 || (numbers[7] == 1 && numbers[2] <= LARGEST));
    }
    if (fits) /* the part's sequences are among those there are */
        fits = finder->members.items ? finder->members.items == finder->sequences
                                     : finder->first <= held && finder->sequences <= held - finder->first;
    for (int64_t at = 0; fits && at < finder->members.items; at++) {
        int64_t member = ((const any_i8 *)finder->members.data)[at];
        fits = member >= 0 && member < held;
    }
    const int64_t *grid = arrays[2].data;
    for (int64_t at = 0; fits && at < arrays[2].items; at += GRID_NUMBERS)
        fits = grid[at] >= 0 && grid[at + 1] >= 0 && grid[at + 2] >= 1 && grid[at + 2] <= LONGEST_SAMPLE &&
               grid[at + 3] >= 0 && grid[at + 4] >= 0 && grid[at + 4] <= INT64_MAX / 2 / grid[at + 2];
    if (!fits)
        refuse("open_line: numbers, members or grids do not describe a line");
    else {
        finder->blocks = (finder->sequences - 1) / finder->block + 1;
        finder->names = key_start(arrays[0].data, (size_t)arrays[0].items);
        finder->known[0] = -1;
        int64_t grids = arrays[2].items / GRID_NUMBERS;
        finder->grids = PyMem_Calloc((size_t)grids, sizeof *finder->grids);
        if (finder->grids == NULL)
            PyErr_NoMemory(), fits = 0;
        else
            finder->number_of_grids = grids;
        for (int64_t at = 0; fits && at < grids; at++, grid += GRID_NUMBERS)
            finder->grids[at] = (Grid){grid[0], grid[1], grid[2], grid[3], grid[4], .string = {.data = NULL}};
    }
    close_arrays(arrays, 3);
    if (!fits) Py_CLEAR(capsule);
    return capsule;
}

/* open_index(lengths, pointers, documents, samples, shuffle, numbers) -> capsule. documents: i4, samples: i4 or i8
   (rows + 1, 2), shuffle: u4 or i8 (rows,), numbers: i8 (item_bytes, sequence_length, extra, end). */
KERNEL(open_index) {
    (void)module;
    static const Wanted wanted[] = {{"numbers", "i8", 0}};
    Finder *finder;
    Array array;
    if (!arguments_are("open_index", count, 6)) return NULL;
    PyObject *capsule = new_finder(arguments[0], arguments[1], &finder);
    if (capsule == NULL || !open_view(arguments[2], "documents", "i4", &finder->documents) ||
        !open_view(arguments[3], "samples", "i4 i8", &finder->samples) ||
        !open_view(arguments[4], "shuffle", "u4 i8", &finder->shuffle) ||
        !open_arrays(arguments + 5, wanted, &array, 1)) {
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
        finder->item_bytes = numbers[0], finder->sequence_length = numbers[1];
        finder->extra = numbers[2], finder->end = numbers[3];
    }
    close_arrays(&array, 1);
    return capsule;
}

/* add_epoch(finder, epoch, before, block, keep) -> True. before: i8 (slots + 1,), block: i4 (slots,), of the first
   slots, in place of what was known of that epoch. Of the epochs added earlier the last keep stay. */
KERNEL(add_epoch) {
    (void)module;
    int64_t number, keep;
    if (!arguments_are("add_epoch", count, 5)) return NULL;
    Finder *finder = finder_in(arguments[0]);
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
    if (!open_view(arguments[2], "before", "i8", &epoch->before) ||
        !open_view(arguments[3], "block", "i4", &epoch->block)) {
        let_go(epoch);
        return NULL;
    }
    if (epoch->before.items != epoch->block.items + 1 || epoch->block.items < 1 ||
        epoch->block.items > finder->blocks) {
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

/* add_string(finder, grid, string) -> True. string: i8 (pieces, 2), a stretch's place in the string and on the line, in
   ascending order of the first; together they are the left-over samples of that grid. */
KERNEL(add_string) {
    (void)module;
    int64_t at;
    View string;
    if (!arguments_are("add_string", count, 3)) return NULL;
    Finder *finder = finder_in(arguments[0]);
    if (finder == NULL || !integer_of(arguments[1], "grid", 0, finder->number_of_grids - 1, &at) ||
        !open_view(arguments[2], "string", "i8", &string))
        return NULL;
    Grid *grid = &finder->grids[at];
    const any_i8 *rows = string.data;
    int fits = string.items >= 2 && string.items % 2 == 0 && rows[0] == 0;
    int64_t end = grid->left_over_samples * grid->sequence_length;
    for (int64_t row = 0; fits && row < string.items; row += 2)
        fits = rows[row] < (row + 2 < string.items ? rows[row + 2] : end) && rows[row + 1] >= 0 &&
               rows[row + 1] <= INT64_MAX / 2;
    if (!fits) {
        close_view(&string);
        return refuse(
            "add_string: string has a row for each stretch, ascending from 0 to below the grid's left-over tokens");
    }
    close_view(&grid->string);
    grid->string = string;
    return PyBool_FromLong(1);
}
