"""Blocks that are compiled or checkpointed one by one: saved, loaded and exported as if nothing wrapped them."""

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from sixfold import dist_ckpt
from sixfold.dist_ckpt import hugging_face


def compiled(block):
    return torch.compile(block, backend="eager")


WRAPPED = {
    "plain": lambda block: block,
    "compiled": compiled,
    "checkpointed": checkpoint_wrapper,
    "compiled checkpointed": lambda block: compiled(checkpoint_wrapper(block)),
    "checkpointed compiled": lambda block: checkpoint_wrapper(compiled(block)),
}


class Block(nn.Module):
    """A block with buffers, and with children that are called as wrappers call theirs."""

    def __init__(self):
        super().__init__()
        self.norm, self.module = nn.BatchNorm1d(3), nn.Sequential(nn.Linear(3, 3))
        self.alone = nn.ModuleDict({"module": nn.Linear(2, 2)})


def model(kind, seed):
    """As torchtitan's apply_compile does it."""
    torch.manual_seed(seed)
    found = nn.ModuleDict({"layers": nn.ModuleDict({str(at): Block() for at in range(2)}), "head": nn.Linear(3, 1)})
    for name, block in [*found["layers"].named_children()]:
        found["layers"].register_module(name, WRAPPED[kind](block))
    return found


def expected():
    """What all are to hold: the state dict of a model that nothing wraps."""
    return model("plain", 0).state_dict()


def assert_loaded(found):
    for value, right in zip(found.state_dict().values(), expected().values(), strict=True):
        assert torch.equal(value, right)


@pytest.mark.parametrize("after", WRAPPED)
@pytest.mark.parametrize("before", WRAPPED)
def test_blocks_may_be_wrapped_at_the_save_or_at_the_load(before, after, tmp_path):
    dist_ckpt.save({"model": model(before, 0), "step": 3}, tmp_path / "c")
    assert dist_ckpt.load_plain_tensors(tmp_path / "c").keys() == {f"model.{name}" for name in expected()}
    other = model(after, 1)
    assert dist_ckpt.load({"model": other}, tmp_path / "c", strict="raise_all")["step"] == 3
    assert_loaded(other)


@pytest.mark.parametrize("after", ["plain", "compiled"])
@pytest.mark.parametrize("names", [get_model_state_dict, nn.Module.state_dict])
def test_a_folder_of_torch_dcp_loads_under_either_names(names, after, tmp_path):
    torch_dcp.save({"model": names(model("compiled", 0))}, checkpoint_id=tmp_path / "c", no_dist=True)
    other = model(after, 1)
    dist_ckpt.load({"model": other}, tmp_path / "c")
    assert_loaded(other)


@pytest.mark.parametrize("kind", WRAPPED)
def test_a_model_of_hugging_face_has_the_names_of_its_layers(kind, tmp_path):
    pytest.importorskip("safetensors", reason="needs the extra safetensors")
    other = model(kind, 1)
    hugging_face.export(model(kind, 0), tmp_path / "m")
    assert dist_ckpt.load_plain_tensors(tmp_path / "m").keys() == expected().keys()
    hugging_face.load(other, tmp_path / "m")
    assert_loaded(other)


def test_from_pretrained_reads_an_exported_model_with_compiled_layers(tmp_path):
    transformers = pytest.importorskip("transformers", reason="needs transformers, a peer that only tests use")
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, vocab_size=20
    )
    llama, ids = transformers.LlamaForCausalLM(config).eval(), torch.arange(8)[None]
    expected = llama(ids).logits
    for name, block in [*llama.model.layers.named_children()]:
        llama.model.layers.register_module(name, compiled(block))
    hugging_face.export(llama, tmp_path / "m", extras=[config])
    assert torch.equal(transformers.LlamaForCausalLM.from_pretrained(tmp_path / "m").eval()(ids).logits, expected)
