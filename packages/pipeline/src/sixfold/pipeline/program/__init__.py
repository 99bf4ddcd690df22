"""The value: actions, a list of them per rank, text and CSV, messages, and what is wrong with one as a picture.

From outside: action, counterexample, entry_times, lowering, placement, program.
"""
