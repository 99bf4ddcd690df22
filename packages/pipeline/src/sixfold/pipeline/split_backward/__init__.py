"""Backwards in two parts: input gradients in I, weight gradients left to W.

From outside: user_operators, weight_gradients.
"""
