"""The table [lora]: low-rank adapters beside frozen matrices (Hu et al. 2021, arXiv 2106.09685).

    [lora] --> LoraConfig (this file) --> model/lora.py: the linears;  layer_tensors.py: their names and sizes
                                      `-> check_lora (this file) --> rules.py

With adapters everything else is frozen (frozen.py). No torch.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from sixfold.gpt.config.table import Count, OneOf, Rate, Size, Table
from sixfold.gpt.errors import ConfigError

if TYPE_CHECKING:
    from sixfold.gpt.config.train_config import TrainConfig

ATTENTION = ("q", "k", "v", "out")
FEED_FORWARD = ("gate", "up", "down")
ROW_PARALLEL = ("out", "down")  # tp cuts the inputs of their weight, and so of A; of the others the outputs, and so B
ADAPTER_ENDS = (".lora_a", ".lora_b")  # of the names of A and B


@dataclass(frozen=True, kw_only=True)
class LoraConfig(Table):
    """[lora]: in every layer a target's product W x becomes W x + alpha / rank * B (A x)."""

    TABLE: ClassVar[str] = "lora"
    rank: Count = 0  # rows of A and columns of B; 0 = no adapters
    alpha: Rate = 16.0
    targets: tuple[Annotated[str, OneOf((*ATTENTION, *FEED_FORWARD))], ...] = (*ATTENTION, *FEED_FORWARD)
    dropout: Size = 0.0  # refused

    def check(self) -> None:
        for key in ("alpha", "targets"):
            value = getattr(self, key)
            if not self.rank and value != getattr(type(self), key):
                raise ConfigError(
                    f"lora.{key} is {_shown(value)!r} and lora.rank 0, without which there are no adapters; leave it "
                    f"out, or set lora.rank"
                )
        if not self.targets or len(set(self.targets)) < len(self.targets):
            raise ConfigError(
                f"lora.targets is {list(self.targets)}; it names one or more of "
                f"{', '.join((*ATTENTION, *FEED_FORWARD))}, each once"
            )

    @property
    def scale(self) -> float:
        """The factor of an adapter's output."""
        return self.alpha / self.rank


def is_adapter(name: str) -> bool:
    """Whether the parameter ``name``, canonical, is a matrix of an adapter."""
    return name.endswith(ADAPTER_ENDS)


def check_lora(config: "TrainConfig") -> None:
    """Refuse what adapters are not combined with.

    Raises:
        ConfigError: naming the keys, the reason and what works.
    """
    lora, model = config.lora, config.model
    if not lora.rank:
        return
    refused: tuple[tuple[str, bool, str, str], ...] = (
        ("lora.dropout", lora.dropout > 0, "adapters read what the base reads", "lora.dropout = 0 works"),
        ("train.frozen", bool(config.train.frozen), "all but adapters is frozen already", "leave the key out"),
        ("optimizer.name", config.optimizer.name != "adamw", "Muon's matrices are frozen",
         "optimizer.name = 'adamw' works"),
        ("train.precision", config.train.precision == "fp8", "a product beside bytes has no kernel",
         "train.precision = 'bf16' works"),
        ("model.kv_lora_rank", model.kv_lora_rank > 0, "linears of latent attention have no adapters",
         "lora.rank = 0 works"),
        ("parallel.schedule", not config.parallel.entry.flushed, "its versions are of all weights of a stage",
         "parallel.schedule = 'one_f_one_b' works"),
    )  # fmt: skip
    for key, is_refused, why, works in refused:
        if is_refused:
            table, _, name = key.partition(".")
            value = getattr(getattr(config, table), name)
            raise ConfigError(f"{key} is {_shown(value)!r} and lora.rank {lora.rank}: {why}; {works}")
    inside = [name for name in lora.targets if name in FEED_FORWARD]
    if model.num_experts and inside:
        raise ConfigError(
            f"lora.targets has {', '.join(inside)} and model.num_experts is {model.num_experts}, whose matrices are "
            f"one tensor for all experts and have no adapters: lora.targets = {list(ATTENTION)} works"
        )


def _shown(value: object) -> object:
    """As TOML has it: a list."""
    return list(value) if isinstance(value, tuple) else value
