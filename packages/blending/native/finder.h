/* What is open of one dataset, and what is searched in it.

       finder.c: arrays --> Finder; search.c: samples --> Piece; ranges.c: Piece --> Range (this file) --> gather.c */

#ifndef SIXFOLD_BLENDING_FINDER_H
#define SIXFOLD_BLENDING_FINDER_H

#include "order_key.h"
#include "views.h"

#define BLOCK_AT_MOST 256

/* What find_samples returns besides the number of ranges found: negative numbers. */
enum { TOO_LITTLE_ROOM = -1, LEFT_TO_NUMPY = -2, MISSING = -3 };

/* The first slots of an epoch of a line, those that are known: tokens before each and behind the last (slots + 1),
   block in each (slots). */
typedef struct {
    int64_t number;
    int users; /* the finder and the calls that read it; counted with the GIL held */
    View before, block;
} Epoch;

/* A sequence length from one of the dataset's samples on (chunk_grid.py). It reads the string first: what the grid
   before left over. For each stretch it has its tokens' place in the string, and where they begin on the line. */
typedef struct {
    int64_t first_sample, number, sequence_length, origin, left_over_samples;
    View string;
} Grid;

#define GRID_NUMBERS 5 /* of a grid, that Python gives */

/* All of one dataset. It changes with the GIL held alone, and its epochs and strings are not read without it but for
   the epochs that a call holds. */
typedef struct {
    int indexed; /* megatron's three indices, or a line */
    View lengths, pointers, members;
    int64_t item_bytes;
    /* a line */
    KeyStart names;
    int64_t first, sequences, tokens, block, blocks, window, chunks;
    int whole; /* documents are permuted as a whole (document_shuffle.py), and a block is a group of places */
    Grid *grids;
    int64_t number_of_grids;
    Epoch **epochs; /* the oldest first */
    int64_t number_of_epochs;
    int64_t known[3], known_key; /* grid, epoch, window of the key that was made last */
    /* indices */
    View documents, samples, shuffle;
    int64_t sequence_length, extra, end;
} Finder;

/* The finder of a capsule; NULL and an exception if it is something else. */
Finder *finder_in(PyObject *capsule);
void let_go(Epoch *epoch); /* one user less */

/* A stretch of a line, or a sample of indices (then begin is the row of the sample index). */
typedef struct {
    Finder *finder;
    int64_t epoch;        /* the first that it touches */
    int64_t held, epochs; /* where they are held, and how many */
    int64_t slot;         /* of that epoch, its first; ranges.c searches it */
    Range range;          /* source, begin on the line, length, shown, row, column */
} Piece;

typedef struct {
    Range *ranges;
    int64_t room, found;
} Found;

/* The ranges of pieces, in their order; `epochs` are all that they hold. How many are found, or a negative number.
   Without the GIL. */
int64_t find_ranges(int level, Piece *pieces, int64_t number, Epoch *const *epochs, Found *found);

#endif
