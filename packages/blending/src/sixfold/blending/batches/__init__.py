"""From the numbers of samples to the arrays of a batch: find the ranges of tokens, copy them, make masks; read ahead.

From outside: gpt_arrays, prefetch, reader.
"""
