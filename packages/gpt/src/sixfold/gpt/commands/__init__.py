"""The verbs of the command `sixfold`: what they parse, print and return.

From outside: cli, sample.
"""
