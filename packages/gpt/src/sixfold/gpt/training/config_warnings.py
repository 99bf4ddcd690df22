"""What a run says before its first step: things that are taken as they are asked, and that few people mean.

    config, the configuration of the checkpoint, its step --> config_warnings (this file) --> resume.py --> stderr

Pure: texts of numbers. Nothing here refuses anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sixfold.gpt.errors import ConfigError
from sixfold.gpt.training.learning_rate import learning_rate

if TYPE_CHECKING:
    from sixfold.gpt.config.train_config import TrainConfig


def config_warnings(
    config: TrainConfig, past: TrainConfig | None, step: int, *, slow_bfloat16: bool = False
) -> list[str]:
    """A line for each.

    Args:
        past: what the checkpoint was trained with; None for a run that begins, or goes on from an import.
        step: updates done.
        slow_bfloat16: the run computes on a CPU that has no instructions for it.
    """
    found = [_slow(config) if slow_bfloat16 else ""]
    found += [_export(config) if step == 0 else "", _warmup(config), _never_falls(config), _done(config, step)]
    found += [_jump(past, config, step), _average(past, config, step)] if past is not None else []
    return [line for line in found if line]


def _export(config: TrainConfig) -> str:
    """Before it is trained, not after."""
    from sixfold.gpt.huggingface.config import architecture_of

    try:
        architecture_of(config.model)
    except ConfigError as error:
        return f"the model of this run has no Hugging Face form, and `sixfold export` will refuse it: {error}"
    return ""


def _slow(config: TrainConfig) -> str:
    if config.train.precision == "fp32":
        return ""
    return (
        f"this CPU has no instructions for bfloat16, and train.precision is {config.train.precision!r}: a step takes "
        f'many times as long as with train.precision = "fp32"'
    )


def _warmup(config: TrainConfig) -> str:
    warmup, steps = config.schedule.warmup_steps, config.train.steps
    if not 0 < steps < warmup:
        return ""
    return (
        f"schedule.warmup_steps is {warmup} and train.steps {steps}: the learning rate only rises, to "
        f"{learning_rate(config, steps - 1):.3g} of optimizer.lr = {config.optimizer.lr:g}"
    )


def _never_falls(config: TrainConfig) -> str:
    if config.schedule.shape != "wsd" or config.schedule.decay_steps:
        return ""
    return (
        "schedule.shape is 'wsd' without schedule.decay_steps and schedule.decay_tokens: the learning rate stays at "
        f"optimizer.lr = {config.optimizer.lr:g} to the end of the run"
    )


def _done(config: TrainConfig, step: int) -> str:
    steps = config.train.steps
    if step < steps or step == 0:
        return ""
    return f"the run has done {step} steps and train.steps is {steps}: nothing is trained; a larger train.steps goes on"


def _average(past: TrainConfig, config: TrainConfig, step: int) -> str:
    was, now = past.optimizer.ema_decay, config.optimizer.ema_decay
    if now and not was:
        return (
            f"optimizer.ema_decay is {now} and the checkpoint has no average of weights: it begins with those of step "
            f"{step}"
        )
    if was and not now:
        return f"the average of weights in the checkpoint of step {step} is left there: optimizer.ema_decay is 0"
    return ""


def _jump(past: TrainConfig, config: TrainConfig, step: int) -> str:
    """The schedule of a longer run is another one; from where the old one was, it jumps."""
    if config.train.steps == past.train.steps or not 0 < step < config.train.steps:
        return ""
    was, here = learning_rate(past, step - 1), learning_rate(config, step)
    same = (past.optimizer.lr, past.schedule) == (config.optimizer.lr, config.schedule)
    if not same or abs(here - learning_rate(config, step - 1)) >= abs(here - was):
        return ""
    return (
        f"train.steps was {past.train.steps} and is {config.train.steps}, over which the learning rate falls "
        f"({config.schedule.shape}): it goes from {was:.3g} at step {step} to {here:.3g} at step {step + 1}; "
        f'schedule.shape = "constant" with optimizer.lr = {was:.3g} goes on without a jump'
    )
