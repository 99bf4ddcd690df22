"""[model]: the shape of the network, and how many weights and operations that is.

    [model] of the TOML --> GPTConfig (this file) --> train_config.py --> decoder.py, moe.py, tensor_sizes.py, config.py

Numbers only: no torch.
"""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from sixfold.gpt.config.rope_scaling import refuse_scaling
from sixfold.gpt.config.table import Count, Positive, Rate, Size, Table, nearest_divisor
from sixfold.gpt.errors import ConfigError

EXPERT_KEYS = (
    "experts_per_token", "router_aux_loss", "moe_ffn_hidden_size", "shared_ffn_hidden_size", "shared_expert_gate",
    "norm_topk_prob", "dense_layers", "scoring_func", "n_group", "topk_group", "routed_scaling_factor", "expert_bias",
    "expert_bias_update_rate",
)  # fmt: skip
# Keys that an import writes where they say something.
IDLE_AT_DEFAULT = (
    "sliding_window", "layer_types", "rope_local_base_freq", "qk_norm_over", "norm_position", "zero_centered_norm",
    "hidden_act", "scale_embeddings", "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping",
    "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "rope_interleave",
    "scoring_func", "n_group", "topk_group", "routed_scaling_factor", "expert_bias", "expert_bias_update_rate",
)  # fmt: skip
_LATENT_KEYS = ("q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "rope_interleave")
LayerType = Literal["full_attention", "sliding_attention"]


@dataclass(frozen=True, kw_only=True)
class GPTConfig(Table):
    """[model]: the shape of the network.

    A 0 in ``num_query_groups``, ``head_dim`` or, with experts, ``moe_ffn_hidden_size`` is replaced when made.
    """

    TABLE: ClassVar[str] = "model"
    num_layers: Positive
    hidden_size: Positive
    num_attention_heads: Positive
    num_query_groups: Count = 0  # = heads
    head_dim: Count = 0  # = hidden / heads
    ffn_hidden_size: Positive
    vocab_size: Positive
    vocab_multiple: Positive = 128  # independent of the layout, so that checkpoint shapes are too
    rope_theta: Rate = 10000.0
    rope_scaling: dict[str, float | str | bool] = field(default_factory=dict)
    norm_eps: Rate = 1e-5
    tie_embeddings: bool = True
    qk_norm: bool = False
    qkv_bias: bool = False
    init_std: Size = 0.02
    sliding_window: Count = 0  # keys that a query of a sliding layer sees, its own among them; 0 = all
    layer_types: tuple[LayerType, ...] = ()  # of each layer; () = all slide, where there is a window
    rope_local_base_freq: Size = 0.0  # rope_theta of sliding layers, then without rope_scaling; 0 = as of all layers
    qk_norm_over: Literal["head", "projection"] = "head"  # what qk_norm norms: each head, or all of them together
    norm_position: Literal["pre", "post", "both"] = "pre"  # norms before attention and feed-forward part, or behind
    zero_centered_norm: bool = False  # norms multiply by 1 + weight, which begins at 0
    hidden_act: Literal["silu", "gelu_pytorch_tanh"] = "silu"  # of the gate
    scale_embeddings: bool = False  # the embedding's rows times the root of hidden_size
    query_pre_attn_scalar: Size = 0.0  # scores are divided by its root; 0 = head_dim
    attn_logit_softcapping: Size = 0.0  # scores of attention become cap * tanh(score / cap); 0 = as they are
    final_logit_softcapping: Size = 0.0  # the same of logits
    q_lora_rank: Count = 0  # of latent attention: width of the latent that queries come from; 0 = of hidden states
    kv_lora_rank: Count = 0  # width of the latent that keys and values come from; 0 = no latent attention
    qk_nope_head_dim: Count = 0  # of a head of queries and keys: what is not rotated
    qk_rope_head_dim: Count = 0  # and what is; all heads share this part of a key
    v_head_dim: Count = 0  # of a head of values
    rope_interleave: bool = False  # rotated pairs are neighbours, as DeepSeek's files have them
    num_experts: Count = 0
    experts_per_token: Positive = 2
    router_aux_loss: Size = 0.01  # of shares of (token, choice) pairs that sum to 1, as Megatron-Core's
    moe_ffn_hidden_size: Count = 0  # of an expert; = ffn_hidden_size
    shared_ffn_hidden_size: Count = 0  # of the expert that every token passes; 0 = there is none
    shared_expert_gate: bool = False  # what it gives is multiplied by sigmoid(gate(token)), as in Qwen2-MoE
    norm_topk_prob: bool = True  # the weights of a token's experts sum to 1
    dense_layers: Count = 0  # the first so many layers have no experts (DeepSeek's first_k_dense_replace)
    scoring_func: Literal["softmax", "sigmoid"] = "softmax"  # of the router
    n_group: Positive = 1  # groups of experts, of which a token's experts come from the best topk_group
    topk_group: Positive = 1  # of a token: the groups with the largest sum of two scores
    routed_scaling_factor: Rate = 1.0  # of what a token's experts give
    expert_bias: bool = False  # added to scores where experts are chosen; it rises for those that get few tokens
    expert_bias_update_rate: Size = 0.001  # by so much after each step

    def check(self) -> None:
        heads = self.num_attention_heads
        object.__setattr__(self, "num_query_groups", self.num_query_groups or heads)
        if heads % self.num_query_groups:
            near = nearest_divisor(heads, self.num_query_groups)
            raise ConfigError(
                f"model.num_query_groups is {self.num_query_groups} and model.num_attention_heads {heads}; "
                f"groups divide heads: {near} works"
            )
        self._check_latents()
        if not self.head_dim:
            if self.hidden_size % heads:
                near = max(1, round(self.hidden_size / heads)) * heads
                raise ConfigError(
                    f"model.hidden_size is {self.hidden_size} and model.num_attention_heads {heads}; without "
                    f"model.head_dim heads divide the hidden size: {near} works"
                )
            object.__setattr__(self, "head_dim", self.hidden_size // heads)
        if self.head_dim % 2:
            raise ConfigError(
                f"model.head_dim is {self.head_dim}; rotary positions need it even: {self.head_dim + 1} works"
            )
        if self.rope_scaling:
            refuse_scaling(self.rope_scaling)
        self._check_layer_types()
        if self.num_experts:
            self._check_experts()
        else:
            self._refuse_keys_of_experts()

    def _check_latents(self) -> None:
        if not self.kv_lora_rank:
            for key in _LATENT_KEYS:
                if getattr(self, key):
                    raise ConfigError(
                        f"model.{key} is {str(getattr(self, key)).lower()} and model.kv_lora_rank 0, without which "
                        f"nothing reads it; leave it out, or set model.kv_lora_rank"
                    )
            return
        for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
            if not getattr(self, key):
                least = 2 if key == "qk_rope_head_dim" else 1  # an even one
                raise ConfigError(f"model.{key} is 0 and model.kv_lora_rank {self.kv_lora_rank}; it is >= {least}")
        width = self.qk_nope_head_dim + self.qk_rope_head_dim
        wanted = {"head_dim": (0, width), "num_query_groups": (self.num_attention_heads,), "qk_norm": (False,)}
        for key, values in (wanted | {"qkv_bias": (False,)}).items():
            if getattr(self, key) not in values:
                raise ConfigError(
                    f"model.{key} is {str(getattr(self, key)).lower()} and model.kv_lora_rank {self.kv_lora_rank}; "
                    f"latent attention has {str(values[-1]).lower()} there: leave model.{key} out"
                )
        if self.qk_rope_head_dim % 2 or self.v_head_dim > width:
            raise ConfigError(
                f"model.qk_rope_head_dim is {self.qk_rope_head_dim} and model.v_head_dim {self.v_head_dim}; the first "
                f"is even, the second at most qk_nope_head_dim + qk_rope_head_dim = {width}"
            )
        if width % 2:
            raise ConfigError(
                f"model.qk_nope_head_dim is {self.qk_nope_head_dim} and model.qk_rope_head_dim "
                f"{self.qk_rope_head_dim}, together the width of a head, which is even: model.qk_nope_head_dim = "
                f"{self.qk_nope_head_dim + 1} works"
            )
        object.__setattr__(self, "head_dim", width)

    def _check_routing(self) -> None:
        each = self.num_experts // self.n_group
        if self.num_experts % self.n_group or self.topk_group > self.n_group or (self.n_group > 1 and each < 2):
            raise ConfigError(
                f"model.n_group is {self.n_group}, model.topk_group {self.topk_group} and model.num_experts "
                f"{self.num_experts}; groups divide the experts, have two or more, and at most all of them are taken: "
                f"model.n_group = 1 with model.topk_group = 1 works"
            )
        if self.experts_per_token > self.topk_group * each:
            raise ConfigError(
                f"model.experts_per_token is {self.experts_per_token} and model.topk_group {self.topk_group} with "
                f"{each} experts in a group; a token's experts come from these groups: model.topk_group = "
                f"{-(-self.experts_per_token // each)} works"
            )
        if self.scoring_func == "sigmoid" and self.router_aux_loss:
            raise ConfigError(
                f"model.scoring_func is 'sigmoid' and model.router_aux_loss {self.router_aux_loss}, a loss of shares "
                f"that sum to 1; model.router_aux_loss = 0 works, and model.expert_bias balances without a loss"
            )

    def _check_experts(self) -> None:
        object.__setattr__(self, "moe_ffn_hidden_size", self.moe_ffn_hidden_size or self.ffn_hidden_size)
        if self.experts_per_token > self.num_experts:
            raise ConfigError(
                f"model.experts_per_token is {self.experts_per_token} and model.num_experts {self.num_experts}; a "
                f"token goes to that many different experts: model.experts_per_token = {self.num_experts} works"
            )
        self._check_routing()
        if self.hidden_act != "silu":
            raise ConfigError(
                f"model.hidden_act is {self.hidden_act!r} and model.num_experts {self.num_experts}; experts have silu: "
                f'model.hidden_act = "silu" works, or model.num_experts = 0'
            )
        if self.dense_layers >= self.num_layers:
            raise ConfigError(
                f"model.dense_layers is {self.dense_layers} and model.num_layers {self.num_layers}, so no layer has "
                f"experts: model.dense_layers = {self.num_layers - 1} works, or model.num_experts = 0"
            )
        if self.shared_expert_gate and not self.shared_ffn_hidden_size:
            raise ConfigError(
                "model.shared_expert_gate is true and model.shared_ffn_hidden_size 0, so there is no shared expert; "
                "leave the first out, or give the second a size"
            )

    def _refuse_keys_of_experts(self) -> None:
        for key in EXPERT_KEYS:
            value, idle = getattr(self, key), getattr(type(self), key)
            if value != idle:
                raise ConfigError(
                    f"model.{key} is {str(value).lower()} and model.num_experts 0, without which nothing reads it; "
                    f"leave it out, or set model.num_experts"
                )

    def _check_layer_types(self) -> None:
        kinds, window = self.layer_types, self.sliding_window
        if kinds and len(kinds) != self.num_layers:
            raise ConfigError(
                f"model.layer_types has {len(kinds)} entries and model.num_layers is {self.num_layers}; it has one "
                f"for each layer, or none"
            )
        if kinds and ("sliding_attention" in kinds) != (window > 0):
            raise ConfigError(
                f"model.sliding_window is {window} and model.layer_types {sorted(set(kinds))}; a window goes with "
                f'layers of "sliding_attention", and these with a window: leave out both, or give both'
            )
        if self.rope_local_base_freq and not window:
            raise ConfigError(
                f"model.rope_local_base_freq is {self.rope_local_base_freq} and model.sliding_window 0, so no layer "
                f"reads it; leave it out, or set model.sliding_window"
            )
        if self.qk_norm_over != "head" and not self.qk_norm:
            raise ConfigError(
                f"model.qk_norm_over is {self.qk_norm_over!r} and model.qk_norm false, so nothing is normed; leave the "
                f"first out, or set model.qk_norm = true"
            )
        if self.qk_norm_over != "head" and self.zero_centered_norm:
            raise ConfigError(
                f"model.qk_norm_over is {self.qk_norm_over!r} and model.zero_centered_norm true; norms over all heads "
                f'multiply by their weight alone: model.qk_norm_over = "head" works'
            )

    @property
    def padded_vocab_size(self) -> int:
        """``vocab_size`` rounded up to a multiple of ``vocab_multiple``: rows of the embedding and of the head."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    def has_experts(self, layer: int) -> bool:
        """Whether the feed-forward part of ``layer`` (its global number) is a mixture of experts."""
        return self.num_experts > 0 and layer >= self.dense_layers

    def slides(self, layer: int) -> bool:
        """Whether queries of ``layer`` see the last ``sliding_window`` keys alone."""
        return self.sliding_window > 0 and (not self.layer_types or self.layer_types[layer] == "sliding_attention")

    def seen_keys(self, layer: int, seq_length: int) -> int:
        """The most keys that a query of ``layer`` sees in a row of ``seq_length``."""
        return min(seq_length, self.sliding_window) if self.slides(layer) else seq_length

    @property
    def expert_layers(self) -> range:
        """Global numbers of the layers with experts."""
        return range(self.dense_layers, self.num_layers) if self.num_experts else range(0)

    @property
    def rotated(self) -> int:
        """Elements of a head that turn with its position."""
        return self.qk_rope_head_dim or self.head_dim

    @property
    def attention_matmul_parameters(self) -> int:
        """Weights of one layer's attention that multiply activations."""
        if self.kv_lora_rank:
            heads, of_q = self.num_attention_heads, self.q_lora_rank
            q = of_q * (self.hidden_size + heads * self.head_dim) if of_q else self.hidden_size * heads * self.head_dim
            kv_a = self.hidden_size * (self.kv_lora_rank + self.qk_rope_head_dim)
            kv_b = self.kv_lora_rank * heads * (self.qk_nope_head_dim + self.v_head_dim)
            return q + kv_a + kv_b + heads * self.v_head_dim * self.hidden_size
        queries, keys = self.num_attention_heads * self.head_dim, self.num_query_groups * self.head_dim
        return self.hidden_size * (2 * queries + 2 * keys)

    @property
    def expert_parameters(self) -> int:
        """Weights of one expert: gate, up, down."""
        return 3 * self.hidden_size * self.moe_ffn_hidden_size

    @property
    def layer_matmul_parameters(self) -> int:
        """Weights of a layer without experts that multiply activations: q, k, v, out, gate, up, down."""
        return self.attention_matmul_parameters + 3 * self.hidden_size * self.ffn_hidden_size

    @property
    def expert_layer_matmul_parameters(self) -> int:
        """Weights of a layer with experts that one token meets: its own experts alone, router and shared expert."""
        own = self.num_experts * self.hidden_size + self.experts_per_token * self.expert_parameters
        return self.attention_matmul_parameters + own + self._shared_parameters

    @property
    def num_parameters(self) -> int:
        """Parameters without vocabulary padding; a tied embedding counts once, and every expert."""
        queries, keys = self.num_attention_heads * self.head_dim, self.num_query_groups * self.head_dim
        of_heads = queries + keys if self.qk_norm_over == "projection" else 2 * self.head_dim
        norms = self.layer_norms * self.hidden_size + (of_heads if self.qk_norm else 0)
        norms += self.q_lora_rank + self.kv_lora_rank
        biases = queries + 2 * keys if self.qkv_bias else 0
        choosing = self.num_experts if self.expert_bias else 0
        asleep = (self.num_experts - self.experts_per_token) * self.expert_parameters  # of one token
        layers = (
            self._layer_matmuls + len(self.expert_layers) * (asleep + choosing) + self.num_layers * (norms + biases)
        )
        tables = 1 if self.tie_embeddings else 2
        return layers + self.hidden_size + tables * self.vocab_size * self.hidden_size

    def flops_per_token(self, seq_length: int) -> int:
        """Floating point operations that one token of a row of ``seq_length`` costs, forward and backward.

        6 per matmul parameter that it meets (its experts alone; head included, embedding table not) plus
        12 * heads * head_dim * seq_length of each layer, without halving for the causal mask: the convention of PaLM
        (arXiv 2204.02311, appendix B). Half of the latter is of keys, half of values, which latent attention has of
        another width. Of a sliding layer the window counts, where it is shorter.
        """
        matmul = self._layer_matmuls + self.vocab_size * self.hidden_size
        keys = sum(self.seen_keys(layer, seq_length) for layer in range(self.num_layers))
        widths = self.head_dim + (self.v_head_dim or self.head_dim)
        return 6 * matmul + 6 * self.num_attention_heads * widths * keys

    @property
    def layer_norms(self) -> int:
        """Norms of a layer's hidden states."""
        return 4 if self.norm_position == "both" else 2

    @property
    def _layer_matmuls(self) -> int:
        """Weights of all layers that one token meets."""
        sparse = len(self.expert_layers)
        dense = self.num_layers - sparse
        return dense * self.layer_matmul_parameters + sparse * self.expert_layer_matmul_parameters

    @property
    def _shared_parameters(self) -> int:
        """The shared expert's weights, its gate among them."""
        gate = self.hidden_size if self.shared_expert_gate else 0
        return 3 * self.hidden_size * self.shared_ffn_hidden_size + gate
