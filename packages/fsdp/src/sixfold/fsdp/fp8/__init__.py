"""Weights of one byte: their scales, and products over the bytes."""
