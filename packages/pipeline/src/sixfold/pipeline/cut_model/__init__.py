"""From a model of one piece to stages: an nn.Sequential, or a causal language model of Hugging Face's form.

From outside: stages.
"""
