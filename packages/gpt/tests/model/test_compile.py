"""train.compile: the same losses, one graph for all layers, and what it needs."""

from dataclasses import replace

import pytest
import torch
from gpt_helpers import tiny_config
from model_helpers import small
from run_helpers import losses
from torch import nn

from sixfold.gpt import ConfigError, train
from sixfold.gpt.engine.rank_model import check_compiler
from sixfold.gpt.model import attention
from sixfold.gpt.model import decoder as model
from sixfold.gpt.parallel.axes import Axes, Axis


@pytest.fixture
def graphs(monkeypatch):
    """Layers compiled by a back end without generated code, which takes a minute on a CPU; the graphs it was given."""
    seen = []
    compiling = torch.compile

    def keep(graph, inputs):
        seen.append(graph)
        return graph.forward

    def compile_with(function, *, backend):
        assert backend == "inductor"
        return compiling(function, backend=keep)

    torch.compiler.reset()
    monkeypatch.setattr(model.torch, "compile", compile_with)
    yield seen
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("recompute", "schedule"), [("none", "one_f_one_b"), ("full", "one_f_one_b"), ("none", "zb_h1")]
)
@pytest.mark.slow
def test_a_compiled_run_has_the_losses_of_the_plain_one_and_layers_share_their_graphs(
    tmp_path, graphs, recompute, schedule
):
    options = ("train.steps=2", "data.document_mask=false")
    plain, compiled = (tiny_config(tmp_path, *options, f"train.compile={on}", run=on) for on in ("false", "true"))
    train(plain)
    assert not graphs
    parallel = replace(compiled.parallel, schedule=schedule)  # of split backwards, where it makes whole ones of them
    train(replace(compiled, train=replace(compiled.train, recompute=recompute), parallel=parallel))
    assert losses(compiled) == pytest.approx(losses(plain), rel=1e-6)
    assert len(graphs) == 1, "one for all of the four layers, the four microbatches and the two steps"


@pytest.mark.slow
def test_experts_stay_outside_of_compiled_parts(tmp_path, graphs):
    options = ("train.steps=2", "model.num_experts=4", "model.moe_ffn_hidden_size=16", "model.shared_ffn_hidden_size=8")
    plain, compiled = (tiny_config(tmp_path, *options, f"train.compile={on}", run=on) for on in ("false", "true"))
    train(plain)
    train(compiled)
    assert losses(compiled) == pytest.approx(losses(plain), rel=1e-6)
    assert graphs


@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.slow
def test_what_travels_between_context_parallel_ranks_stays_outside_of_compiled_parts(monkeypatch, graphs, recompute):
    def travels(k, v, axis):
        assert not torch.compiler.is_compiling()
        seen.append(k.shape)
        return torch.cat((k, k), 1), torch.cat((v, v), 1)

    seen = []
    monkeypatch.setattr(attention, "gathered_keys", travels)
    part = model.GPTModel(small(num_layers=1), axes=Axes(cp=Axis(1, 2, object())))
    part.recompute = recompute
    tokens = torch.arange(16).view(1, 16)
    found = []
    for compiled in (False, True):
        if compiled:
            part.layers["0"].compile_layer()
        part.zero_grad()
        losses = part(tokens, labels=tokens)
        losses.sum().backward()
        found.append((losses.detach(), part.layers["0"].attention.k.weight.grad))
    assert graphs
    assert set(seen) == {(1, 16, 2, 8)}
    for plain, other in zip(*found, strict=True):
        torch.testing.assert_close(plain, other, rtol=1e-6, atol=1e-6)


def test_without_a_cpp_compiler_the_configuration_is_refused(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match=r"train\.compile is true.*no-such-compiler is not in PATH; install one"):
        check_compiler(torch.device("cpu"))
    check_compiler(torch.device("cuda"))


@pytest.mark.parametrize("override", ["train.compile=true", "train.recompute=full", "train.precision=fp8"])
def test_keys_of_gptmodel_are_refused_beside_a_provider_that_would_not_read_them(tmp_path, override):
    config = tiny_config(tmp_path, override)
    with pytest.raises(ConfigError, match=r"which is of GPTModel and not of a model_provider"):
        train(config, model_provider=lambda pre_process, post_process, vp_stage: nn.Linear(1, 1))
