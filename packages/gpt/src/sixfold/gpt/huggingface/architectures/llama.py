"""Llama: the architecture that all others are described by.

llama.py (this file) --> architectures/__init__.py --> config.py
"""

from sixfold.gpt.config.train_config import GPTConfig
from sixfold.gpt.errors import ConfigError
from sixfold.gpt.huggingface.architecture import DEFAULTS, NO_WINDOW, Architecture


def _check(config: GPTConfig) -> None:
    if config.hidden_size % config.num_attention_heads:
        raise ConfigError(
            f"model.hidden_size is {config.hidden_size} and model.num_attention_heads {config.num_attention_heads}; "
            "transformers' Llama wants the second to divide the first, whatever head_dim is"
        )


LLAMA = Architecture(
    model_type="llama",
    name="LlamaForCausalLM",
    defaults={
        **DEFAULTS, "vocab_size": 32000, "intermediate_size": 11008, "num_key_value_heads": None,
        "max_position_embeddings": 2048,
    },
    fixed=NO_WINDOW,
    constant={"attention_bias": False, "mlp_bias": False},
    check=_check,
)  # fmt: skip
