"""A state dict: records, factories, leaves, and the tree that holds them. No file, no rank.

From outside: dcp_names, dtensor, factory, in_place, plain_types, records, tensor_memory, tree.
"""
