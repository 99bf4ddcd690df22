"""The average of weights: its rule, its turn in the place of the weights, and what goes with it."""

import numpy as np
import pytest
import torch
from config_helpers import config_with, words_of

from sixfold.fsdp import StateRecord
from sixfold.gpt.config.resume_rules import noted_changes, resume_changes
from sixfold.gpt.config.train_config import OptimizerConfig
from sixfold.gpt.engine import weight_average
from sixfold.gpt.engine.weight_average import WeightAverage, decay_after
from sixfold.gpt.errors import ConfigError
from sixfold.gpt.training.config_warnings import config_warnings

SIZES = (1, 7, 4099, 64)


def averaged(seed=0):
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(size, generator=generator) for size in SIZES]
    records = [StateRecord(str(i), "param", (len(t),), 0, len(t), t, 0) for i, t in enumerate(tensors)]
    average = WeightAverage(lambda: records)
    average.begin()
    return tensors, average


def values(average):
    return [record.tensor.numpy().copy() for record in average.state_records()]


def test_the_decay_rises_to_what_is_asked_or_is_so_from_the_first_update():
    rising = OptimizerConfig(lr=1.0, ema_decay=0.9)
    assert [decay_after(rising, t) for t in (1, 2, 10, 80, 81, 10**9)] == [2 / 11, 3 / 12, 11 / 20, 0.9, 0.9, 0.9]
    assert decay_after(OptimizerConfig(lr=1.0, ema_decay=0.9, ema_warmup=False), 1) == 0.9


@pytest.mark.parametrize("together", [1, 64 * 2**20])
def test_an_update_is_three_roundings_of_each_element_by_itself(monkeypatch, together):
    monkeypatch.setattr(weight_average, "_TOGETHER_BYTES", together)
    tensors, average = averaged()
    expected = values(average)
    rng = np.random.default_rng(1)
    for decay in (0.0, 0.3, 0.999):
        for tensor in tensors:
            tensor += torch.from_numpy(rng.standard_normal(len(tensor)).astype(np.float32))
        average.update(decay)
        for old, tensor in zip(expected, tensors, strict=True):
            old += (tensor.numpy() - old) * np.float32(1 - decay)
    assert all(np.array_equal(a, b) for a, b in zip(values(average), expected, strict=True))


def test_weights_and_average_change_places_and_come_back_bit_for_bit():
    tensors, average = averaged()
    tensors[1][:2] = torch.tensor([float("nan"), -0.0])
    weights, before = [t.clone() for t in tensors], values(average)
    average.swap()
    assert all(np.array_equal(t.numpy(), old) for t, old in zip(tensors, before, strict=True))
    average.swap()
    assert all(t.view(torch.int32).equal(w.view(torch.int32)) for t, w in zip(tensors, weights, strict=True))
    assert all(np.array_equal(a, b) for a, b in zip(values(average), before, strict=True))


def test_it_has_no_records_before_it_begins_or_when_it_is_forgotten():
    _, average = averaged()
    assert {record.key for record in average.state_records()} == {"ema"}
    average.forget()
    assert average.state_records() == [] and not average.has_begun
    average.make_room()
    assert average.has_begun and len(average.state_records()) == len(SIZES)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (("optimizer.ema_warmup=false",), "optimizer.ema_warmup is false and optimizer.ema_decay 0.0"),
        (("optimizer.ema_decay=1.0",), "optimizer.ema_decay is 1.0"),
        (("optimizer.ema_decay=0.9", "fsdp.main_dtype=bfloat16"), "fsdp.main_dtype = 'float32' works"),
        (
            ("optimizer.ema_decay=0.9", "parallel.schedule=pipedream_2bw", "parallel.sharding=no_shard",
             "train.clip_grad=0", "model.tie_embeddings=false"),
            "optimizer.ema_decay is 0.9 and parallel.schedule 'pipedream_2bw'",
        ),
    ],
)  # fmt: skip
def test_what_an_average_does_not_go_with_is_refused(keys, says):
    with pytest.raises(ConfigError) as error:
        config_with(*keys)
    assert says in words_of(error)


def test_a_resume_may_begin_or_leave_an_average_and_says_so():
    without, having = config_with(), config_with("optimizer.ema_decay=0.9")
    resume_changes(without, having, step=3)
    assert noted_changes(without, having) == {"optimizer.ema_decay": [0.0, 0.9]}
    assert any("it begins with those of step 3" in line for line in config_warnings(having, without, 3))
    assert any("is left there" in line for line in config_warnings(without, having, 3))
    assert not any("average" in line for line in config_warnings(having, having, 3))
