"""[model]: the shape of the network, and how many weights and operations that is.

    [model] of the TOML --> GPTConfig (this file) --> train_config.py --> decoder.py, moe.py, tensor_sizes.py, config.py

Numbers only: no torch.
"""

from dataclasses import dataclass, field
from typing import ClassVar

from sixfold.gpt.config.table import Count, Positive, Rate, Size, Table, nearest_divisor
from sixfold.gpt.errors import ConfigError

EXPERT_KEYS = (
    "experts_per_token", "router_aux_loss", "moe_ffn_hidden_size", "shared_ffn_hidden_size", "shared_expert_gate",
    "norm_topk_prob", "dense_layers",
)  # fmt: skip
_LLAMA3_KEYS = {"rope_type", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}


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
    rope_scaling: dict[str, float | str] = field(default_factory=dict)
    norm_eps: Rate = 1e-5
    tie_embeddings: bool = True
    qk_norm: bool = False
    qkv_bias: bool = False
    init_std: Size = 0.02
    num_experts: Count = 0
    experts_per_token: Positive = 2
    router_aux_loss: Size = 0.01  # of shares of (token, choice) pairs that sum to 1, as Megatron-Core's
    moe_ffn_hidden_size: Count = 0  # of an expert; = ffn_hidden_size
    shared_ffn_hidden_size: Count = 0  # of the expert that every token passes; 0 = there is none
    shared_expert_gate: bool = False  # what it gives is multiplied by sigmoid(gate(token)), as in Qwen2-MoE
    norm_topk_prob: bool = True  # the weights of a token's experts sum to 1
    dense_layers: Count = 0  # the first so many layers have no experts (DeepSeek's first_k_dense_replace)

    def check(self) -> None:
        heads = self.num_attention_heads
        object.__setattr__(self, "num_query_groups", self.num_query_groups or heads)
        if heads % self.num_query_groups:
            near = nearest_divisor(heads, self.num_query_groups)
            raise ConfigError(
                f"model.num_query_groups is {self.num_query_groups} and model.num_attention_heads {heads}; "
                f"groups divide heads: {near} works"
            )
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
        self._check_rope_scaling()
        if self.num_experts:
            self._check_experts()
        else:
            self._refuse_keys_of_experts()

    def _check_experts(self) -> None:
        object.__setattr__(self, "moe_ffn_hidden_size", self.moe_ffn_hidden_size or self.ffn_hidden_size)
        if self.experts_per_token > self.num_experts:
            raise ConfigError(
                f"model.experts_per_token is {self.experts_per_token} and model.num_experts {self.num_experts}; a "
                f"token goes to that many different experts: model.experts_per_token = {self.num_experts} works"
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

    def _check_rope_scaling(self) -> None:
        scaling = self.rope_scaling
        if not scaling:
            return
        if scaling.get("rope_type") != "llama3":
            raise ConfigError(
                f'model.rope_scaling is {scaling}; it is {{}} or a table with rope_type = "llama3" and '
                f"{', '.join(sorted(_LLAMA3_KEYS - {'rope_type'}))}"
            )
        if set(scaling) != _LLAMA3_KEYS:
            missing, extra = sorted(_LLAMA3_KEYS - set(scaling)), sorted(set(scaling) - _LLAMA3_KEYS)
            raise ConfigError(f"model.rope_scaling: keys of llama3 missing: {missing}; not keys of llama3: {extra}")
        for key in sorted(_LLAMA3_KEYS - {"rope_type"}):
            value = scaling[key]
            if isinstance(value, str) or value <= 0:
                raise ConfigError(f"model.rope_scaling.{key} is {value!r}; it is a number > 0")

    @property
    def padded_vocab_size(self) -> int:
        """``vocab_size`` rounded up to a multiple of ``vocab_multiple``: rows of the embedding and of the head."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    def has_experts(self, layer: int) -> bool:
        """Whether the feed-forward part of ``layer`` (its global number) is a mixture of experts."""
        return self.num_experts > 0 and layer >= self.dense_layers

    @property
    def expert_layers(self) -> range:
        """Global numbers of the layers with experts."""
        return range(self.dense_layers, self.num_layers) if self.num_experts else range(0)

    @property
    def attention_matmul_parameters(self) -> int:
        """Weights of q, k, v and out of one layer."""
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
        norms = 2 * self.hidden_size + (2 * self.head_dim if self.qk_norm else 0)
        biases = queries + 2 * keys if self.qkv_bias else 0
        asleep = (self.num_experts - self.experts_per_token) * self.expert_parameters  # of one token
        layers = self._layer_matmuls + len(self.expert_layers) * asleep + self.num_layers * (norms + biases)
        tables = 1 if self.tie_embeddings else 2
        return layers + self.hidden_size + tables * self.vocab_size * self.hidden_size

    def flops_per_token(self, seq_length: int) -> int:
        """Floating point operations that one token of a row of ``seq_length`` costs, forward and backward.

        6 per matmul parameter that it meets (its experts alone; head included, embedding table not) plus
        12 * layers * heads * head_dim * seq_length, without halving for the causal mask: the convention of PaLM
        (arXiv 2204.02311, appendix B).
        """
        matmul = self._layer_matmuls + self.vocab_size * self.hidden_size
        return 6 * matmul + 12 * self.num_layers * self.num_attention_heads * self.head_dim * seq_length

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
