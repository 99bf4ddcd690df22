"""A user's own decoder: what its provider is told, and what evaluation does to it."""

from __future__ import annotations

import pytest
import torch
from gpt_helpers import tiny_config
from run_helpers import JOB_S, lines, losses, world_of
from torch import nn

import ranktest
import sixfold.blending  # noqa: F401 - a run imports it late; here the server of ranks has it loaded
from sixfold.gpt import ConfigError, TrainConfig
from sixfold.gpt.training.loop import train_in


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(8, 8)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.mix(x))


class Decoder(nn.Module):
    """One stage of a decoder that is not GPTModel; notes the mode of its layers in every forward."""

    def __init__(self, pre_process: bool, post_process: bool, layers: range, modes: list[bool]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(257, 8) if pre_process else None
        self.layers = nn.ModuleDict({str(i): Layer() for i in layers})
        self.head = nn.Linear(8, 257) if post_process else None
        self.modes = modes

    def forward(self, x: torch.Tensor, *, labels: torch.Tensor, loss_mask: torch.Tensor, **_: object) -> torch.Tensor:
        self.modes.append(self.training)
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers.values():
            assert layer.drop.training == self.training
            x = layer(x)
        if self.head is None:
            return x
        return nn.functional.cross_entropy(self.head(x).transpose(1, 2), labels, reduction="none") * loss_mask


def told(rank: int, ranks: int, text: str) -> list[tuple]:
    """What the provider of this rank was called with."""
    calls = []

    def provider(pre_process, post_process, vp_stage, *, stage, layers, num_stages):
        calls.append((pre_process, post_process, vp_stage, stage, layers, num_stages))
        return Decoder(pre_process, post_process, layers, [])

    train_in(TrainConfig.from_text(text), world_of(rank, ranks), provider)
    return calls


@pytest.mark.slow
def test_a_provider_is_told_which_stage_it_builds_and_with_which_layers(tmp_path):
    config = tiny_config(tmp_path, "parallel.pp=4", "train.steps=1")
    assert ranktest.run_ranks(told, 4, config.to_toml(), timeout=JOB_S) == [
        [(True, False, 0, 0, range(1), 4)],
        [(False, False, 0, 1, range(1, 2), 4)],
        [(False, False, 0, 2, range(2, 3), 4)],
        [(False, True, 0, 3, range(3, 4), 4)],
    ]


def same_names(rank: int, ranks: int, text: str) -> None:
    """A provider with Megatron's three arguments alone, that numbers its layers from 0 on every stage."""

    def provider(pre_process, post_process, vp_stage=None):
        return Decoder(pre_process, post_process, range(1), [])

    train_in(TrainConfig.from_text(text), world_of(rank, ranks), provider)


def test_stages_of_a_provider_that_share_a_name_are_refused_before_the_first_step(tmp_path):
    config = tiny_config(tmp_path, "parallel.pp=2")
    with pytest.raises(ranktest.RankFailed, match=r"layers\.0\.mix\.bias is a name of stage 0 and of stage 1"):
        ranktest.run_ranks(same_names, 2, config.to_toml(), timeout=JOB_S)


def same_buffers(rank: int, ranks: int, text: str) -> str:
    """A provider of two stages on each rank, each with a buffer of one name."""

    def provider(pre_process, post_process, vp_stage, *, stage, layers):
        made = Decoder(pre_process, post_process, layers, [])
        made.register_buffer("frequencies", torch.ones(3))
        return made

    with pytest.raises(ConfigError, match="or register a buffer") as error:
        train_in(TrainConfig.from_text(text), world_of(rank, ranks), provider)
    return str(error.value)


def test_stages_that_share_the_name_of_a_buffer_are_refused_before_a_checkpoint_lacks_one(tmp_path):
    config = tiny_config(tmp_path, "parallel.pp=2", "parallel.schedule=looped_bfs", "parallel.stages_per_rank=2")
    for text in ranktest.run_ranks(same_buffers, 2, config.to_toml(), timeout=JOB_S):
        assert text.startswith("frequencies is a name of stage 0 and of stage 1 of the model_provider")


def modes_seen(rank: int, ranks: int, text: str) -> tuple[list[bool], list[bool]]:
    """The mode of each forward, and the mode of each module after the run; a layer was frozen in eval by its user."""
    torch.manual_seed(0)
    modes: list[bool] = []
    made = []

    def provider(pre_process, post_process, vp_stage=None, *, stage, **_):
        made.append(Decoder(pre_process, post_process, range(2 * stage, 2 * stage + 2), modes))
        made[0].layers[str(2 * stage)].mix.eval()
        return made[0]

    train_in(TrainConfig.from_text(text), world_of(rank, ranks), provider)
    return modes, [module.training for module in made[0].modules() if isinstance(module, nn.Linear)]


@pytest.mark.slow
def test_evaluation_runs_a_provider_in_eval_mode_and_gives_each_module_its_own_mode_back(tmp_path):
    options = ("parallel.pp=2", "train.steps=2", "eval.batches=1")
    plain = tiny_config(tmp_path, *options, run="plain")
    ranktest.run_ranks(modes_seen, 2, plain.to_toml(), timeout=JOB_S)
    config = tiny_config(tmp_path, *options, "eval.every=1")
    for rank, (modes, after) in enumerate(ranktest.run_ranks(modes_seen, 2, config.to_toml(), timeout=JOB_S)):
        assert modes == [*[True] * 4, *[False] * 4] * 2
        assert after == [False, True, *[True] * rank]
    assert len(lines(config, "eval")) == 2
    assert losses(config) == losses(plain), "evaluation took numbers from the generator of training"


class Counting(Decoder):
    """Keeps two buffers: how often it ran in training, and what it saw last; a third is no part of its state."""

    def __init__(self, *args):
        super().__init__(*args)
        self.register_buffer("runs", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("cache", torch.zeros(3), persistent=False)

    def forward(self, x, **kwargs):
        self.runs += 1
        self.seen += x.float().flatten()[:3].detach()
        return super().forward(x, **kwargs)


def buffers_after(rank: int, ranks: int, text: str) -> tuple[int, list[float]]:
    torch.manual_seed(0)
    made = []

    def provider(pre_process, post_process, vp_stage=None):
        made.append(Counting(pre_process, post_process, range(1), []))
        return made[0].eval()

    train_in(TrainConfig.from_text(text), world_of(rank, ranks), provider)
    return int(made[0].runs), made[0].seen.tolist()


@pytest.mark.slow
def test_buffers_of_a_provider_are_saved_and_loaded(tmp_path):
    whole, cut = (tiny_config(tmp_path, "train.steps=2", run=run) for run in ("whole", "cut"))
    expected = buffers_after(0, 1, whole.to_toml())
    buffers_after(0, 1, tiny_config(tmp_path, "train.steps=1", run="cut").to_toml())
    assert buffers_after(0, 1, cut.to_toml()) == expected
    assert expected[0] == 2 * 4


class Scaled(Decoder):
    """Keeps state that is no tensor, as TransformerEngine's modules do: how often it ran, and a word."""

    def __init__(self, *args):
        super().__init__(*args)
        self.state = {"runs": 0, "amax": torch.zeros(2), "recipe": "delayed"}

    def get_extra_state(self):
        return self.state

    def set_extra_state(self, state):
        self.state = state

    def forward(self, x, **kwargs):
        self.state["runs"] += 1
        self.state["amax"] += 0.5
        return super().forward(x, **kwargs)


def extra_state_after(rank: int, ranks: int, text: str) -> tuple[int, list[float], str]:
    torch.manual_seed(0)
    made = []

    def provider(pre_process, post_process, vp_stage=None, *, layers):
        made.append(Scaled(pre_process, post_process, layers, []))
        return made[0].eval()

    train_in(TrainConfig.from_text(text), world_of(rank, ranks), provider)
    return made[0].state["runs"], made[0].state["amax"].tolist(), made[0].state["recipe"]


@pytest.mark.slow
def test_extra_state_of_a_provider_is_saved_and_loaded(tmp_path):
    whole, cut = (tiny_config(tmp_path, "train.steps=2", run=run) for run in ("whole", "cut"))
    expected = extra_state_after(0, 1, whole.to_toml())
    extra_state_after(0, 1, tiny_config(tmp_path, "train.steps=1", run="cut").to_toml())
    assert extra_state_after(0, 1, cut.to_toml()) == expected
    assert expected == (8, [4.0, 4.0], "delayed")


def same_extra_state(rank: int, ranks: int, text: str) -> str:
    with pytest.raises(ConfigError) as error:
        extra_state_after(rank, ranks, text)
    return str(error.value)


def test_stages_whose_extra_state_has_one_name_are_refused_before_a_checkpoint_lacks_one(tmp_path):
    config = tiny_config(tmp_path, "parallel.pp=2")
    for text in ranktest.run_ranks(same_extra_state, 2, config.to_toml(), timeout=JOB_S):
        assert text.startswith("_extra_state is a name of stage 0 and of stage 1 of the model_provider")
