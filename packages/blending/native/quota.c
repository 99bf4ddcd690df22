/* Which dataset gives which position: walks from the root of a quota tree to its leaves.

       quotas --> tree --> tree_locate (this file) --> blend/quota_tree.py, which states the order in Python

   At a node of n items per period of which l go left, L(m) = floor((2*m*l + n) / (2*n)) of its first m items do.

   [Note: share] With s = ceil(l * 2^64 / n), L(m) is the whole part of m * s / 2^64 + 1/2: s is too large by less than
   1, so the sum by less than m / 2^64 <= n / 2^64; the exact value is a multiple of 1 / (2n), so the next whole number
   is at least 1 / (2n) away, and n / 2^64 < 1 / (2n) for n <= 2^31. Item m goes left iff the next item's sum passes a
   whole number, that is, iff adding s to the fraction overflows. No division is left. Larger trees are walked with
   divisions of 128 bits. */

#include "kernels.h"

#include <stdlib.h>
#include <string.h>

#define NARROW ((int64_t)1 << 31) /* period up to which shares are exact */
#define MOST ((int64_t)1 << 62)   /* period at all */
#define BLOCK 64                  /* positions that walk together */
#define RANGE_BLOCK 32768         /* positions of a range that are parted together; fits 16 bits */
#define DEEPEST 64 /* a Huffman tree of a period up to 2^31 has fewer than 48 levels, one more segment each */

typedef unsigned __int128 Wide;

/* An inner node. A child is another node's number, or ~d for dataset d. */
typedef struct {
    uint64_t share;
    int32_t child[2]; /* left, right */
} Node;

typedef struct {
    int64_t period, datasets;
    int32_t root;
    int64_t *quota; /* (datasets,) */
    int64_t *total; /* of each node, or NULL if shares are exact */
    Node *node;
} Tree;

/* ---- planting */

typedef struct {
    int64_t total;
    int32_t child; /* as in Node */
} Item;

static int by_total_then_number(const void *a, const void *b) {
    const Item *one = a, *other = b;
    if (one->total != other->total) return one->total < other->total ? -1 : 1;
    return one->child > other->child ? -1 : 1; /* ~d falls as d grows */
}

static int64_t total_of(const Tree *tree, int32_t child) {
    return child < 0 ? tree->quota[~child] : tree->total[child];
}

/* Huffman's tree. Leaves wait in order, and nodes come into being in order: the smaller of two heads is the next. */
static void plant(Tree *tree, Item *leaf, int64_t leaves) {
    qsort(leaf, (size_t)leaves, sizeof *leaf, by_total_then_number);
    int64_t next_leaf = 0, next_node = 0;
    for (int32_t made = 0; made < leaves - 1; made++) {
        Node *node = &tree->node[made];
        for (int side = 1; side >= 0; side--) { /* the larger of the two goes left */
            int takes_leaf =
                next_node == made || (next_leaf < leaves && leaf[next_leaf].total <= tree->total[next_node]);
            node->child[side] = takes_leaf ? leaf[next_leaf++].child : (int32_t)next_node++;
        }
        int64_t left = total_of(tree, node->child[0]), n = left + total_of(tree, node->child[1]);
        tree->total[made] = n;
        node->share = (uint64_t)((((Wide)left << 64) + (Wide)n - 1) / (Wide)n);
    }
    tree->root = leaves > 1 ? (int32_t)(leaves - 2) : leaf[0].child;
    if (tree->period <= NARROW) {
        free(tree->total);
        tree->total = NULL;
    }
}

static void fell(Tree *tree) {
    if (!tree) return;
    free(tree->quota);
    free(tree->total);
    free(tree->node);
    free(tree);
}

static Tree *tree_of(const int64_t *quota, int64_t datasets, int64_t leaves, int64_t period) {
    Tree *tree = calloc(1, sizeof *tree);
    Item *leaf = malloc((size_t)leaves * sizeof *leaf);
    if (tree) {
        tree->period = period;
        tree->datasets = datasets;
        tree->quota = malloc((size_t)datasets * sizeof *tree->quota);
        tree->total = malloc((size_t)leaves * sizeof *tree->total);
        tree->node = malloc((size_t)leaves * sizeof *tree->node);
    }
    if (!tree || !leaf || !tree->quota || !tree->total || !tree->node) {
        free(leaf);
        fell(tree);
        return NULL;
    }
    memcpy(tree->quota, quota, (size_t)datasets * sizeof *quota);
    int64_t found = 0;
    for (int64_t at = 0; at < datasets; at++)
        if (quota[at]) leaf[found++] = (Item){quota[at], ~(int32_t)at};
    plant(tree, leaf, leaves);
    free(leaf);
    return tree;
}

/* ---- walking */

