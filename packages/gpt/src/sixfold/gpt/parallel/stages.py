"""Which layers a pipeline stage holds.

    config.parallel --> stage_layers (this file) --> GPTModel(layers=...)

Pure: no torch, no ranks. A stage may be empty; it passes its input on.
"""

from collections.abc import Sequence

from sixfold.gpt.errors import ConfigError


def stage_layers(num_layers: int, num_stages: int, layers_per_stage: Sequence[int] = ()) -> list[range]:
    """Cut ``num_layers`` layers into ``num_stages`` contiguous stages.

    Each stage gets ``num_layers // num_stages``; what is left goes one each to stages 1, 2, ... So the first stage,
    which also carries the embedding, never gets one, and the last, which carries the head, gets one last.

    Args:
        layers_per_stage: the number for each stage instead; as many as stages, summing to ``num_layers``.
    Returns:
        Global 0-based layer numbers of each stage: every layer exactly once, in order.
    Raises:
        ConfigError: a count below its least, or ``layers_per_stage`` that does not fit.
    """
    if num_layers < 0 or num_stages < 1:
        raise ConfigError(f"{num_layers} layers on {num_stages} stages; layers are >= 0 and stages >= 1")
    counts = list(layers_per_stage)
    if not counts:
        share, left = divmod(num_layers, num_stages)
        # left < num_stages, so stage 0 never gets one of them.
        counts = [share + (1 if 1 <= stage <= left else 0) for stage in range(num_stages)]
    if len(counts) != num_stages or sum(counts) != num_layers or min(counts) < 0:
        raise ConfigError(
            f"layers_per_stage is {counts} for {num_layers} layers on {num_stages} stages; it has one entry >= 0 per "
            f"stage and sums to the layers"
        )
    ends = [sum(counts[: stage + 1]) for stage in range(num_stages)]
    stages = [range(end - count, end) for end, count in zip(ends, counts, strict=True)]
    # Megatron-LM #1304 built 28 of 30 layers without a word.
    assert [layer for stage in stages for layer in stage] == list(range(num_layers)), f"{stages} is not every layer"
    return stages
