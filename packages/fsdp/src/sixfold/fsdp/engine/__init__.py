"""The events of a step: gather, compute, reduce, free.

From outside: backward, engine, gather, grouped_gather, interruptions, rank_agreement, reduce, reduction_paths,
transforms.
"""
