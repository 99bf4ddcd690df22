"""The memory of a rank over a step: bytes by purpose, and a picture that can be checked by eye."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor, nn

from sixfold.fsdp import BufferConfig, FsdpError, FullyShardedDataParallel, fully_shard_optimizer

WIDTH = 16


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).relu()


def trained(strategy: str = "optim_grads_params", gathered: str = "double"):
    torch.manual_seed(0)
    net = nn.Sequential(Layer(), Layer(), Layer())
    model = FullyShardedDataParallel(
        net, strategy=strategy, fsdp_unit_modules=[Layer], buffers=BufferConfig(gathered_bytes=gathered)
    )
    optimizer = fully_shard_optimizer(torch.optim.AdamW(net.parameters()), model)

    def step(microbatches: int = 1) -> None:
        for k in range(microbatches):
            with model.microbatch(last=k == microbatches - 1):
                model(torch.ones(2, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    return model, optimizer, step


def letters(text: str) -> dict[str, list[str]]:
    """Rows of a picture by unit, without the moments at which nothing changed."""
    rows: dict[str, list[str]] = {}
    for line in text.splitlines():
        words = line.split()
        if len(words) == 2 and words[0].isdigit() and set(words[1]) <= set(".gGsr"):
            rows.setdefault(words[0], []).append(words[1])
    return rows


def compact(row: str) -> str:
    return "".join(a for a, b in zip(row, " " + row, strict=False) if a != b)


def test_a_zero_3_step_is_drawn():
    model, optimizer, step = trained()
    with model.memory(optimizer) as memory:
        step()
    rows = {name: [compact(row) for row in both] for name, both in letters(str(memory)).items()}
    # Layers 0 and 2 share a slot: layer 0 is gathered again for its backward, the others stay.
    assert rows == {"0": [".gG.gG.", ".sr."], "1": [".gG.", ".sr."], "2": [".gG.", ".sr."]}


def test_zero_1_gathers_once_and_sums_over_microbatches():
    model, optimizer, step = trained("optim")
    with model.memory(optimizer) as memory:
        step(microbatches=3)
    rows = {name: [compact(row) for row in both] for name, both in letters(str(memory)).items()}
    assert rows == {name: [".gG.", ".sr."] for name in "012"}


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads", "optim_grads_params"])
@pytest.mark.parametrize("gathered", ["double", "all"])
def test_every_moment_adds_up(strategy, gathered):
    model, optimizer, step = trained(strategy, gathered)
    with model.memory(optimizer) as memory:
        step(microbatches=2)
    timeline = memory.timeline
    stated = model.report()["bytes"]
    state = sum(value.nbytes for values in optimizer.state.values() for value in values.values())
    assert timeline.purposes == {**stated, "optimizer": state}
    assert timeline.moments[-1].held == sum(stated.values()) + state
    assert [timeline.moments[0].move, timeline.moments[-1].move] == ["begin", "end"]
    for moment in timeline.moments:
        assert len(moment.weights) == len(moment.sums) == len(model.units)
        assert moment.busy <= moment.held
    assert timeline.moments[-1].summing == timeline.moments[-1].reducing == 0
    assert timeline.peak.busy == max(moment.busy for moment in timeline.moments) > 0


def test_nothing_is_watched_after_the_block_whatever_ends_it():
    model, optimizer, step = trained()
    with pytest.raises(ZeroDivisionError), model.memory(optimizer) as memory:
        model(torch.ones(2, WIDTH))
        with pytest.raises(FsdpError, match="inside its block"):
            str(memory)
        raise ZeroDivisionError
    count = len(memory.timeline.moments)
    model.zero_grad()
    step()
    assert len(memory.timeline.moments) == count > 2


def test_the_svg_has_a_bar_for_each_moment_and_names_each_unit():
    model, optimizer, step = trained()
    with model.memory(optimizer) as memory:
        step()
    picture = ElementTree.fromstring(memory.svg())
    texts = ["".join(node.itertext()) for node in picture.iter("{http://www.w3.org/2000/svg}text")]
    titles = [node.text or "" for node in picture.iter("{http://www.w3.org/2000/svg}title")]
    assert {"0", "1", "2"} <= set(texts)
    for at, moment in enumerate(memory.timeline.moments):
        assert any(title.startswith(f"{at} {moment.move}") for title in titles)
    for rect in picture.iter("{http://www.w3.org/2000/svg}rect"):
        assert float(rect.get("height", "0")) > 0 and float(rect.get("y", "0")) >= 0
