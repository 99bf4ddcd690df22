"""From a command to ranks that know each other, and the signals that end them.

From outside: interfaces, interrupt, rendezvous, spawn, stop_signals.
"""
