"""One save and one load, from a state dict to bytes and back: say what is wanted, agree, move bytes, commit.

From outside: chunk_sources, host_view, loading, reader, request, saving, user_strategies, writer.
"""
