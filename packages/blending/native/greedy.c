/* Which dataset gives which position of a blend: always the one that lags most, in megatron-core's order.

       weights, sizes --> greedy (this file) --> megatron/greedy.py

   The lag of dataset i at position n is w_i * max(n, 1) - c_i, rounded after the product and after the difference; the
   lowest number wins among equals. To look at all D lags for each position is what the peer does.

   [Note: window] In the next few positions only those datasets can win whose lag at the window's end, were none of them
   taken, reaches a threshold a little below the largest lag of now. They are copied to a short list, in the order of
   their numbers, and only the list is looked at while its largest lag stays above the threshold. Below it, or at the
   window's end, a new list is made. Nothing else can win: the bound has a slack above the sum of all roundings. Of
   equal datasets no more are listed than the window has positions. There are two windows, a near one inside of a far
   one. */

#include "kernels.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define MOST_DATASETS 32767
#define NEAR_WINDOW 16    /* positions; this and the next three are measured */
#define FAR_FACTOR 4      /* of the root of D */
#define FEW_DATASETS 40   /* one list for all positions, in registers as far as they reach */
#define SOME_DATASETS 200 /* one window instead of two */
#define PADDING 8         /* lists are padded to a multiple of it: whole vectors at every level */

/* Some of the datasets, in the order of their numbers, padded by such as are never taken. */
typedef struct {
    int64_t items;
    double *weight;
    double *given;  /* samples given so far; infinite once a dataset is used up */
    int16_t *above; /* its place in the list that this one was made of */
} List;

typedef struct {
    List all, far, near;
    int64_t far_window, near_window; /* positions */
    double far_margin, near_margin;  /* between a window's threshold and the largest lag at its begin */
    double largest;                  /* weight */
    uint8_t *flags;                  /* one for each of all */
    double *lag;                     /* one for each of near */
    int64_t *left;                   /* (D,) samples that each dataset has yet; NULL: as many as are asked */
    int16_t *dataset;                /* (size,) */
    int64_t *sample;                 /* (size,) */
} Blend;

/* The factor of the weights at a position. */
INLINE double factor(int64_t position) { return position ? (double)position : 1.0; }

/* The loop, once per level: what differs is how many lags a vector holds and how two vectors are compared. */

#define LEVEL(name) name##_plain
#define TARGET
#define LANES 2
typedef double Two __attribute__((vector_size(16)));
typedef int64_t TwoBits __attribute__((vector_size(16)));
#define VECTOR Two
#define MASK TwoBits
INLINE Two larger_plain(Two a, Two b) {
    TwoBits which = a > b;
    return (Two)(((TwoBits)a & which) | ((TwoBits)b & ~which));
}
INLINE double largest_plain(Two a) { return a[0] > a[1] ? a[0] : a[1]; }
INLINE TwoBits equal_plain(Two a, double b) { return a == b; }
INLINE TwoBits reaches_plain(Two a, double b) { return a >= b; }
INLINE uint64_t bits_plain(TwoBits mask) { return (uint64_t)(mask[0] & 1) | (uint64_t)(mask[1] & 2); }
INLINE TwoBits mask_plain(uint64_t bits) { return -(TwoBits){(int64_t)(bits & 1), (int64_t)(bits >> 1 & 1)}; }
INLINE Two count_plain(Two a, TwoBits mask) { return a + (Two)((TwoBits)(Two){1, 1} & mask); }
#include "greedy_level.h"

#if HAS_AVX
#include <immintrin.h>

#define LEVEL(name) name##_avx2
#define TARGET AVX2
#define LANES 4
#define VECTOR __m256d
#define MASK __m256d
AVX2 INLINE __m256d larger_avx2(__m256d a, __m256d b) { return _mm256_max_pd(a, b); }
AVX2 INLINE double largest_avx2(__m256d a) {
    __m128d two = _mm_max_pd(_mm256_castpd256_pd128(a), _mm256_extractf128_pd(a, 1));
    return _mm_cvtsd_f64(_mm_max_sd(two, _mm_unpackhi_pd(two, two)));
}
AVX2 INLINE __m256d equal_avx2(__m256d a, double b) { return _mm256_cmp_pd(a, _mm256_set1_pd(b), _CMP_EQ_OQ); }
AVX2 INLINE __m256d reaches_avx2(__m256d a, double b) { return _mm256_cmp_pd(a, _mm256_set1_pd(b), _CMP_GE_OQ); }
AVX2 INLINE uint64_t bits_avx2(__m256d mask) { return (uint64_t)_mm256_movemask_pd(mask); }
AVX2 INLINE __m256d mask_avx2(uint64_t bits) {
    __m256i lane = _mm256_set_epi64x(8, 4, 2, 1);
    return _mm256_castsi256_pd(_mm256_cmpeq_epi64(_mm256_and_si256(_mm256_set1_epi64x((int64_t)bits), lane), lane));
}
AVX2 INLINE __m256d count_avx2(__m256d a, __m256d mask) { return a + _mm256_and_pd(mask, _mm256_set1_pd(1)); }
#include "greedy_level.h"
#else
#define fill_avx2 fill_plain
#endif
#define fill_avx512 fill_avx2 /* the lists are so short that wider vectors do not pay (measured) */