/* One step down from a node: the item's number in the child. */
INLINE uint64_t step(const Node *node, uint64_t m, int *goes_right) {
    Wide product = (Wide)m * node->share;
    uint64_t fraction = (uint64_t)product ^ (uint64_t)1 << 63; /* half of 2^64 added */
    uint64_t left = (uint64_t)(product >> 64) + ((uint64_t)product >> 63);
    *goes_right = fraction <= ~node->share;
    /* No branch: half of the guesses would be wrong. */
    uint64_t right = m - left, which = (uint64_t)0 - (uint64_t)*goes_right;
    return left ^ ((left ^ right) & which);
}

/* The same for any total, by division. */
static uint64_t step_wide(const Tree *tree, int32_t at, uint64_t m, int *goes_right) {
    Wide n = (Wide)tree->total[at], l = (Wide)total_of(tree, tree->node[at].child[0]);
    uint64_t left = (uint64_t)((2 * m * l + n) / (2 * n)), next = (uint64_t)((2 * (m + 1) * l + n) / (2 * n));
    *goes_right = next == left;
    return *goes_right ? m - left : left;
}

static void finish(const Tree *tree, int32_t leaf, uint64_t m, int64_t turns, int64_t *dataset, int64_t *sample) {
    *dataset = ~leaf;
    *sample = (int64_t)(m + (uint64_t)turns * (uint64_t)tree->quota[~leaf]);
}

static void locate_wide(const Tree *tree, int64_t position, int64_t *dataset, int64_t *sample) {
    int32_t at = tree->root;
    uint64_t m = (uint64_t)(position % tree->period);
    for (int right; at >= 0; at = tree->node[at].child[right]) m = step_wide(tree, at, m, &right);
    finish(tree, at, m, position / tree->period, dataset, sample);
}

/* Up to BLOCK positions, all a level deeper in each round: independent walks, which the processor overlaps. */
static void locate_block(const Tree *tree, const int64_t *position, int number, int64_t *dataset, int64_t *sample) {
    uint64_t m[BLOCK], walking[BLOCK];
    int64_t turns[BLOCK];
    int32_t at[BLOCK], node[BLOCK];
    uint8_t slot[BLOCK];
    int left = tree->root >= 0 ? number : 0;
    for (int i = 0; i < number; i++) {
        turns[i] = position[i] < tree->period ? 0 : position[i] / tree->period;
        walking[i] = m[i] = (uint64_t)(position[i] - turns[i] * tree->period);
        node[i] = at[i] = tree->root;
        slot[i] = (uint8_t)i;
    }
    while (left) {
        int kept = 0;
        for (int i = 0; i < left; i++) {
            const Node *here = &tree->node[node[i]];
            int right, to = slot[i];
            uint64_t number_below = step(here, walking[i], &right);
            int32_t below = here->child[right];
            m[to] = walking[kept] = number_below;
            at[to] = node[kept] = below;
            slot[kept] = (uint8_t)to;
            kept += below >= 0;
        }
        left = kept;
    }
    for (int i = 0; i < number; i++) finish(tree, at[i], m[i], turns[i], &dataset[i], &sample[i]);
}

static void locate_all(const Tree *tree, const int64_t *position, int64_t number, int64_t *dataset, int64_t *sample) {
    for (int64_t at = 0; at < number; at += tree->total ? 1 : BLOCK)
        if (tree->total)
            locate_wide(tree, position[at], &dataset[at], &sample[at]);
        else
            locate_block(tree, position + at, (int)(number - at < BLOCK ? number - at : BLOCK), &dataset[at],
                         &sample[at]);
}

/* ---- ranges */

/* Items m, m + 1, ... of a node, whose places in the block are slot[begin..end). */
typedef struct {
    int32_t node;
    int begin, end;
    uint64_t m;
} Segment;

/* Part a segment's slots, in order: those that go left to the front. How many they are. */
INLINE int part(uint64_t share, uint64_t fraction, uint16_t *slot, int number, uint16_t *aside) {
    int left = 0, right = 0;
    for (int at = 0; at < number; at++) {
        uint16_t one = slot[at];
        int goes_left = __builtin_add_overflow(fraction, share, &fraction);
        slot[left] = one;
        aside[right] = one;
        left += goes_left;
        right += !goes_left;
    }
    memcpy(slot + left, aside, (size_t)right * sizeof *slot);
    return left;
}

