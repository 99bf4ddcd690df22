"""Where the bytes of weights and gradients lie: flat buffers, their layout, and the units that hold them.

From outside: column_ranges, digest, flat_buffer, flat_tensor, gradients, layout, main_gradients, microbatch_tree,
reduction_sizes, stored_bytes, temporary_memory, unit, weights.
"""
