"""Mistral: Llama with a sliding window in every layer, or in none.

mistral.py (this file) --> architectures/__init__.py --> config.py
"""

from sixfold.gpt.huggingface.architecture import DEFAULTS, Architecture

MISTRAL = Architecture(
    model_type="mistral",
    name="MistralForCausalLM",
    defaults={
        **DEFAULTS, "vocab_size": 32000, "intermediate_size": 14336, "num_key_value_heads": 8,
        "max_position_embeddings": 131072, "sliding_window": 4096,
    },
    keys={"sliding_window": "sliding_window"},
)  # fmt: skip
