"""Lengths that were given in tokens, as steps.

    train.tokens, schedule.warmup_tokens, schedule.decay_tokens --> tokens_as_steps (this file) --> TrainConfig: steps
    rules.py --> check_tokens (this file): a TrainConfig of any origin

A step reads global_batch_size rows of data.seq_length tokens, as the log counts them. The last step of a length may
read more than is left of it. Both numbers stay in the configuration; they are refused where they differ.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from sixfold.gpt.config.batch_schedule import samples_of
from sixfold.gpt.errors import ConfigError

if TYPE_CHECKING:
    from sixfold.gpt.config.train_config import TrainConfig

MOST_STEPS = 2**62


def tokens_as_steps(values: Mapping[str, dict[str, Any]]) -> None:
    """Fill in the steps of each length that has tokens. Values of wrong types are left for their own rules.

    Raises:
        ConfigError: steps are given too, and are others.
    """
    train, schedule = values["train"], values["schedule"]
    batch: Any = train.get("global_batch_size")
    ramp = train.get("batch_ramp", [])
    length: Any = values["data"].get("seq_length")
    if not (_is_count(batch) and _is_count(length) and _is_ramp(ramp)):
        return
    for table, name in ((train, "tokens"), (schedule, "warmup_tokens"), (schedule, "decay_tokens")):
        if isinstance(table.get(name), float) and table[name].is_integer():
            table[name] = int(table[name])  # 1e9 is a usual spelling

    def tokens(step: int) -> int:
        return samples_of(batch, ramp, step) * int(length)

    def first_with(wanted: int) -> int:
        return bisect_left(range(MOST_STEPS), wanted, key=tokens)

    if _is_count(train.get("tokens")):
        _fill(train, "train.tokens", "steps", first_with(train["tokens"]))
    if _is_count(schedule.get("warmup_tokens")):
        _fill(schedule, "schedule.warmup_tokens", "warmup_steps", first_with(schedule["warmup_tokens"]))
    if _is_count(schedule.get("decay_tokens")) and _is_count(train.get("steps")):
        steps = train["steps"]
        begin = bisect_right(range(steps + 1), tokens(steps) - schedule["decay_tokens"], key=tokens) - 1
        _fill(schedule, "schedule.decay_tokens", "decay_steps", steps - max(begin, 0))


def check_tokens(config: "TrainConfig") -> None:
    """Refuse steps that are not those of their tokens, in a configuration that was made or changed in Python.

    Raises:
        ConfigError: naming both, and the steps that work.
    """
    values = {name: asdict(getattr(config, name)) for name in ("train", "data", "schedule")}
    values["train"]["batch_ramp"] = [list(pair) for pair in config.train.batch_ramp]
    tokens_as_steps(values)
    for key in ("warmup", "decay"):
        steps, given = values["schedule"][f"{key}_steps"], getattr(config.schedule, f"{key}_steps")
        if steps != given:
            raise ConfigError(
                f"schedule.{key}_tokens is {values['schedule'][f'{key}_tokens']} and schedule.{key}_steps {given}; in "
                f"Python both are given: schedule.{key}_steps = {steps} works"
            )


def _fill(table: dict[str, Any], tokens: str, key: str, steps: int) -> None:
    section, _, given_key = tokens.partition(".")
    name, given = f"{section}.{key}", table[given_key]
    if table.get(key, steps) != steps and (table[key] or section == "train"):  # 0 is a length's default
        said = f"{tokens} is {given}, which is {steps} steps, and {name} {table[key]}"
        raise ConfigError(f"{said}; the two have to agree: leave one out")
    table[key] = steps


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_ramp(ramp: Any) -> bool:
    pairs = isinstance(ramp, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in ramp)
    return pairs and all(isinstance(number, int) for pair in ramp for number in pair)
