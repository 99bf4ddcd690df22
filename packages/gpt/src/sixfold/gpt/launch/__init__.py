"""From a command to ranks that know each other, and the signals that end them.

From outside: interrupt, rendezvous, spawn, stop_signals.
"""
