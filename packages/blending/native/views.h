/* Memory that stays open between calls: the maps and indices of a dataset, held by a capsule while it lives.

       Python's arrays --> View in a capsule (this file, views.c) --> finder.c, gather.c

   The arrays of an .idx begin at byte 34, so items lie at any address: they are read through the types below. */

#ifndef SIXFOLD_BLENDING_VIEWS_H
#define SIXFOLD_BLENDING_VIEWS_H

#include "kernels.h"

#define ANYWHERE __attribute__((aligned(1), may_alias))
typedef int8_t ANYWHERE any_i1;
typedef uint8_t ANYWHERE any_u1;
typedef int16_t ANYWHERE any_i2;
typedef uint16_t ANYWHERE any_u2;
typedef int32_t ANYWHERE any_i4;
typedef uint32_t ANYWHERE any_u4;
typedef int64_t ANYWHERE any_i8;

/* An open array; data is NULL before. Types are those of Wanted ("i4 i8"); the address is any. */
typedef struct {
    Py_buffer buffer;
    const void *data;
    int64_t items;
    int bytes; /* of an item */
    char kind; /* i or u */
} View;

/* False and an exception that names the array. */
int open_view(PyObject *object, const char *name, const char *types, View *view);
void close_view(View *view); /* also one that is not open */

/* Ranges of documents as ranges.c finds and gather.c reads them: rows of int64. gather.py says what each is. */
typedef struct {
    int64_t source, sequence, offset, begin, length, shown, row, column, labels;
} Range;

#define RANGE_FIELDS ((int64_t)(sizeof(Range) / sizeof(int64_t)))

#endif
