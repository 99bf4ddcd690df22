"""Streams of samples, as training uses them: one dataset or a blend of several, their states, where tokens are from.

From outside: base, blended, checkpoint_state, gpt, mock, position_sampler, provenance, stream.
"""
