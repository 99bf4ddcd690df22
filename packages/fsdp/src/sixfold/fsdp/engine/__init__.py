"""The events of a step: gather, compute, reduce, free.

From outside: call_state, engine, gather, grouped_gather, order_check, reduce, reduction_paths, used_parameters.
"""
