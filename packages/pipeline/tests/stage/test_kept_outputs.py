"""Outputs that a caller keeps are detached and nobody else's, in whatever the last stage returns them."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sixfold.pipeline import PipelineRunner, ScheduleError, Stage, one_f_one_b, zb_h1


class Named(NamedTuple):
    hidden: Tensor
    seen: Tensor


@dataclass(frozen=True)
class Record:
    hidden: Tensor
    seen: Tensor
    name: str = "record"


def model_output(hidden: Tensor, seen: Tensor) -> Any:
    outputs = pytest.importorskip("transformers.modeling_outputs", reason="needs transformers' outputs")
    return outputs.CausalLMOutput(logits=hidden, hidden_states=(seen,))


FORMS: dict[str, Any] = {
    "tuple": lambda *parts: parts,
    "list": lambda *parts: list(parts),
    "dict": lambda hidden, seen: {"hidden": hidden, "seen": seen},
    "OrderedDict": lambda hidden, seen: OrderedDict(hidden=hidden, seen=seen),
    "NamedTuple": Named,
    "dataclass": Record,
    "nested": lambda hidden, seen: ({"parts": [hidden, seen]},),
    "ModelOutput": model_output,
}


class Last(nn.Module):
    """Returns its output, and a buffer that it changes in place."""

    seen: Tensor

    def __init__(self, form: Any) -> None:
        super().__init__()
        self.layer, self.form = nn.Linear(4, 4), form
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        self.seen += 1
        return self.form(self.layer(x), self.seen)


def leaves(value: Any) -> list[Tensor]:
    """The tensors in it: the output, and what was seen."""
    if isinstance(value, Record):
        value = (value.hidden, value.seen)
    if isinstance(value, dict):
        value = tuple(value.values())
    return [value] if isinstance(value, Tensor) else [leaf for part in value for leaf in leaves(part)]


def runner_of(form: Any, program: Any) -> PipelineRunner:
    torch.manual_seed(0)
    stages = [Stage(nn.Linear(4, 4), 0), Stage(Last(form), 1)]
    return PipelineRunner(program, stages, None, lambda output, y: F.mse_loss(leaves(output)[0], y))


@pytest.mark.parametrize("make", [one_f_one_b, zb_h1])
@pytest.mark.parametrize("form", FORMS)
def test_kept_outputs_are_detached_and_hold_what_their_microbatch_saw(form, make):
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    runner = runner_of(FORMS[form], make(2, 4))
    kind = type(FORMS[form](x, x))
    first, second = (module.layer if isinstance(module, Last) else module for module in modules_of(runner))
    expected = [second(first(part)) for part in x.chunk(4)]
    for call, seen in ((lambda: runner.step(x, x, keep_outputs=True), 1), (lambda: runner.forward(x), 5)):
        outputs = call().outputs
        assert {type(each) for each in outputs} == {kind}
        found = [leaves(each) for each in outputs]
        assert [each[1].item() for each in found] == [seen + k for k in range(4)]
        assert not any(leaf.requires_grad for each in found for leaf in each)
        assert all(torch.equal(each[0], other) for each, other in zip(found, expected, strict=True))
        if seen == 5:  # forward put the buffer back
            assert modules_of(runner)[1].seen == 4


def modules_of(runner: PipelineRunner) -> list[Any]:
    return [runner._stages[index].module for index in range(2)]


def test_what_else_an_output_has_is_the_same():
    outputs = runner_of(Record, one_f_one_b(2, 4)).forward(torch.randn(8, 4)).outputs
    assert [each.name for each in outputs] == ["record"] * 4


def test_a_mapping_of_which_there_is_no_copy_is_refused_by_name():
    runner = runner_of(lambda *parts: MappingProxyType(dict(zip("ab", parts, strict=True))), one_f_one_b(2, 4))
    words = "the output of the last stage is a mappingproxy, of which no copy .*; return a dict"
    with pytest.raises(ScheduleError, match=words):
        runner.forward(torch.randn(8, 4))
