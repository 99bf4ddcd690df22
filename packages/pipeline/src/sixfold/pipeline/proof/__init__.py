"""Whether a program is right and cannot hang, once and when its batches follow without end.

From outside: endless, verify.
"""
