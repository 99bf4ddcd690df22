"""Metrics of a checkpoint: what a manager writes beside the state, and reads again.

step, metrics --> content_of (this file) --> ``content_metadata`` of the checkpoint --> taken_out (this file)
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from sixfold.dist_ckpt.errors import CheckpointError


def content_of(step: int, metrics: Any) -> dict[str, Any]:
    """What a checkpoint says of itself; metrics are numbers of any kind, arrays and tensors of one element too.

    Raises:
        CheckpointError: a metric that is no number.
    """
    numbers = {}
    for name, value in metrics.items() if isinstance(metrics, Mapping) else [(None, metrics)]:
        try:
            if not isinstance(name, str) or isinstance(value, str | bytes):
                raise TypeError
            numbers[name] = float(value.item() if hasattr(value, "item") else value)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            raise CheckpointError(
                f"metrics[{name!r}] is {value!r}; metrics are numbers by name, such as {{'loss': 2.31}}"
            ) from None
    return {"step": operator.index(step), "metrics": dict(sorted(numbers.items()))}


def taken_out(common: dict[Any, Any]) -> dict[str, float]:
    """The metrics of a checkpoint, out of its common data, which could not be saved again with them."""
    content = common.get("content_metadata")
    if not (isinstance(content, dict) and isinstance(content.get("metrics"), dict)):
        return {}
    del common["content_metadata"]
    return {name: float(value) for name, value in content["metrics"].items() if isinstance(value, int | float)}
