"""The order of megatron-core 0.16.1, bit for bit, in numpy.

    document_index.py, sample_index.py --> the three indices of a dataset
    sample_counts.py, greedy.py --> the two of a blend
    index_order.py (all of one dataset) --> dataset/base.py

Pure: no files (``cache`` has them), no ranks.
From outside: document_index, greedy, index_order, sample_counts.
"""