/* Positions of one turn from the root's item m on; slot has room for twice their number, at most RANGE_BLOCK. */
static void range_block(const Tree *tree, uint64_t m, int64_t turns, int number, uint16_t *slot, int64_t *dataset,
                        int64_t *sample) {
    uint16_t *aside = slot + number;
    Segment stack[DEEPEST] = {{tree->root, 0, number, m}};
    for (int at = 0; at < number; at++) slot[at] = (uint16_t)at;
    for (int depth = 1; depth;) {
        Segment segment = stack[--depth];
        uint16_t *mine = slot + segment.begin;
        int items = segment.end - segment.begin;
        if (segment.node < 0) {
            int64_t first = (int64_t)(segment.m + (uint64_t)turns * (uint64_t)tree->quota[~segment.node]);
            for (int at = 0; at < items; at++) dataset[mine[at]] = ~segment.node, sample[mine[at]] = first + at;
            continue;
        }
        const Node *node = &tree->node[segment.node];
        Wide product = (Wide)segment.m * node->share + ((Wide)1 << 63);
        uint64_t before = (uint64_t)(product >> 64);
        int middle = segment.begin + part(node->share, (uint64_t)product, mine, items, aside);
        if (middle > segment.begin) stack[depth++] = (Segment){node->child[0], segment.begin, middle, before};
        if (middle < segment.end) stack[depth++] = (Segment){node->child[1], middle, segment.end, segment.m - before};
    }
}

/* Consecutive positions: parted in blocks, if these are large beside the tree. */
static void locate_consecutive(const Tree *tree, const int64_t *position, int64_t number, int64_t *dataset,
                               int64_t *sample) {
    uint16_t *slot = malloc(2 * sizeof *slot * (size_t)(number < RANGE_BLOCK ? number : RANGE_BLOCK));
    for (int64_t at = 0, some; at < number; at += some) {
        int64_t turns = position[at] / tree->period, m = position[at] - turns * tree->period;
        some = number - at < RANGE_BLOCK ? number - at : RANGE_BLOCK;
        some = tree->period - m < some ? tree->period - m : some;
        if (slot && !tree->total && some >= tree->datasets)
            range_block(tree, (uint64_t)m, turns, (int)some, slot, dataset + at, sample + at);
        else
            locate_all(tree, position + at, some, dataset + at, sample + at);
    }
    free(slot);
}

/* ---- kernels */

#define HANDLE "sixfold.blending.tree"

static void fell_capsule(PyObject *capsule) { fell(PyCapsule_GetPointer(capsule, HANDLE)); }

/* tree(quota) -> a handle. quota: i8 (D,), D < 2^31, >= 0, with a sum of 1..2^62. */
KERNEL(tree) {
    (void)module;
    static const Wanted wanted[] = {{"quota", "i8", 0}};
    Array quotas;
    if (!arguments_are("tree", count, 1) || !open_arrays(arguments, wanted, &quotas, 1)) return NULL;
    const int64_t *quota = quotas.data;
    int64_t period = 0, leaves = 0;
    int fits = quotas.items < NARROW;
    for (int64_t at = 0; fits && at < quotas.items; at++) {
        fits = quota[at] >= 0 && quota[at] <= MOST - period;
        if (fits) period += quota[at], leaves += quota[at] > 0;
    }
    Tree *made = fits && period ? tree_of(quota, quotas.items, leaves, period) : NULL;
    close_arrays(&quotas, 1);
    if (!fits || !period) return refuse("tree: fewer than 2^31 quotas, all >= 0, with a sum of 1 to 2^62");
    if (!made) return PyErr_NoMemory();
    PyObject *capsule = PyCapsule_New(made, HANDLE, fell_capsule);
    if (!capsule) fell(made);
    return capsule;
}

/* tree_locate(tree, position, dataset, sample) -> place of the first negative position (then nothing is written), or
   their number. All i8 of one length; consecutive positions take the way of ranges. */
KERNEL(tree_locate) {
    (void)module;
    static const Wanted wanted[] = {{"position", "i8", 0}, {"dataset", "i8", 1}, {"sample", "i8", 1}};
    Array arrays[3];
    Tree *tree;
    if (!arguments_are("tree_locate", count, 4) || !(tree = PyCapsule_GetPointer(arguments[0], HANDLE)) ||
        !open_arrays(arguments + 1, wanted, arrays, 3))
        return NULL;
    int64_t number = arrays[0].items, wrong = 0;
    const int64_t *position = arrays[0].data;
    PyObject *result = NULL;
    if (arrays[1].items != number || arrays[2].items != number)
        refuse("tree_locate: dataset and sample have as many items as position");
    else {
        Py_BEGIN_ALLOW_THREADS
        int jumps = 0;
        while (wrong < number && position[wrong] >= 0) jumps |= position[wrong] - position[0] != wrong, wrong++;
        if (wrong == number)
            (jumps ? locate_all : locate_consecutive)(tree, position, number, arrays[1].data, arrays[2].data);
        Py_END_ALLOW_THREADS
        result = PyLong_FromLongLong(wrong);
    }
    close_arrays(arrays, 3);
    return result;
}
