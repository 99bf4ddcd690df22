"""The network, whole or one pipeline stage of it, from token ids to losses.

From outside: decoder, dropout, float8_linear, initial_weights, key_value_cache, lora, loss, moe.
"""
