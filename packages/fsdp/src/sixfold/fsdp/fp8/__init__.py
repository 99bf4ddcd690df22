"""Weights of one byte: their scales, and products over the bytes.

From outside: quantized, scaled_matmul.
"""
