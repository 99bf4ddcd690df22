"""One run: resume or begin, step after step, evaluate, save, stop.

From outside: kept_alive, loop.
"""
