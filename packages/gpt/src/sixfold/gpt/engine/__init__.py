"""What one rank trains: its stages under fsdp, its optimizer and its program; and one update of them.

From outside: activation_offload, nonfinite, rank_model, replica_digests, searched_schedule, step, weight_average,
weight_digests, weight_versions.
"""
