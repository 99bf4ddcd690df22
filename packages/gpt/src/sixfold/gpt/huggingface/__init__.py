"""Models of Hugging Face, in and out: config.json and safetensors <--> [model] and checkpoints.

From outside: adapters, config, convert.
"""
