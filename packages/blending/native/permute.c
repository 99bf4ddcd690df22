/* Keyed permutations of many numbers, and of ranges.

       keys, sizes, numbers --> permute, permute_range (this file) --> permutation.py, position_shuffle.py

   Oracle: the numpy statement in numbers/permutation.py. */

#include "permute.h"

#define FEW 4 /* numbers from which a pass over many is faster than one by one */

/* All numbers make one pass together, in vector instructions; those that are still outside of the permutation are moved
   to the front and make another. */
INLINE void permute_block(const Permutation *by, uint64_t *x, int number, int back) {
    uint64_t walking[PERMUTED_AT_ONCE];
    int16_t slot[PERMUTED_AT_ONCE];
    int left = number;
    for (int at = 0; at < number; at++) walking[at] = x[at], slot[at] = (int16_t)at;
    while (left > FEW) {
        for (int at = 0; at < left; at++)
            walking[at] = back ? feistel_back(by, walking[at]) : feistel(by, walking[at]);
        int kept = 0;
        for (int at = 0; at < left; at++) {
            uint64_t moved = walking[at];
            int16_t to = slot[at];
            x[to] = moved;
            walking[kept] = moved;
            slot[kept] = to;
            kept += moved >= by->size;
        }
        left = kept;
    }
    for (int at = 0; at < left; at++) {
        uint64_t moved = walking[at];
        do moved = back ? feistel_back(by, moved) : feistel(by, moved);
        while (moved >= by->size);
        x[slot[at]] = moved;
    }
}

void block_plain(const Permutation *by, uint64_t *x, int number) { permute_block(by, x, number, 0); }
AVX2 void block_avx2(const Permutation *by, uint64_t *x, int number) { permute_block(by, x, number, 0); }
AVX512 void block_avx512(const Permutation *by, uint64_t *x, int number) { permute_block(by, x, number, 0); }
void back_plain(const Permutation *by, uint64_t *x, int number) { permute_block(by, x, number, 1); }
AVX2 void back_avx2(const Permutation *by, uint64_t *x, int number) { permute_block(by, x, number, 1); }
AVX512 void back_avx512(const Permutation *by, uint64_t *x, int number) { permute_block(by, x, number, 1); }

/* Numbers that share one key and size. */
static void permute_run(Block block, const Permutation *by, const int64_t *index, int64_t *out, int64_t number) {
    uint64_t x[PERMUTED_AT_ONCE];
    for (int64_t begin = 0; begin < number; begin += PERMUTED_AT_ONCE) {
        int some = (int)(number - begin < PERMUTED_AT_ONCE ? number - begin : PERMUTED_AT_ONCE);
        for (int at = 0; at < some; at++) x[at] = (uint64_t)index[begin + at];
        block(by, x, some);
        for (int at = 0; at < some; at++) out[begin + at] = (int64_t)x[at];
    }
}

/* The first number outside of its permutation, or number. */
static int64_t first_outside(const int64_t *size, int64_t size_step, const int64_t *index, int64_t number) {
    for (int64_t at = 0; at < number; at++)
        if (size[at * size_step] > LARGEST || index[at] < 0 || index[at] >= size[at * size_step]) return at;
    return number;
}

/* permute(key, size, index, out) -> place of the first index outside of 0..size-1 or size above 2^53 (then out is as it
   was), or their number. key: u8, size: i8, of one item or as many as index has; index, out: i8, equally many. */
KERNEL(permute) {
    (void)module;
    static const Wanted wanted[] = {{"key", "u8", 0}, {"size", "i8", 0}, {"index", "i8", 0}, {"out", "i8", 1}};
    Array arrays[4];
    if (!arguments_are("permute", count, 4) || !open_arrays(arguments, wanted, arrays, 4)) return NULL;
    const uint64_t *key = arrays[0].data;
    const int64_t *size = arrays[1].data, *index = arrays[2].data, number = arrays[2].items;
    int64_t *out = arrays[3].data, key_step = arrays[0].items != 1, size_step = arrays[1].items != 1, wrong = 0;
    PyObject *result = NULL;
    if ((key_step && arrays[0].items != number) || (size_step && arrays[1].items != number) ||
        arrays[3].items != number)
        refuse("permute: key and size have one item or as many as index, out has as many");
    else {
        int level = current_level();
        Block block = AT_LEVEL(level, block);
        Py_BEGIN_ALLOW_THREADS
        wrong = first_outside(size, size_step, index, number);
        for (int64_t begin = 0, end; wrong == number && begin < number; begin = end) {
            end = key_step || size_step ? begin + 1 : number;
            while (end < number && key[end * key_step] == key[begin * key_step] &&
                   size[end * size_step] == size[begin * size_step])
                end++;
            Permutation by = permutation_of(key[begin * key_step], (uint64_t)size[begin * size_step]);
            permute_run(block, &by, index + begin, out + begin, end - begin);
        }
        Py_END_ALLOW_THREADS
        result = PyLong_FromLongLong(wrong);
    }
    close_arrays(arrays, 4);
    return result;
}

/* permute_range(key, size, begin, out) -> True: out[i] is where begin + i goes. out: u4 or i8. */
KERNEL(permute_range) {
    (void)module;
    static const Wanted wanted[] = {{"out", "u4 i8", 1}};
    Array out;
    uint64_t key;
    int64_t size, first;
    if (!arguments_are("permute_range", count, 4) || !word_of(arguments[0], "key", &key) ||
        !integer_of(arguments[1], "size", 0, LARGEST, &size) || !integer_of(arguments[2], "begin", 0, size, &first) ||
        !open_arrays(arguments + 3, wanted, &out, 1))
        return NULL;
    PyObject *result = NULL;
    if (out.items > size - first)
        refuse("permute_range: begin and the items of out are together at most size");
    else if (out.item_bytes == 4 && size > (int64_t)1 << 32)
        refuse("permute_range: out has 4 bytes, and size is above 2^32");
    else {
        int level = current_level();
        Block block = AT_LEVEL(level, block);
        Py_BEGIN_ALLOW_THREADS
        Permutation by = permutation_of(key, (uint64_t)(size ? size : 1));
        uint64_t x[PERMUTED_AT_ONCE];
        for (int64_t begin = 0; begin < out.items; begin += PERMUTED_AT_ONCE) {
            int some = (int)(out.items - begin < PERMUTED_AT_ONCE ? out.items - begin : PERMUTED_AT_ONCE);
            for (int at = 0; at < some; at++) x[at] = (uint64_t)(first + begin + at);
            block(&by, x, some);
            if (out.item_bytes == 4)
                for (int at = 0; at < some; at++) ((uint32_t *)out.data)[begin + at] = (uint32_t)x[at];
            else
                for (int at = 0; at < some; at++) ((int64_t *)out.data)[begin + at] = (int64_t)x[at];
        }
        Py_END_ALLOW_THREADS
        result = PyBool_FromLong(1);
    }
    close_arrays(&out, 1);
    return result;
}
