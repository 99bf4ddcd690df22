"""Which tokens the n-th sample of one dataset is, in the stateless order: documents in a shuffled line, cut in chunks.

From outside: chunk_grid, document_shuffle, token_line.
"""
