"""The order of megatron-core 0.16.1, bit for bit, in numpy.

    documents.py, samples.py --> the three indices of a dataset; weights.py, greedy.py --> the two of a blend
    describe.py --> the names of their cache files; index.py (all of one dataset) --> dataset.py

Pure: no file is touched here (``cache.py`` does that), no ranks, no clock.
"""
