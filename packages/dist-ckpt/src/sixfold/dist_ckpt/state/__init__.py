"""A state dict: records, factories, leaves, and the tree that holds them. No file, no rank.

From outside: dcp_names, dtensor, factory, in_place, module_names, per_rank, placeholders, plain_types, records,
stateful, tensor_memory, tree.
"""
