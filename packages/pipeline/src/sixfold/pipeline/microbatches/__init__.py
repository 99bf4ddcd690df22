"""From a batch to microbatches and back.

From outside: cut_batch, outer_graph.
"""
