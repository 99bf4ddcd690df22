"""The library safetensors, which comes with the extra ``hf``.

safetensors_library (this file) --> convert.py, adapters.py
"""

from typing import Any

from sixfold.gpt.errors import ConfigError


def safetensors_library() -> Any:
    """The module ``safetensors``.

    Raises:
        ConfigError: it is not installed; names the extra.
    """
    try:
        import safetensors
        import safetensors.torch
    except ImportError as error:
        raise ConfigError("Hugging Face folders need the library safetensors: pip install 'sixfold-gpt[hf]'") from error
    return safetensors
