"""A piece of the model: its F, B, I, W, RECOMPUTE and STEP of one microbatch, and what it holds meanwhile.

From outside: compute, distributed_data_parallel, fully_shard, loss, output_memory, random_state, side_effects, stage,
weight_versions.
"""
