"""Parts of canonical tensors: what is drawn and saved for a part is that part of the whole."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sixfold.gpt.config.train_config import GPTConfig
from sixfold.gpt.model.initial_weights import fill_elements
from sixfold.gpt.parallel.weight_sharding import Cuts, Stretch, replicated, runs, stretches, whole_shape

CONFIG = GPTConfig(num_layers=2, hidden_size=64, num_attention_heads=8, ffn_hidden_size=96, vocab_size=250)
SHAPES = {
    "embedding.weight": (256, 64),
    "head.weight": (256, 64),
    "layers.1.attention.q.weight": (512, 64),
    "layers.1.attention.out.weight": (64, 512),
    "layers.0.attention.k.bias": (512,),
    "layers.0.ffn.gate.weight": (96, 64),
    "layers.0.ffn.down.weight": (64, 96),
    "layers.0.ffn.router.weight": (8, 64),
    "layers.0.ffn.experts.up.weight": (8, 96, 64),
    "layers.0.ffn.experts.down.weight": (8, 64, 96),
    "layers.0.attention.q_norm.weight": (64,),
    "norm.weight": (64,),
}


def part_of(whole: torch.Tensor, cut: dict[int, tuple[int, int]]) -> torch.Tensor:
    for dimension, (part, parts) in cut.items():
        whole = whole.chunk(parts, dimension)[part]
    return whole.contiguous()


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (4, 1), (2, 4)])
@pytest.mark.slow
def test_a_part_is_drawn_as_the_part_of_the_whole(name: str, tp: int, ep: int) -> None:
    whole = torch.empty(SHAPES[name])
    fill_elements(CONFIG, 7, name, whole.shape, 0, whole.view(-1))
    for rank in range(tp * ep):
        cut = Cuts(tp_rank=rank % tp, tp=tp, ep_rank=rank // tp, ep=ep).of(name)
        expected = part_of(whole, dict(cut))
        assert whole_shape(cut, expected.shape) == whole.shape, f"{name}: {cut}"
        for start, stop in ((0, expected.numel()), (3, expected.numel() - 5)):
            drawn = torch.full((stop - start,), 9.0)
            fill_elements(CONFIG, 7, name, expected.shape, start, drawn, cut)
            assert torch.equal(drawn, expected.view(-1)[start:stop]), f"{name}, rank {rank}: {cut}"


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_runs_and_stretches_are_the_elements_of_the_part(data: st.DataObject) -> None:
    parts = data.draw(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3)), min_size=1, max_size=3))
    cut = {d: (data.draw(st.integers(0, n - 1)), n) for d, (_, n) in enumerate(parts) if data.draw(st.booleans())}
    local = [size for size, _ in parts]
    whole = torch.arange(torch.Size(whole_shape(cut, local)).numel()).view(whole_shape(cut, local))
    flat = part_of(whole, cut).view(-1)
    start = data.draw(st.integers(0, flat.numel()))
    stop = data.draw(st.integers(start, flat.numel()))
    found = []
    for at, first, length in runs(cut, local, start, stop):
        assert at == start + len(found), "runs follow one another"
        found += range(first, first + length)
    assert found == flat[start:stop].tolist(), f"{local}, {cut}, [{start}, {stop})"
    again = []
    for s in stretches(cut, local, start, stop):
        assert s.at == start + len(again), "stretches follow one another"
        for row in range(s.count):
            again += range(s.whole_at + row * s.stride, s.whole_at + row * s.stride + s.length)
    assert again == found


def test_columns_of_a_matrix_are_three_stretches_at_most_whatever_its_rows() -> None:
    found = stretches({1: (1, 2)}, (1000, 8), 3, 7990)
    assert [(s.length, s.count) for s in found] == [(5, 1), (8, 997), (6, 1)]
    assert found[1] == Stretch(at=8, whole_at=24, length=8, count=997, stride=16)


def test_norms_and_routers_alone_are_whole_on_every_tensor_parallel_rank() -> None:
    assert sorted(name for name in SHAPES if replicated(name)) == [
        "layers.0.attention.q_norm.weight", "layers.0.ffn.router.weight", "norm.weight",
    ]  # fmt: skip
    assert replicated("layers.0.ffn.shared_gate.weight"), "a shared expert's gate gives one number a token"
    assert not replicated("layers.0.ffn.shared.gate.weight"), "its feed-forward part is split as any other"
