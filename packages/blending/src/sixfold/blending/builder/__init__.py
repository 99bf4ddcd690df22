"""From a config to the datasets of the three parts, on threads and on all ranks together.

From outside: builder.
"""
