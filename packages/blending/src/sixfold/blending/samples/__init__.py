"""Which tokens the n-th sample of one dataset is, in the stateless order: documents in a shuffled line, cut in chunks.

From outside: best_fit, chunk_grid, document_shuffle, packed_rows, packing_costs, range_table, token_line.
"""
