"""Documents by number, whoever stores them: sources, the part of one that a split takes, .idx/.bin pairs.

From outside: eod_check, idx_bin, part, source.
"""
