"""What the degrees of a mesh divide: heads, vocabulary, sequence, experts, and the ranks that share data.

    rules.py --> check_degrees (this file) before ranks; check_ranks (this file) when their number is known

Numbers only: no torch, no files. Each refusal names the keys, both numbers, the rule and the nearest values that work:
a degree that is named works beside all of that degree's rules.
"""

from math import gcd, lcm
from typing import TYPE_CHECKING

from sixfold.gpt.config.table import nearest_divisor
from sixfold.gpt.errors import ConfigError

if TYPE_CHECKING:
    from sixfold.gpt.config.train_config import ParallelConfig, TrainConfig


def check_degrees(config: "TrainConfig") -> None:
    """Refuse a model that parallel.tp, cp or ep does not divide, and degrees that split nothing.

    Raises:
        ConfigError: naming keys, both numbers and a nearest value that works.
    """
    _check_tensor_parallel(config)
    _check_sequence(config)
    _check_experts(config)
    if config.parallel.cp_comm_type != type(config.parallel).cp_comm_type and config.parallel.cp == 1:
        raise ConfigError(
            f"parallel.cp_comm_type is {config.parallel.cp_comm_type!r} and parallel.cp 1, where keys and values do "
            f"not travel; leave the key out, or set parallel.cp = 2"
        )
    for key in ("tp", "cp"):
        degree = getattr(config.parallel, key)
        if degree > 1 and config.train.compile and config.train.recompute == "full":
            raise ConfigError(
                f"train.compile is true, train.recompute 'full' and parallel.{key} {degree}. Messages between ranks "
                f"are not compiled, so a layer with messages cannot be compiled and recomputed whole: "
                f"train.recompute = 'selective' works"
            )
    if config.parallel.dp:
        check_ranks(config, config.parallel)


def check_ranks(config: "TrainConfig", parallel: "ParallelConfig") -> None:
    """Refuse degrees that the ranks of dp x cp are no multiple of.

    Args:
        parallel: that of ``config``, with dp known.
    Raises:
        ConfigError: naming keys, both numbers and a nearest value that works.
    """
    copies, dp, cp, ep = parallel.dp_replicate, parallel.dp, parallel.cp, parallel.ep
    if dp % copies:
        raise ConfigError(
            f"parallel.dp_replicate is {copies} and parallel.dp {dp}; dp_replicate divides dp: "
            f"parallel.dp_replicate = {nearest_divisor(dp, copies)} works"
        )
    if dp * cp % ep:
        near = nearest_divisor(gcd(dp * cp, max(config.model.num_experts, 1)), ep)
        raise ConfigError(
            f"parallel.ep is {ep} and parallel.dp * cp = {dp} * {cp} = {dp * cp}. Experts are split over these "
            f"ranks, so ep divides dp * cp: parallel.ep = {near} works, or parallel.dp = "
            f"{_near_multiple(ep // gcd(ep, cp), dp)}"
        )


def multiples(unit: int, value: int) -> list[int]:
    """The multiples of ``unit`` just below and above ``value``, those > 0."""
    below = value // unit * unit
    return [n for n in (below, below + unit) if n > 0]


def length_unit(parallel: "ParallelConfig") -> int:
    """What data.seq_length is a multiple of, for these degrees."""
    cp, tp = parallel.cp, parallel.tp
    return lcm(2 * cp if cp > 1 else 1, cp * tp if tp > 1 and parallel.sequence else 1)


def _check_tensor_parallel(config: "TrainConfig") -> None:
    model, tp = config.model, config.parallel.tp
    cut = {
        "model.num_attention_heads": model.num_attention_heads,
        "model.num_query_groups": model.num_query_groups,
        "model.ffn_hidden_size": model.ffn_hidden_size if model.dense_layers or not model.num_experts else 0,
        "model.moe_ffn_hidden_size": model.moe_ffn_hidden_size,
        "model.shared_ffn_hidden_size": model.shared_ffn_hidden_size,
        "the padded vocabulary (model.vocab_size, model.vocab_multiple)": model.padded_vocab_size,
    }
    for key, value in cut.items():
        if value % tp:
            near = nearest_divisor(gcd(*cut.values()), tp)
            raise ConfigError(f"{key} is {value} and parallel.tp is {tp}; tp divides it: parallel.tp = {near} works")
    if config.parallel.tp_overlap and (tp == 1 or not config.parallel.sequence):
        raise ConfigError(
            f"parallel.tp_overlap is true with parallel.tp {tp} and parallel.sequence "
            f"{str(config.parallel.sequence).lower()}, where linears wait for no gather; parallel.tp_overlap = false "
            "works, or parallel.tp = 2 with parallel.sequence = true"
        )
    if tp > 1 and config.optimizer.name == "muon":
        raise ConfigError(
            f"optimizer.name is 'muon' and parallel.tp {tp}, which splits the matrices that Muon needs whole; "
            f"optimizer.name = 'adamw' works, or parallel.tp = 1 with more of parallel.pp, dp or cp"
        )


def _check_sequence(config: "TrainConfig") -> None:
    """Chunks of context parallelism, and what tensor-parallel ranks hold of the sequence between blocks."""
    parallel, length = config.parallel, config.data.seq_length
    cp, tp = parallel.cp, parallel.tp
    shared = tp > 1 and parallel.sequence
    works = " or ".join(str(n) for n in multiples(length_unit(parallel), length))
    if cp > 1 and length % (2 * cp):
        raise ConfigError(f"data.seq_length is {length}; it is a multiple of 2 * parallel.cp = {2 * cp}: {works} works")
    if shared and length // cp % tp:
        raise ConfigError(
            f"data.seq_length / parallel.cp is {length} / {cp} = {length // cp} and parallel.tp is {tp}; with "
            f"parallel.sequence tp divides it: data.seq_length = {works} works, or parallel.sequence = false"
        )


def _check_experts(config: "TrainConfig") -> None:
    experts, ep = config.model.num_experts, config.parallel.ep
    if ep > 1 and not experts:
        raise ConfigError(
            f"parallel.ep is {ep} and model.num_experts 0, so there are no experts to split; parallel.ep = 1 works, or "
            f"model.num_experts = {ep}"
        )
    if ep > 1 and experts % ep:
        ranks = config.parallel.dp * config.parallel.cp
        near = nearest_divisor(gcd(experts, ranks), ep)
        raise ConfigError(
            f"model.num_experts is {experts} and parallel.ep is {ep}; ep divides it: parallel.ep = {near} works"
        )


def _near_multiple(unit: int, value: int) -> int:
    """The multiple of ``unit`` (> 0) that is nearest to ``value``; of two the smaller."""
    return min(multiples(unit, value), key=lambda n: (abs(n - value), n))
