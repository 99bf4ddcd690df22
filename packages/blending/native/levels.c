/* Which instructions this processor has, asked once.

       processor --> current_level (this file) --> kernels

   A test asks for a lower level through use_level, so that every variant is compared with its oracle on one machine. */

#include "kernels.h"

static int best(void) {
#if HAS_AVX
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("bmi") || !__builtin_cpu_supports("bmi2"))
        return LEVEL_PLAIN;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl"))
        return LEVEL_AVX512;
    return LEVEL_AVX2;
#else
    return LEVEL_PLAIN;
#endif
}

static int in_use = -1; /* not asked yet */

int current_level(void) {
    if (in_use < 0) in_use = best();
    return in_use;
}

/* level() -> the best level of this processor. */
KERNEL(level) {
    (void)module, (void)arguments;
    return arguments_are("level", count, 0) ? PyLong_FromLong(best()) : NULL;
}

/* use_level(level) -> True: from now on; never above what the processor has. */
KERNEL(use_level) {
    (void)module;
    int64_t asked;
    if (!arguments_are("use_level", count, 1) || !integer_of(arguments[0], "level", LEVEL_PLAIN, best(), &asked))
        return NULL;
    in_use = (int)asked;
    return PyBool_FromLong(1);
}
