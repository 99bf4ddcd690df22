"""Learning rate as a function of the update number.

    config, updates done --> learning_rate (this file) --> optimizer groups

Pure: a resumed run asks for the same number and gets the same answer, so there is no scheduler state to save.
"""

import math

from sixfold.gpt.config.train_config import TrainConfig


def learning_rate(config: TrainConfig, update_index: int) -> float:
    """Learning rate of the update that ``update_index`` updates precede.

    With s the index, T = train.steps, W = warmup_steps, D = decay_steps and m = min_lr_ratio:
    ``lr (s+1)/W`` while s < W (the first update already counts), then by shape
    cosine ``lr (m + (1-m)(1 + cos(pi (s-W)/(T-W)))/2)``; wsd ``lr`` until T-D, then ``lr (1 - (1-m)(s-(T-D))/D)``;
    constant ``lr``. From T on the rate stays at its last value.
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
        return peak * (1 - (1 - floor) * (step - (steps - decay)) / decay)
    return peak
