"""A small Llama of transformers, whole and cut by FSDP2 or tensor parallel: what tests of exports bring."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

SIZES = {
    "hidden_size": 12,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 29,
}
TOKENS = torch.arange(10)[None] * 7 % 29


def llama(seed=0, tied=False):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=tied, attn_implementation="eager")).eval()


def logits(model):
    with torch.no_grad():
        return model(TOKENS).logits


def sharded(model, ranks):
    mesh = init_device_mesh("cpu", (ranks,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def tensor_parallel(model, ranks):
    mesh = init_device_mesh("cpu", (ranks,))
    for layer in model.model.layers:
        plan = {
            "mlp.up_proj": ColwiseParallel(),
            "mlp.gate_proj": ColwiseParallel(),
            "mlp.down_proj": RowwiseParallel(),
        }
        parallelize_module(layer, mesh, plan)
    return model


CUTS = {"plain": lambda model, ranks: model, "fsdp2": sharded, "tp": tensor_parallel}


def whole_of(model):
    """All values of a model that ranks hold together, by torch."""
    state = model.state_dict()
    return {key: (value.full_tensor() if hasattr(value, "full_tensor") else value) for key, value in state.items()}


def same(one, other):
    return one.keys() == other.keys() and all(
        one[key].dtype == other[key].dtype and torch.equal(one[key], other[key]) for key in one
    )
