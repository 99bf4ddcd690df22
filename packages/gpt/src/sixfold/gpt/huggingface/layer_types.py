"""Which layers slide, in config.json of architectures that say it layer by layer.

    config.json --> read_layer_types (this file) --> architectures/ --> written_layer_types (this file) --> config.json

Pure: no files, no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sixfold.gpt.config.train_config import GPTConfig
from sixfold.gpt.huggingface.architecture import Problems

_SLIDES, _FULL = "sliding_attention", "full_attention"
_NO_WINDOW = 4096  # written where no layer slides: transformers wants a number


def read_layer_types(
    raw: Mapping[str, Any], values: Mapping[str, Any], slides: Callable[[int], bool], problems: Problems
) -> dict[str, Any]:
    """sliding_window and layer_types of [model].

    Args:
        slides: of a layer by its number, where config.json does not say it.
    """
    layers, window = values["num_hidden_layers"], raw.get("sliding_window", values.get("sliding_window"))
    kinds = raw.get("layer_types")
    if kinds is None:
        kinds = [_SLIDES if slides(layer) else _FULL for layer in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or not set(map(str, kinds)) <= {_SLIDES, _FULL}:
        problems.append(f"layer_types is {kinds!r}; it is {_SLIDES} or {_FULL} for each of {layers} layers")
        return {}
    if _SLIDES not in kinds:
        return {}
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
        problems.append(f"sliding_window is {window!r} and layer_types has {_SLIDES}; it is a whole number > 0")
        return {}
    return {"sliding_window": window, "layer_types": tuple(kinds) if _FULL in kinds else ()}


def written_layer_types(config: GPTConfig) -> dict[str, Any]:
    """Keys of config.json that say which layers slide."""
    kinds = [_SLIDES if config.slides(layer) else _FULL for layer in range(config.num_layers)]
    return {"layer_types": kinds, "sliding_window": config.sliding_window or _NO_WINDOW}
