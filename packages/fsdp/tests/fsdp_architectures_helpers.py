"""Architectures of transformers, tiny and with random weights: how each is made, and what it is given.

third_party/test_architectures.py, ranks/test_architectures_ranks.py --> ARCHITECTURES, build (this file)

A row says the model's class, the sizes of its configuration and the kind of its input. Units are what transformers
itself keeps together (``_no_split_modules``), or the classes that the row names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Inputs = Callable[[torch.Generator], dict[str, Any]]


@dataclass(frozen=True)
class Architecture:
    """One row: ``model`` and ``config`` are names in transformers."""

    model: str
    config: str
    sizes: Mapping[str, Any]
    inputs: Inputs
    units: tuple[str, ...] = ()


def _ids(generator: torch.Generator, length: int = 7) -> Tensor:
    return torch.randint(3, 30, (2, length), generator=generator)


def text(generator: torch.Generator) -> dict[str, Any]:
    ids = _ids(generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def two_texts(generator: torch.Generator) -> dict[str, Any]:
    return {**text(generator), "decoder_input_ids": _ids(generator, 5)}


def bare_text(generator: torch.Generator) -> dict[str, Any]:
    return {"input_ids": _ids(generator)}


def image(size: int, channels: int = 3) -> Inputs:
    return lambda generator: {"pixel_values": torch.randn(2, channels, size, size, generator=generator)}


def image_and_text(generator: torch.Generator) -> dict[str, Any]:
    return {**image(16)(generator), **text(generator)}


def waves(generator: torch.Generator) -> dict[str, Any]:
    return {"input_values": torch.randn(2, 800, generator=generator)}


def spectra(generator: torch.Generator) -> dict[str, Any]:
    features = torch.randn(2, 8, 20, generator=generator)
    return {"input_features": features, "decoder_input_ids": _ids(generator, 5)}


def patches_of_sound(generator: torch.Generator) -> dict[str, Any]:
    return {"input_values": torch.randn(2, 32, 8, generator=generator)}


LM = {"vocab_size": 31, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4, "pad_token_id": 0}
FFN = {**LM, "intermediate_size": 24, "max_position_embeddings": 32}
GROUPED = {**FFN, "num_key_value_heads": 2}
HEAD_DIM = {**GROUPED, "head_dim": 4}
GPT = {"vocab_size": 31, "n_embd": 16, "n_layer": 3, "n_head": 4, "n_positions": 32, "n_ctx": 32}
ENDS = {"bos_token_id": 1, "eos_token_id": 2}
D_MODEL = {
    "vocab_size": 31, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_position_embeddings": 32,
    "pad_token_id": 0, "decoder_start_token_id": 2, "forced_eos_token_id": None,
}  # fmt: skip
T5 = {
    "vocab_size": 31, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4,
    "pad_token_id": 0, "decoder_start_token_id": 0,
}  # fmt: skip
VIT = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 24, "image_size": 16}
PATCHES = {**VIT, "patch_size": 8}
SOUND = {
    "vocab_size": 31, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 24,
    "conv_dim": (8, 8), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4, "mask_time_prob": 0.0, "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2}


def _causal(name: str, sizes: Mapping[str, Any], *units: str, config: str = "") -> Architecture:
    return Architecture(f"{name}ForCausalLM", config or f"{name}Config", sizes, text, units)


def _model(name: str, sizes: Mapping[str, Any], inputs: Inputs, *units: str, suffix: str = "Model") -> Architecture:
    return Architecture(f"{name}{suffix}", f"{name}Config", sizes, inputs, units)


ARCHITECTURES: dict[str, Architecture] = {
    # decoders
    "llama": _causal("Llama", GROUPED),
    "tied llama": _causal("Llama", {**GROUPED, "tie_word_embeddings": True}),
    "mistral": _causal("Mistral", {**GROUPED, "sliding_window": 4}),
    "qwen2": _causal("Qwen2", GROUPED),
    "qwen3": _causal("Qwen3", HEAD_DIM),
    "gemma": _causal("Gemma", HEAD_DIM),
    "gemma2": _causal("Gemma2", {**HEAD_DIM, "sliding_window": 4, "query_pre_attn_scalar": 4}),
    "phi": _causal("Phi", FFN),
    "phi3": _causal("Phi3", {**GROUPED, **ENDS}),
    "olmo2": _causal("Olmo2", GROUPED),
    "stablelm": _causal("StableLm", GROUPED),
    "starcoder2": _causal("Starcoder2", GROUPED),
    "cohere": _causal("Cohere", GROUPED),
    "gpt_neox": _causal("GPTNeoX", {**FFN, **ENDS}),
    "gptj": _causal("GPTJ", {**GPT, "rotary_dim": 2}),
    "gpt2": Architecture("GPT2LMHeadModel", "GPT2Config", GPT, text),
    "gpt_neo": _causal(
        "GPTNeo",
        {"vocab_size": 31, "hidden_size": 16, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 32,
         "attention_types": [[["global", "local"], 1]], "window_size": 4},
    ),
    "opt": _causal("OPT", {**LM, "ffn_dim": 24, "max_position_embeddings": 32, "word_embed_proj_dim": 16}),
    "bloom": _causal("Bloom", {"vocab_size": 31, "hidden_size": 16, "n_layer": 3, "n_head": 4, "pad_token_id": 0}),
    "falcon": _causal("Falcon", {**LM, "alibi": False}),
    # encoders
    "bert": _model("Bert", FFN, text, suffix="ForMaskedLM"),
    "roberta": _model("Roberta", {**FFN, "pad_token_id": 1}, text, suffix="ForMaskedLM"),
    "distilbert": _model(
        "DistilBert",
        {"vocab_size": 31, "dim": 16, "hidden_dim": 24, "n_layers": 3, "n_heads": 4, "max_position_embeddings": 32},
        text,
        "TransformerBlock",
        suffix="ForMaskedLM",
    ),
    "albert": _model("Albert", {**FFN, "embedding_size": 8}, text, "AlbertLayer", suffix="ForMaskedLM"),
    "electra": _model("Electra", {**FFN, "embedding_size": 8}, text, "ElectraLayer"),
    "deberta": _model(
        "DebertaV2",
        {**FFN, "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 4},
        text,
        "DebertaV2Layer",
    ),
    "esm": _model(
        "Esm",
        {**FFN, "pad_token_id": 1, "mask_token_id": 30, "position_embedding_type": "rotary"},
        text,
        "EsmLayer",
        suffix="ForMaskedLM",
    ),
    "mpnet": _model("MPNet", FFN, text, "MPNetLayer"),
    "fnet": _model("FNet", {**FFN, "tpu_short_seq_length": 7}, bare_text, "FNetLayer"),
    "modernbert": _model(
        "ModernBert",
        {**FFN, **ENDS, "cls_token_id": 1, "sep_token_id": 2, "global_attn_every_n_layers": 2, "local_attention": 4},
        text,
        "ModernBertEncoderLayer",
    ),
    # encoders and decoders
    "t5": _model("T5", T5, two_texts, "T5Block", suffix="ForConditionalGeneration"),
    "bart": _model("Bart", D_MODEL, two_texts, "BartEncoderLayer", "BartDecoderLayer"),
    "marian": _model("Marian", D_MODEL, two_texts, "MarianEncoderLayer", "MarianDecoderLayer", suffix="MTModel"),
    "pegasus": _model("Pegasus", D_MODEL, two_texts, "PegasusEncoderLayer", "PegasusDecoderLayer"),
    # vision
    "vit": _model("ViT", PATCHES, image(16), "ViTLayer"),
    "deit": _model("DeiT", PATCHES, image(16), "DeiTLayer"),
    "beit": _model("Beit", PATCHES, image(16), "BeitLayer"),
    "dinov2": _model("Dinov2", {**PATCHES, "mlp_ratio": 2}, image(16), "Dinov2Layer"),
    "swin": _model(
        "Swin",
        {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1, 2], "num_heads": [2, 2], "window_size": 2},
        image(16),
        "SwinLayer",
    ),
    "convnext": _model(
        "ConvNext", {"hidden_sizes": [8, 8, 16], "depths": [1, 1, 2], "num_stages": 3}, image(32), "ConvNextLayer"
    ),
    "resnet": _model(
        "ResNet",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2], "layer_type": "basic"},
        image(32),
        "ResNetBasicLayer",
    ),
    "segformer": _model(
        "Segformer",
        {"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 16],
         "patch_sizes": [3, 3], "strides": [2, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2]},
        image(16),
        "SegformerLayer",
    ),
    "clip": Architecture(
        "CLIPModel",
        "CLIPConfig",
        {"text_config": {**FFN, **ENDS}, "vision_config": PATCHES, "projection_dim": 8},
        image_and_text,
        ("CLIPEncoderLayer",),
    ),
    # sound
    "wav2vec2": _model("Wav2Vec2", SOUND, waves, "Wav2Vec2EncoderLayer"),
    "hubert": _model("Hubert", SOUND, waves, "HubertEncoderLayer"),
    "whisper": _model(
        "Whisper",
        {**D_MODEL, "num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 16, **ENDS},
        spectra,
        "WhisperEncoderLayer",
        "WhisperDecoderLayer",
    ),
    "audio spectrogram": _model(
        "AST",
        {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 24, "patch_size": 4,
         "frequency_stride": 4, "time_stride": 4, "max_length": 32, "num_mel_bins": 8},
        patches_of_sound,
        "ASTLayer",
    ),
    # state spaces
    "mamba": _causal("Mamba", {"vocab_size": 31, "hidden_size": 16, "num_hidden_layers": 3, "state_size": 4}),
    "mamba2": _causal(
        "Mamba2",
        {"vocab_size": 31, "hidden_size": 16, "num_hidden_layers": 3, "state_size": 4, "num_heads": 8, "head_dim": 4,
         "n_groups": 2, "chunk_size": 4},
    ),
    "rwkv": _causal("Rwkv", {"vocab_size": 31, "hidden_size": 16, "num_hidden_layers": 3, "attention_hidden_size": 16}),
    # mixtures of experts
    "mixtral": _causal("Mixtral", {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2 moe": _causal(
        "Qwen2Moe", {**EXPERTS, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 12}
    ),
    "olmoe": _causal("Olmoe", EXPERTS),
    "granite moe": _causal("GraniteMoe", {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "switch": _model(
        "SwitchTransformers",
        {**T5, "num_experts": 4, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
        two_texts,
        "SwitchTransformersBlock",
    ),
    # latents
    "perceiver": _model(
        "Perceiver",
        {"vocab_size": 31, "num_latents": 160, "d_latents": 8, "d_model": 8, "num_blocks": 1,
         "num_self_attends_per_block": 2, "num_self_attention_heads": 2, "num_cross_attention_heads": 2,
         "max_position_embeddings": 7},
        text,
        "PerceiverLayer",
        suffix="ForMaskedLM",
    ),
}  # fmt: skip


def build(name: str) -> tuple[nn.Module, list[str]]:
    """The model in training mode, and the classes of its units."""
    import transformers

    row = ARCHITECTURES[name]
    torch.manual_seed(0)
    net = getattr(transformers, row.model)(getattr(transformers, row.config)(**row.sizes)).train()
    here = {type(part).__name__ for part in net.modules()}
    chosen = row.units or [one for one in (net._no_split_modules or []) if one in here]
    assert chosen, f"{name}: no units"
    return net, sorted(chosen)


def inputs(name: str, step: int, rank: int) -> dict[str, Any]:
    """What ``rank`` trains on in ``step``."""
    return ARCHITECTURES[name].inputs(torch.Generator().manual_seed(100 * step + rank))


def loss_of(output: Any) -> Tensor:
    """A number that every floating output moves: what a user's own head would do."""
    from torch.utils import _pytree as pytree

    value = torch.zeros(())
    leaves = output.to_tuple() if hasattr(output, "to_tuple") else output
    for at, leaf in enumerate(pytree.tree_leaves(leaves)):
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.requires_grad:
            value = value + (leaf.float() * (1 + at % 3)).square().mean()
    return value


