"""The tensors of a layer: their names, and how many elements of each a rank has before fsdp shards them.

    [model], [lora], layer, tp, ep --> layer_tensors (this file) --> plan's sizes
    [model] --> parameter_names (this file) --> frozen.py: patterns over canonical names

Integers and texts: no torch. A test compares both with the modules of GPTModel.
"""

from sixfold.gpt.config.lora import ADAPTER_ENDS, LoraConfig
from sixfold.gpt.config.model_config import GPTConfig

QK_NORMS = ("q_norm", "k_norm")
_OF_THE_LAYER = ("attention_norm", "attention_post_norm", "ffn_norm", "ffn_post_norm")
_OF_THE_SECOND_PART = ("router", "experts", "shared", "shared_gate", "gate", "up", "down")


def layer_tensors(
    model: GPTConfig, layer: int, tp: int = 1, ep: int = 1, lora: LoraConfig | None = None
) -> dict[str, int]:
    """Elements of each tensor of a layer on one rank, before fsdp shards them, in the order of the module."""
    hidden = model.hidden_size
    queries = model.num_attention_heads * model.head_dim // tp
    keys = model.num_query_groups * model.head_dim // tp
    before, behind = model.norm_position != "post", model.norm_position != "pre"
    sizes = {"attention_norm": hidden} if before else {}
    if model.kv_lora_rank:
        sizes |= _latent_tensors(model, tp)
    else:
        for name, width in (("q", queries), ("k", keys), ("v", keys)):
            sizes[name] = hidden * width
            if model.qkv_bias:
                sizes[f"{name}.bias"] = width
        sizes["out"] = queries * hidden
    if model.qk_norm:
        whole = model.qk_norm_over == "projection"
        sizes |= {"q_norm": queries * tp, "k_norm": keys * tp} if whole else dict.fromkeys(QK_NORMS, model.head_dim)
    sizes |= {"attention_post_norm": hidden} if behind else {}
    sizes |= {"ffn_norm": hidden} if before else {}
    sizes |= _second_part(model, layer, tp, ep) | ({"ffn_post_norm": hidden} if behind else {})
    return sizes if lora is None or not lora.rank else _with_adapters(sizes, model, lora, tp)


def _with_adapters(sizes: dict[str, int], model: GPTConfig, lora: LoraConfig, tp: int) -> dict[str, int]:
    """``sizes`` with A and B of each target, behind its weight and bias as in the module."""
    queries, keys = model.num_attention_heads * model.head_dim // tp, model.num_query_groups * model.head_dim // tp
    hidden, inner = model.hidden_size, model.ffn_hidden_size // tp
    widths = {  # inputs and outputs of the linear: A is (rank, inputs), B (outputs, rank)
        "q": (hidden, queries), "k": (hidden, keys), "v": (hidden, keys), "out": (queries, hidden),
        "gate": (hidden, inner), "up": (hidden, inner), "down": (inner, hidden),
    }  # fmt: skip
    found: dict[str, int] = {}
    for name, size in sizes.items():
        found[name] = size
        target = name.removesuffix(".bias")
        is_last = name != target or f"{name}.bias" not in sizes
        if target in lora.targets and is_last:
            ends = zip(ADAPTER_ENDS, widths[target], strict=True)
            found |= {f"{target}{end}": lora.rank * width for end, width in ends}
    return found


def _latent_tensors(model: GPTConfig, tp: int) -> dict[str, int]:
    """Of latent attention."""
    hidden, heads, of_q, of_kv = (
        model.hidden_size,
        model.num_attention_heads // tp,
        model.q_lora_rank,
        model.kv_lora_rank,
    )
    sizes = {"q": hidden * heads * model.head_dim}
    if of_q:
        sizes = {"q_a": hidden * of_q, "q_a_norm": of_q, "q_b": of_q * heads * model.head_dim}
    sizes |= {"kv_a": hidden * (of_kv + model.qk_rope_head_dim), "kv_a_norm": of_kv}
    sizes["kv_b"] = of_kv * heads * (model.qk_nope_head_dim + model.v_head_dim)
    return sizes | {"out": heads * model.v_head_dim * hidden}


def _second_part(model: GPTConfig, layer: int, tp: int, ep: int) -> dict[str, int]:
    """Of the feed-forward part."""
    hidden, sizes = model.hidden_size, dict[str, int]()
    if not model.has_experts(layer):
        return dict.fromkeys(("gate", "up", "down"), hidden * model.ffn_hidden_size // tp)
    each = model.num_experts // ep * hidden * model.moe_ffn_hidden_size // tp
    sizes["router"] = model.num_experts * hidden
    sizes |= {"router.bias": model.num_experts} if model.expert_bias else {}
    sizes |= dict.fromkeys(("experts.gate", "experts.up", "experts.down"), each)
    if model.shared_ffn_hidden_size:
        shared = hidden * model.shared_ffn_hidden_size // tp
        sizes |= dict.fromkeys(("shared.gate", "shared.up", "shared.down"), shared)
        if model.shared_expert_gate:
            sizes["shared_gate"] = hidden
    return sizes


def full_name(layer: int, short: str) -> str:
    """``q`` of layer 3 -> ``layers.3.attention.q.weight``; ``short`` as ``layer_tensors`` has it."""
    named = short if short.endswith((".bias", *ADAPTER_ENDS)) else f"{short}.weight"
    if short in _OF_THE_LAYER:
        return f"layers.{layer}.{named}"
    part = "ffn" if short.partition(".")[0] in _OF_THE_SECOND_PART else "attention"
    return f"layers.{layer}.{part}.{named}"


def parameter_names(model: GPTConfig) -> list[str]:
    """Canonical names of all parameters of the model; a tied head is the embedding."""
    layers = [full_name(layer, short) for layer in range(model.num_layers) for short in layer_tensors(model, layer)]
    return ["embedding.weight", *layers, "norm.weight", *([] if model.tie_embeddings else ["head.weight"])]
