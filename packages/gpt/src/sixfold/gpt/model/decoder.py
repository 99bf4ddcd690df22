"""The GPT: a Llama-style decoder, whole or one pipeline stage of it.

    tokens --> embedding --> layers (Block) --> norm --> head --> losses      (this file)
               pre_process      any range       \\___ post_process ___/

Parameters carry canonical names with global layer numbers (``layers.3.attention.q.weight``), whatever stage holds them.
The model computes in the dtype of its weights and knows no sharding: Block is the unit that
sixfold.fsdp gathers. Over tensor-parallel ranks its modules are those of the rank's part: with sequence parallelism
hidden states between them are (b, s / tp, hidden), logits are (b, s, padded vocabulary / tp).
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sixfold.gpt.config.train_config import GPTConfig
from sixfold.gpt.errors import ConfigError
from sixfold.gpt.model.attention import Rows, plan_rows
from sixfold.gpt.model.dropout import (
    EMBEDDING,
    NONE,
    TokenKeys,
    after_attention,
    after_feed_forward,
    dropped,
    token_keys,
)
from sixfold.gpt.model.initial_weights import initializer
from sixfold.gpt.model.key_value_cache import KeyValueCache
from sixfold.gpt.model.latent_attention import LatentAttention
from sixfold.gpt.model.loss import PLAIN, token_losses
from sixfold.gpt.model.moe import MixtureOfExperts
from sixfold.gpt.model.norm import norm_of
from sixfold.gpt.model.projection_norm import ProjectionNorm
from sixfold.gpt.model.rope import rotate, score_factor
from sixfold.gpt.model.softcap import softcapped
from sixfold.gpt.parallel.axes import ALONE, Axes
from sixfold.gpt.parallel.tensor_parallel import check_length, columns, embedded, joined, whole_rows
from sixfold.gpt.parallel.weight_sharding import Cuts

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from sixfold.dist_ckpt import ShardedTensor
    from sixfold.gpt.parallel.sequence_parts import DocumentsHere

DEFAULT_SEED = 1234  # as train.seed


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; projections stay apart, as in the checkpoint.

    A tensor-parallel rank has neighbouring heads and the key heads that they read.
    """

    def __init__(self, config: GPTConfig, axes: Axes = ALONE, number: int = 0) -> None:
        super().__init__()
        self.head_dim, self.axes, self.slides = config.head_dim, axes, config.slides(number)
        self.number, self.scale = number, score_factor(config)
        queries = config.num_attention_heads // axes.tp.size * config.head_dim
        keys = config.num_query_groups // axes.tp.size * config.head_dim
        self.q = nn.Linear(config.hidden_size, queries, bias=config.qkv_bias, device="meta")
        self.k = nn.Linear(config.hidden_size, keys, bias=config.qkv_bias, device="meta")
        self.v = nn.Linear(config.hidden_size, keys, bias=config.qkv_bias, device="meta")
        self.out = nn.Linear(queries, config.hidden_size, bias=False, device="meta")
        self.normed = config.qk_norm_over if config.qk_norm else ""
        if self.normed == "head":
            self.q_norm, self.k_norm = norm_of(config, config.head_dim), norm_of(config, config.head_dim)
        elif self.normed:
            self.q_norm = ProjectionNorm(queries * axes.tp.size, config.norm_eps, axes.tp, device="meta")
            self.k_norm = ProjectionNorm(keys * axes.tp.size, config.norm_eps, axes.tp, device="meta")

    def forward(self, x: Tensor, rows: Rows) -> Tensor:
        """Hidden states as between blocks -> the same."""
        projected = columns(x, (self.q, self.k, self.v), self.axes, recomputed=rows.recompute != "none")
        if self.normed == "projection":
            projected = [self.q_norm(projected[0]), self.k_norm(projected[1]), projected[2]]
        q, k, v = (one.unflatten(-1, (-1, self.head_dim)) for one in projected)  # type: ignore[no-untyped-call]
        if self.normed == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        rows = rows.of(sliding=self.slides)
        q, k = rotate(q, rows.cos, rows.sin), rotate(k, rows.cos, rows.sin)
        if self.scale != 1:
            q = q * self.scale
        if rows.cache is not None:
            k, v = rows.cache.extend(self.number, k, v)
        return joined(self.out(rows.attend(q, k, v).flatten(2)), self.axes)


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)); with gelu in place of silu GeGLU.

    Args:
        width: of the whole of it, of which a tensor-parallel rank has its part; None is ``config.ffn_hidden_size``.
    """

    def __init__(self, config: GPTConfig, axes: Axes = ALONE, *, width: int | None = None) -> None:
        super().__init__()
        self.axes, self.gelu = axes, config.hidden_act != "silu"
        mine = (config.ffn_hidden_size if width is None else width) // axes.tp.size
        self.gate = nn.Linear(config.hidden_size, mine, bias=False, device="meta")
        self.up = nn.Linear(config.hidden_size, mine, bias=False, device="meta")
        self.down = nn.Linear(mine, config.hidden_size, bias=False, device="meta")

    def forward(self, x: Tensor, rows: Rows) -> Tensor:
        """Hidden states as between blocks -> the same."""
        gate, up = columns(x, (self.gate, self.up), self.axes, recomputed=rows.recompute == "full")
        gate = F.gelu(gate, approximate="tanh") if self.gelu else F.silu(gate)
        return joined(self.down(gate * up), self.axes)


class Block(nn.Module):
    """Layer ``number``; the unit that fsdp gathers and frees."""

    def __init__(self, config: GPTConfig, axes: Axes = ALONE, number: int = 0) -> None:
        super().__init__()
        self.number = number
        before, behind = config.norm_position != "post", config.norm_position != "pre"
        self.attention_norm = norm_of(config, config.hidden_size) if before else None
        attention = LatentAttention if config.kv_lora_rank else Attention
        self.attention: nn.Module = attention(config, axes, number)
        self.attention_post_norm = norm_of(config, config.hidden_size) if behind else None
        self.ffn_norm = norm_of(config, config.hidden_size) if before else None
        if config.has_experts(number):
            width = config.shared_ffn_hidden_size
            shared = FeedForward(config, axes, width=width) if width else None
            self.ffn: nn.Module = MixtureOfExperts(config, axes, number=number, shared=shared)
        else:
            self.ffn = FeedForward(config, axes)
        self.ffn_post_norm = norm_of(config, config.hidden_size) if behind else None

    def compile_layer(self, backend: str = "inductor") -> None:
        """Run the layer compiled from now on.

        The arithmetic inside alone: fsdp's hooks on the module stay outside, and layers share what was compiled.
        """
        self._layer = torch.compile(self._layer, backend=backend)  # type: ignore[method-assign]

    def forward(self, x: Tensor, rows: Rows) -> Tensor:
        """Hidden states (b, s, hidden), or (b, s / tp, hidden) with sequence parallelism -> the same."""
        out: Tensor = self._layer(x, rows)
        return out

    def _layer(self, x: Tensor, rows: Rows) -> Tensor:
        # Recomputed inside the layer, not around it: hooks on the layer see one forward. Inside what is compiled too:
        # around it backward meets another graph than forward, and torch refuses its tensors.
        if rows.recompute == "full" and torch.is_grad_enabled():
            return _again(self._parts, x, rows)
        return self._parts(x, rows)

    def _parts(self, x: Tensor, rows: Rows) -> Tensor:
        again = rows.recompute == "selective" and torch.is_grad_enabled()
        attended = _again(self._attend, x, rows) if again else self._attend(x, rows)
        x = x + self._with_dropout(attended, rows, after_attention)
        return x + self._with_dropout(self._feed(x, rows), rows, after_feed_forward)

    def _with_dropout(self, x: Tensor, rows: Rows, site_of: Callable[[int], int]) -> Tensor:
        """``x`` with dropout at a site of this layer, or as it is where nothing is dropped.

        Only then is the layer's number read: a program that reads it is compiled for each layer anew.
        """
        if rows.dropout is None:
            return x
        return dropped(x, rows.dropout.keys_BS, site_of(self.number), rows.dropout.hidden)

    def _attend(self, x: Tensor, rows: Rows) -> Tensor:
        attended = self.attention(x if self.attention_norm is None else self.attention_norm(x), rows)
        out: Tensor = attended if self.attention_post_norm is None else self.attention_post_norm(attended)
        return out

    def _feed(self, x: Tensor, rows: Rows) -> Tensor:
        fed = self.ffn(x if self.ffn_norm is None else self.ffn_norm(x), rows)
        out: Tensor = fed if self.ffn_post_norm is None else self.ffn_post_norm(fed)
        return out


class TiedHead(nn.Module):
    """The last stage's copy of the tied embedding; its forward is the head projection.

    A module of its own on both stages, so that fsdp can make it a unit with the same layout on both (seams of gpt).
    """

    def __init__(self, config: GPTConfig, axes: Axes = ALONE) -> None:
        super().__init__()
        rows = config.padded_vocab_size // axes.tp.size
        self.weight = nn.Parameter(torch.empty(rows, config.hidden_size, device="meta"))

    def forward(self, x: Tensor) -> Tensor:
        """(b, s, hidden) -> logits (b, s, padded vocabulary / tp)."""
        return F.linear(x, self.weight)


class GPTModel(nn.Module):
    """A decoder, or the part of it that a pipeline stage holds.

    Args:
        config: shape of the whole model.
        mesh: the run's device mesh; its axes ``tp``, ``cp``, ``ep`` and ``exchange`` are those that it has.
        axes: the same, for who has the groups already.
        pre_process: holds the embedding and takes tokens.
        post_process: holds the last norm and the head and gives logits or losses.
        vp_stage: number of this stage among those of its rank; kept as an attribute.
        layers: global numbers of the layers held; None is all of them.
        two_tables: the head has a copy of a tied embedding here too; nothing but a step keeps the two alike.
        device: ``"meta"`` leaves weights empty, to be filled by ``init.initializer``; else they are initialised with
            seed 1234, as ``initialize`` does.
    Raises:
        ConfigError: layers outside the model, or a size that tp or ep does not divide.
    """

    def __init__(
        self,
        config: GPTConfig,
        *,
        mesh: "DeviceMesh | None" = None,
        axes: Axes = ALONE,
        pre_process: bool = True,
        post_process: bool = True,
        vp_stage: int | None = None,
        layers: range | None = None,
        two_tables: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        held = range(config.num_layers) if layers is None else layers
        axes = axes if mesh is None else Axes.of(mesh)
        _check(config, axes, held)
        self.config, self.axes = config, axes
        self.pre_process, self.post_process, self.vp_stage = pre_process, post_process, vp_stage
        self.recompute = "none"  # train.recompute: "none", "selective" or "full"
        self.loss_terms = PLAIN  # train.z_loss, train.label_smoothing
        self.dropout = NONE  # train.hidden_dropout, train.embedding_dropout
        self.vocab_rows = config.padded_vocab_size // axes.tp.size  # of this rank
        if pre_process:
            self.embedding: nn.Module = nn.Embedding(self.vocab_rows, config.hidden_size, device="meta")
        self.layers = nn.ModuleDict({str(number): Block(config, axes, number) for number in held})
        if post_process:
            self.norm = norm_of(config, config.hidden_size)
            if not config.tie_embeddings:
                self.head = nn.Linear(config.hidden_size, self.vocab_rows, bias=False, device="meta")
            elif not pre_process:
                self.embedding = TiedHead(config, axes)
            elif two_tables:
                self.tied_head = TiedHead(config, axes)
        if torch.device(device).type != "meta":
            self.to_empty(device=device)
            self.initialize(DEFAULT_SEED)

    def forward(
        self,
        x: Tensor,
        *,
        position_ids: Tensor | None = None,
        cu_seqlens: "Tensor | DocumentsHere[Tensor] | None" = None,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
        row_numbers: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """Run the layers held.

        Args:
            x: int64 tokens (b, s) with ``pre_process``, else hidden states (b, s, hidden), of which a tensor-parallel
                rank has (b, s / tp, hidden) with sequence parallelism.
            position_ids: (b, s); None counts from 0 in each document.
            cu_seqlens: int32 document boundaries of the flattened micro-batch, 0 ... b*s with every multiple of s;
                None: a row is one document. A context-parallel rank has s = S / cp tokens of each row, and takes the
                boundaries of whole rows of S, or what ``documents_here`` has made of them on the host.
            labels: int64 (b, s), already moved: labels[:, t] is what follows token t.
            loss_mask: (b, s), 0 where a target does not count.
            row_numbers: int64 (b,): which rows of the run's order these are; read by dropout alone, in training.
            cache: keys and values of the tokens that were read before; ``x`` are the next ones, and are added to it.
        Returns:
            Hidden states as x without ``post_process``; logits (b, s, vocab_size) without ``labels``; else losses of
            each token in nats, float32 (b, s), 0 where masked. Logits and losses are whole on every tensor-parallel
            rank, and so are the gradients that it takes.
        """
        if self.pre_process:
            check_length(x.shape[1], self.axes)
            x = embedded(x, self.embedding, self.vocab_rows, self.axes)
            if self.config.scale_embeddings:  # as transformers: the root is rounded to the weights' dtype
                x = x * float(torch.tensor(math.sqrt(self.config.hidden_size), dtype=x.dtype))
        keys = self._token_keys(x, row_numbers)
        if self.pre_process and keys is not None:
            x = dropped(x, keys.keys_BS, EMBEDDING, self.dropout.embedding)
        if self.layers:
            rows = plan_rows(
                self.config,
                x,
                position_ids=position_ids,
                cu_seqlens=cu_seqlens,
                recompute=self.recompute,
                axes=self.axes,
                layers=map(int, self.layers),
                cache=cache,
            )
            rows = rows if keys is None else replace(rows, dropout=keys)
            read = x.shape[1]
            for layer in self.layers.values():
                x = layer(x, rows)
            if cache is not None:
                cache.length += read
        if not self.post_process:
            return x
        (logits,) = columns(self.norm(x), (self._project,), self.axes, once=True)
        if self.config.final_logit_softcapping:
            logits = softcapped(logits, self.config.final_logit_softcapping)
        if labels is None:
            return whole_rows(logits, self.axes.tp)[..., : self.config.vocab_size]
        return token_losses(logits, labels, loss_mask, self.config.vocab_size, self.axes.tp, self.loss_terms)

    def _token_keys(self, x: Tensor, row_numbers: Tensor | None) -> TokenKeys | None:
        if not (self.training and self.dropout.is_on):
            return None
        if row_numbers is None:
            raise ConfigError("a model with dropout trains on rows that have numbers; give forward its row_numbers")
        return token_keys(self.dropout, row_numbers, x, self.axes)

    @property
    def cuts(self) -> Cuts:
        """Which parts of canonical tensors the parameters are."""
        tp, ep = self.axes.tp, self.axes.ep
        return Cuts(tp_rank=tp.rank, tp=tp.size, ep_rank=ep.rank, ep=ep.size)

    def initialize(self, seed: int) -> None:
        """Fill all parameters held: a function of seed, canonical name and index, not of stage or order."""
        fill = initializer(self.config, seed, self.cuts)
        for name, module in self.named_modules():
            fill(name, module)

    def sharded_state_dict(self, prefix: str = "model.") -> "dict[str, ShardedTensor]":
        """Weights as sixfold.dist_ckpt takes them; the tensors are the live ones, a tied copy is a replica."""
        from sixfold.dist_ckpt import ShardedTensor

        copy = isinstance(getattr(self, "embedding", None), TiedHead)
        state: dict[str, Any] = {}
        for name, parameter in self.named_parameters():
            replica = (self.cuts.replica(name), int(copy and name == "embedding.weight"), 0)
            offsets = [(axis, part, parts) for axis, (part, parts) in sorted(self.cuts.of(name).items())]
            key = prefix + name
            state[key] = ShardedTensor.from_rank_offsets(key, parameter.detach(), *offsets, replica_id=replica)
        return state

    def _project(self, x: Tensor) -> Tensor:
        """(b, s, hidden) -> logits (b, s, padded vocabulary / tp)."""
        if not self.config.tie_embeddings:
            logits: Tensor = self.head(x)
        elif hasattr(self, "tied_head"):
            logits = self.tied_head(x)
        elif self.pre_process:
            logits = F.linear(x, self.embedding.weight)  # type: ignore[arg-type]
        else:
            logits = self.embedding(x)
        return logits


def _again(function: Any, x: Tensor, rows: Rows) -> Tensor:
    """``function(x, rows)``, inner activations computed again in backward. Dropout has no random state: dropout.py."""
    out: Tensor = checkpoint(function, x, rows, use_reentrant=False, preserve_rng_state=False)
    return out


def _check(config: GPTConfig, axes: Axes, held: range) -> None:
    dense = len(config.expert_layers) < config.num_layers
    for key, axis in (
        ("num_attention_heads", "tp"),
        ("num_query_groups", "tp"),
        *([("ffn_hidden_size", "tp")] if dense else ()),
        ("moe_ffn_hidden_size", "tp"),
        ("shared_ffn_hidden_size", "tp"),
        ("padded_vocab_size", "tp"),
        ("num_experts", "ep"),
    ):
        value, ranks = getattr(config, key), getattr(axes, axis).size
        if value % ranks:
            raise ConfigError(f"model.{key} is {value} and parallel.{axis} is {ranks}; {axis} divides it")
    if any(number not in range(config.num_layers) for number in held):
        raise ConfigError(
            f"layers are {held} and model.num_layers is {config.num_layers}; they lie in 0 ... {config.num_layers - 1}"
        )
