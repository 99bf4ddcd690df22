"""Unmodified transformers models: wrapped by one call, trained bit for bit, generated from, loaded from their files.

The oracle is the same model, plain. ranks/test_transformers_ranks.py has two ranks.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="needs transformers, of the extra 'test'")

from fsdp_helpers import same  # noqa: E402
from fsdp_transformers_helpers import MODELS, emulate, loss_of, make, tokens  # noqa: E402

from sixfold.fsdp import FsdpError, fully_shard, fully_shard_optimizer  # noqa: E402


def wrap(name, net, **options):
    model = fully_shard(net, fsdp_unit_modules=[MODELS[name][1]], **options)
    return model, fully_shard_optimizer(torch.optim.AdamW(net.parameters(), lr=1e-2), model)


def train(name, reentrant, **options):
    net = make(name, reentrant)
    model, optimizer = wrap(name, net, **options)
    for step in range(2):
        loss_of(net, step, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.slow
def test_a_model_trains_as_the_plain_one_with_and_without_its_own_activation_checkpointing(name):
    expected = emulate(name, ranks=1, steps=2)
    gathers = set()
    for reentrant in (None, True, False):
        model = train(name, reentrant)
        assert same(expected, model.full_state_dict()) == []
        gathers.add(model.report()["gathers"])
    assert len(gathers) == 1, f"a recomputed unit is gathered once for its backward and recompute: {gathers}"


def greedy(net_or_call, prompt):
    return net_or_call(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=4, do_sample=False)


@pytest.mark.parametrize("name", ["llama", "tied llama"])
def test_generate_gives_the_plain_models_tokens_by_itself_and_through_entry(name):
    plain, net = make(name).eval(), make(name).eval()
    model, _ = wrap(name, net)
    prompt = tokens(5, 0)
    expected = greedy(plain.generate, prompt)
    assert torch.equal(greedy(net.generate, prompt), expected)
    with torch.no_grad():
        assert torch.equal(greedy(model.entry(net, method="generate"), prompt), expected)
    with pytest.raises(FsdpError, match="LlamaForCausalLM has no method 'no_such_method'"):
        model.entry(net, method="no_such_method")


def test_a_step_after_generate_is_a_step_without_it():
    net = make("llama")
    model, optimizer = wrap("llama", net)
    for step in range(2):
        with torch.no_grad():
            greedy(model.entry(net, method="generate"), tokens(7, 0))
        loss_of(net, step, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert same(emulate("llama", ranks=1, steps=2), model.full_state_dict()) == []


@pytest.mark.parametrize("name", ["llama", "tied llama"])  # the file of the others has other names than the module
def test_a_model_on_the_meta_device_is_filled_from_the_file_that_save_pretrained_wrote(name, tmp_path):
    from safetensors import safe_open

    plain = make(name)
    plain.save_pretrained(tmp_path)
    with torch.device("meta"):
        net = make(name)

    def fill(_, module):
        net._init_weights(module)

    model, _ = wrap(name, net, init_fn=fill)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        model.load_full_state_dict((key, file.get_tensor(key)) for key in file.keys())  # noqa: SIM118  not a dict
    assert same(plain.state_dict(), model.full_state_dict()) == []
    assert torch.equal(loss_of(net, 0, 0), loss_of(plain, 0, 0))


@pytest.mark.slow
def test_compiled_decoder_layers_train_as_plain_ones():
    net = make("llama")
    for layer in net.model.layers:
        layer.forward = torch.compile(layer.forward, backend="eager")
    model, optimizer = wrap("llama", net)
    for step in range(2):
        loss_of(net, step, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert same(emulate("llama", ranks=1, steps=2), model.full_state_dict()) == []


@pytest.mark.slow
def test_the_example_learns_to_count_generates_what_it_learned_and_saves_what_from_pretrained_reads(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(sys, "argv", ["hugging_face_llama.py", str(tmp_path / "llama")])
    monkeypatch.delenv("RANK", raising=False)
    runpy.run_path(str(Path(__file__).parents[2] / "examples/hugging_face_llama.py"))
    said = capsys.readouterr().out.splitlines()
    given, expected = said[-2].removeprefix("generated ").split(" for ")
    assert given == expected
    assert said[-1] == f"saved in {tmp_path / 'llama'}, and read again it is the same: True"
