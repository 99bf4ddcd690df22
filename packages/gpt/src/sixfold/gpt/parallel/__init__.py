"""The axes of a layout: which rank stands where, which part it holds, what tp, cp, ep and sp send, and lost ranks.

From outside: agreement, axes, context_parallel, expert_dispatch, head_groups, lost_ranks, mesh,
partial_attention, sequence_parts, stages, tensor_parallel, weight_sharding.
"""