typedef void (*Fill)(Blend *, int64_t);

/* Room for three lists of D datasets in one piece that starts at a vector, or NULL. */
static void *room_for(Blend *blend, int64_t datasets, const double *weight) {
    size_t padded = ((size_t)datasets + PADDING - 1) / PADDING * PADDING, bytes = padded * (7 * 8 + 3 * 2 + 2);
    double *room = aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (!room) return NULL;
    List *lists[] = {&blend->all, &blend->far, &blend->near};
    int16_t *numbers = (int16_t *)(room + 7 * padded);
    for (size_t which = 0; which < 3; which++) {
        lists[which]->items = (int64_t)padded;
        lists[which]->weight = room + 2 * which * padded;
        lists[which]->given = lists[which]->weight + padded;
        lists[which]->above = numbers + which * padded;
    }
    blend->lag = room + 6 * padded;
    blend->flags = (uint8_t *)(numbers + 3 * padded);
    blend->largest = 0;
    for (int64_t at = 0; at < (int64_t)padded; at++) {
        blend->all.weight[at] = at < datasets ? weight[at] : 0;
        blend->all.given[at] = at < datasets ? 0 : INFINITY;
        if (blend->all.weight[at] > blend->largest) blend->largest = blend->all.weight[at];
    }
    return room;
}

/* Windows in which a short list pays; few datasets are one list for all positions. */
static void choose_windows(Blend *blend, int64_t datasets, int64_t size) {
    int few = datasets <= FEW_DATASETS, some = datasets <= SOME_DATASETS;
    blend->near_window = few ? size : NEAR_WINDOW;
    blend->far_window = some ? size : NEAR_WINDOW + FAR_FACTOR * (int64_t)sqrt((double)datasets);
    blend->near_margin = few ? INFINITY : 8.0 / (double)datasets;
    blend->far_margin = some ? INFINITY : 8.0 / (double)datasets;
}

/* Whether the numbers can be computed with: a NaN, say, would find no largest lag. */
static int are_fit(const double *weight, const int64_t *left, int64_t datasets, int64_t size) {
    int64_t total = 0;
    for (int64_t at = 0; at < datasets; at++) {
        if (!(weight[at] >= 0 && weight[at] < 1e290)) return 0;
        if (left && (left[at] < 1 || __builtin_add_overflow(total, left[at], &total))) return 0;
    }
    return size < (int64_t)1 << 52 && (!left || total == size);
}

/* greedy(weight, left, dataset, sample) -> True. weight: f8 (D,) >= 0; left: i8 (D,) samples of each dataset, which is
   used up to zeros, or of no item: endless; dataset: i2, sample: i8, both (size,), with left the sum of it. */
KERNEL(greedy) {
    (void)module;
    static const Wanted wanted[] = {{"weight", "f8", 0}, {"left", "i8", 1}, {"dataset", "i2", 1}, {"sample", "i8", 1}};
    Array arrays[4];
    if (!arguments_are("greedy", count, 4) || !open_arrays(arguments, wanted, arrays, 4)) return NULL;
    const double *weight = arrays[0].data;
    int64_t datasets = arrays[0].items, size = arrays[2].items;
    Blend blend = {
        .left = arrays[1].items ? arrays[1].data : NULL, .dataset = arrays[2].data, .sample = arrays[3].data};
    PyObject *result = NULL;
    void *room = NULL;
    if (datasets < 1 || datasets >= MOST_DATASETS || (blend.left && arrays[1].items != datasets) ||
        arrays[3].items != size)
        refuse("greedy: 1 to 32,766 weights, as many left or none, and dataset and sample of one length");
    else if (!are_fit(weight, blend.left, datasets, size))
        refuse("greedy: weights are >= 0 and below 1e290; left is > 0, and its sum is the length of dataset");
    else if (!(room = room_for(&blend, datasets, weight)))
        PyErr_NoMemory();
    else {
        choose_windows(&blend, datasets, size);
        int level = current_level();
        Fill fill_at_level = AT_LEVEL(level, fill);
        Py_BEGIN_ALLOW_THREADS
        fill_at_level(&blend, size);
        Py_END_ALLOW_THREADS
        free(room);
        result = PyBool_FromLong(1);
    }
    close_arrays(arrays, 4);
    return result;
}