# ---- ways in which people train them

WAYS = ("whole", "lora", "frozen", "tap", "hidden states", "inner gradient")


def refused_by_peft(name: str) -> bool:
    """It has no layer that peft adapts when it is told "all-linear", or none that may be adapted."""
    return name in ("resnet", "mamba", "mamba2")


def prepare(name: str, way: str) -> tuple[nn.Module, list[str]]:
    """The model as ``way`` trains it: with adapters of peft, or with all but its last unit and what follows frozen."""
    net, units = build(name)
    if way == "lora":
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(5)
        net = get_peft_model(net, LoraConfig(r=2, lora_alpha=4, target_modules="all-linear", init_lora_weights=False))
    if way == "frozen":
        blocks = blocks_of(net, units)
        for parameter in net.parameters():
            parameter.requires_grad = False
        for parameter in blocks[-1].parameters():
            parameter.requires_grad = True
    return net, units


def blocks_of(net: nn.Module, units: list[str]) -> list[nn.Module]:
    """Modules that are units, in their order."""
    return [part for part in net.modules() if type(part).__name__ in units]


def tapped(net: nn.Module, units: list[str]) -> nn.Module:
    """A layer with weights deep inside a unit that is not the last: its output is the feature."""
    blocks = blocks_of(net, units)
    inside = [
        part
        for name, part in blocks[len(blocks) // 2 - 1].named_modules()
        if any(True for _ in part.parameters(recurse=False)) and "expert" not in name  # few tokens reach an expert
    ]
    return inside[len(inside) // 2]


def losses_of(net: nn.Module, call: Any, way: str, units: list[str], given: dict[str, Any], seed: int) -> list[Tensor]:
    """Forward and backward as ``way`` does; what was computed on the way, to compare."""
    torch.manual_seed(seed)
    if way == "hidden states":
        given = {**given, "output_hidden_states": True}
    if way not in ("tap", "inner gradient"):
        loss = loss_of(call(**given))
        loss.backward()
        return [loss.detach()]
    features: list[Tensor] = []

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        features.append(output if isinstance(output, Tensor) else output[0])

    handle = tapped(net, units).register_forward_hook(keep)
    try:
        loss = loss_of(call(**given))
    finally:
        handle.remove()
    if way == "tap":  # a perceptual loss: the model's end has no part in it
        loss = features[0].square().mean()
        loss.backward()
        return [loss.detach()]
    (inner,) = torch.autograd.grad(loss, features[0], retain_graph=True)
    loss.backward()
    return [loss.detach(), inner]


DROPS_LAYERS = ("wav2vec2", "hubert")  # at random (LayerDrop), from torch's own generator: what ranks must draw alike


def seed_of(name: str, step: int, rank: int) -> int:
    """For dropout of ``rank``; where layers are dropped, the same on all ranks."""
    return 1000 * step + (0 if name in DROPS_LAYERS else rank)


def plainly(name: str, way: str, *, rank: int, ranks: int, steps: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    """What plain torch computes: gradients of ``ranks`` copies added from rank 0 on and divided once.

    Returns:
        what rank 0 saw in each step, the weights in the end, and the buffers of ``rank``: each rank's running
        statistics are of its own batches.
    """
    copies = [prepare(name, way) for _ in range(ranks)]
    first, units = copies[0]
    optimizer = torch.optim.AdamW([p for p in first.parameters() if p.requires_grad], lr=1e-2)
    seen: list[Tensor] = []
    for step in range(steps):
        for one, (net, _) in enumerate(copies):
            found = losses_of(net, net, way, units, inputs(name, step, one), seed_of(name, step, one))
            seen += found if not one else []
        for mine, *others in zip(*(list(net.parameters()) for net, _ in copies), strict=True):
            gradients = [one.grad for one in (mine, *others) if one.grad is not None]
            if gradients:
                total = torch.zeros_like(mine)
                for gradient in gradients:
                    total += gradient
                mine.grad = total / ranks if ranks > 1 else total
        optimizer.step()
        for net, _ in copies:
            net.zero_grad()
            with torch.no_grad():
                for theirs, own in zip(net.parameters(), first.parameters(), strict=True):
                    theirs.copy_(own)
    mine = copies[rank][0]
    own = {key for key, _ in mine.named_buffers()}
    kept = {key: value for key, value in mine.state_dict().items() if key in own}
    return seen, {key: value.detach().clone() for key, value in {**first.state_dict(), **kept}.items()}


def sharded(name: str, way: str, *, group: Any, rank: int, steps: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The same by sixfold, with its default options."""
    from sixfold.fsdp import fully_shard, fully_shard_optimizer

    net, units = prepare(name, way)
    model = fully_shard(net, process_group=group, fsdp_unit_modules=units)
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2)
    optimizer = fully_shard_optimizer(optimizer, model)
    seen: list[Tensor] = []
    for step in range(steps):
        seen += losses_of(net, net, way, units, inputs(name, step, rank), seed_of(name, step, rank))
        optimizer.step()
        optimizer.zero_grad()
    return seen, model.full_state_dict()


def difference(name: str, way: str, *, group: Any = None, rank: int = 0, ranks: int = 1, steps: int = 3) -> str:
    """Nothing where every bit agrees, "refused: ..." where sixfold says that it cannot, else what differs."""
    from sixfold.fsdp import FsdpError

    seen, weights = plainly(name, way, rank=rank, ranks=ranks, steps=steps)
    try:
        own_seen, own_weights = sharded(name, way, group=group, rank=rank, steps=steps)
    except FsdpError as error:
        return f"refused: {error}"
    wrong = [f"loss {at}" for at, (a, b) in enumerate(zip(seen, own_seen, strict=True)) if not rank and not _same(a, b)]
    wrong += [key for key in weights if key not in own_weights or not _same(weights[key], own_weights[key])]
    return ", ".join(wrong)


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)) and torch.equal(a.isnan(), b.isnan())
