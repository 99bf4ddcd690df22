"""Numbers that every rank computes alike: checks of what callers give, exact shares, keyed permutations, the kernels.

Pure: no file, no configuration, no rank. Above it only ``errors``.
From outside: checks, kernels, largest_remainder, permutation, weights.
"""
