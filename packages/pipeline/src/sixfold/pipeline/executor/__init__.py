"""The runner of any program: what a user calls, and what all ranks do together around the calls of a step.

From outside: connect, runner.
"""
