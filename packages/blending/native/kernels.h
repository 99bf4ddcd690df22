/* What every kernel is made of: arguments checked before use, and three levels of instructions.

       Python's objects --> open_arrays, integer_of (this file, arguments.c) --> a kernel (one file each) --> module.c

   Rules for a kernel: every buffer is opened through open_arrays (a wrong one raises, nothing crashes), lengths
   are compared before the first access, numbers that index are bounded, the GIL is released around the loop,
   no thread is started, nothing is kept between two calls but what a capsule holds. No product is fused with a sum
   (-ffp-contract=off). */

#ifndef SIXFOLD_BLENDING_KERNELS_H
#define SIXFOLD_BLENDING_KERNELS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

/* ---- kernels, one line each here and in the table of module.c */

#define KERNEL(name) PyObject *name(PyObject *module, PyObject *const *arguments, Py_ssize_t count)

KERNEL(permute);
KERNEL(permute_range);
KERNEL(greedy);
KERNEL(tree);
KERNEL(tree_locate);
KERNEL(shuffle);
KERNEL(sample_rows);
KERNEL(open_map);
KERNEL(gather);
KERNEL(arrays_of_rows);
KERNEL(boundaries);
KERNEL(open_line);
KERNEL(open_index);
KERNEL(group_sums);
KERNEL(best_fit);
KERNEL(add_epoch);
KERNEL(add_string);
KERNEL(find_samples);
KERNEL(level);
KERNEL(use_level);

/* ---- arguments (arguments.c) */

/* An array that a kernel asks for. A type is a kind (i, u, f) and a number of bytes; blanks between them: "i4 i8". */
typedef struct {
    const char *name;
    const char *types;
    int writable;
} Wanted;

/* An open one: C-contiguous, aligned, in this machine's byte order; items counts all of its dimensions together. */
typedef struct {
    Py_buffer view;
    void *data;
    int64_t items;
    int item_bytes;
} Array;

/* False and a TypeError if a kernel got another number of arguments. */
int arguments_are(const char *kernel, Py_ssize_t count, Py_ssize_t expected);

/* Open all, or none: false and a TypeError, ValueError or BufferError that names the array. */
int open_arrays(PyObject *const *objects, const Wanted *wanted, Array *arrays, int number);
void close_arrays(Array *arrays, int number);

/* False and an exception if it is no whole number in least..most. */
int integer_of(PyObject *object, const char *name, int64_t least, int64_t most, int64_t *value);
int word_of(PyObject *object, const char *name, uint64_t *value); /* 0..2^64-1 */

/* Raise ValueError and return NULL. */
PyObject *refuse(const char *message);

/* ---- levels of instructions (levels.c)

   A loop is written once, as an INLINE function of plain C; PLAIN, AVX2 and AVX512 functions call it, and the compiler
   makes each with its own instructions. Elsewhere than on x86-64 all three are plain. */

#define INLINE static inline __attribute__((always_inline))

#if defined(__x86_64__) && defined(__GNUC__)
#define HAS_AVX 1
#define AVX2 __attribute__((target("avx2,bmi,bmi2")))
#define AVX512 __attribute__((target("avx2,bmi,bmi2,avx512f,avx512dq,avx512bw,avx512vl,prefer-vector-width=512")))
#else
#define HAS_AVX 0
#define AVX2
#define AVX512
#endif

enum { LEVEL_PLAIN = 0, LEVEL_AVX2 = 1, LEVEL_AVX512 = 2 };

/* The level in use: the best of this processor, or a lower one that a test has asked for. Read it with the GIL held. */
int current_level(void);

/* Call the variant of the current level. */
#define AT_LEVEL(level, name) \
    ((level) == LEVEL_AVX512 ? name##_avx512 : (level) == LEVEL_AVX2 ? name##_avx2 : name##_plain)

#endif
