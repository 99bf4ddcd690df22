"""Learning rate as a function of the update number.

    config, updates done --> learning_rate (this file) --> optimizer groups

Pure: a resumed run asks for the same number and gets the same answer, so there is no scheduler state to save.
"""

import math
from collections.abc import Callable, Mapping

from sixfold.gpt.config.train_config import TrainConfig

_FALLS: Mapping[str, Callable[[float], float]] = {
    "cosine": lambda x: (1 + math.cos(math.pi * x)) / 2,
    "minus_sqrt": lambda x: 1 - math.sqrt(x),
    "exponential": lambda x: 2 ** (1 - x) - 1,
}


def learning_rate(config: TrainConfig, update_index: int) -> float:
    """Learning rate of the update that ``update_index`` updates precede.

    With s the index, T = train.steps, W = warmup_steps, D = decay_steps and m = min_lr_ratio:
    ``lr (s+1)/W`` while s < W (the first update already counts), then by shape
    cosine ``lr (m + (1-m)(1 + cos(pi (s-W)/(T-W)))/2)``; wsd ``lr`` until T-D, then ``lr (m + (1-m) f(x))`` with
    x = (s-(T-D))/D; constant ``lr``. From T on the rate stays at its last value. f falls from 1 to 0: linear 1-x;
    cosine (1 + cos(pi x))/2; minus_sqrt 1 - sqrt(x) (arXiv 2405.18392); exponential 2^(1-x) - 1, as Megatron-LM's.
    """
    schedule, peak = config.schedule, config.optimizer.lr
    steps, warmup, decay, floor = config.train.steps, schedule.warmup_steps, schedule.decay_steps, schedule.min_lr_ratio
    if update_index < warmup:
        return peak * (update_index + 1) / warmup
    step = min(update_index, steps)
    if schedule.shape == "cosine" and steps > warmup:
        done = (step - warmup) / (steps - warmup)
        return peak * (floor + (1 - floor) * (1 + math.cos(math.pi * done)) / 2)
    if schedule.shape == "wsd" and decay and step >= steps - decay:
        if schedule.decay == "linear":
            return peak * (1 - (1 - floor) * (step - (steps - decay)) / decay)
        return peak * (floor + (1 - floor) * _FALLS[schedule.decay]((step - (steps - decay)) / decay))
    return peak
