"""One save and one load, from a state dict to bytes and back: say what is wanted, agree, move bytes, commit.

From outside: host_view, loading, reader, replicated_tensors, requested_keys, saving, user_strategies, writer.
"""
