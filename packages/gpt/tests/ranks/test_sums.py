"""Each sum between ranks is done once: a run in which one is left out, or done twice, is not the single process's.

    gradient of                                    | summed over
    every dense parameter, and number of targets   | dp x cp
    norms, router, under sequence parallelism      | also tp
    q and k norms; the router, whose tokens tp has | also tp, always
    tied embedding on two ranks                    | the two stages
    experts                                        | the ranks that share them

and in the norm of all gradients each parameter counts once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from gpt_helpers import tiny_config
from run_helpers import JOB_S, final_tensors, lines, run, world_of
from torch.distributed import PrefixStore
from torch.distributed.device_mesh import init_device_mesh

import ranktest
from sixfold import dist_ckpt
from sixfold.fsdp.collectives.gradient_sums import RankOrderSum
from sixfold.gpt.config.train_config import TrainConfig
from sixfold.gpt.engine import fsdp_wrap, step
from sixfold.gpt.engine.rank_model import RankModel
from sixfold.gpt.parallel.weight_sharding import replicated, summed_over_tp
from sixfold.gpt.training.loop import train_in

SMALL = ("model.num_layers=2", "train.steps=1", "train.global_batch_size=4", "model.qk_norm=true")
SAME = 2e-5  # of the largest element of a gradient; what is done wrongly is off by much more
EXPERTS = ("model.num_experts=4", "model.moe_ffn_hidden_size=32", "optimizer.eps=1e-3", "train.micro_batch_size=1")


def twice(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: (function(*args, **kwargs), function(*args, **kwargs))[1]


def nothing(*args: object, **kwargs: object) -> None:
    pass


def all_but(*ends: str) -> Callable[..., bool]:
    """The rule of sums over tp without weights of these names."""
    return lambda name, *, sequence: not name.endswith(ends) and summed_over_tp(name, sequence=sequence)


def each_rank_alone(mesh: Any) -> Any:
    """Experts as if no other rank had them."""
    alone = init_device_mesh("cpu", (mesh.size, 1), mesh_dim_names=("all", "one"))["one"]
    return lambda name: alone if ".experts." in name else None


def shared_by_all(mesh: Any) -> None:
    """Experts as if all ranks of dp x cp had the same."""
    return


def own_shard_alone(self: Any, comm: Any, sent: Any, result: Any, scratch: Any, wide: Any) -> Any:
    """fsdp's sum over dp x cp of what this rank has."""
    mine = sent.view(comm.size, -1)[comm.rank]
    return lambda wait: result.copy_(mine)


def added_twice(self: Any, *args: Any) -> Any:
    """fsdp's sum over dp x cp, and once more."""
    finish = _scatter(self, *args)
    return lambda wait: finish(wait).mul_(2)


def uncounted(rank: RankModel, batch: Any) -> Any:
    """The targets of this rank alone."""
    return _sum_targets(replace(rank, mesh=replace(rank.mesh, data=None)), batch)


_sum_targets, _scatter = step._sum_targets, RankOrderSum.reduce_scatter

# What is done wrongly: (where, what is put there).
WRONGS: dict[str, tuple[Any, str, Any]] = {
    "right": (step, "nothing_of_that_name", None),
    "tp left out": (step, "_sum_over_tensor_parallel", nothing),
    "tp twice": (step, "_sum_over_tensor_parallel", twice(step._sum_over_tensor_parallel)),
    "norms of layers left out": (step, "summed_over_tp", all_but("attention_norm.weight", "ffn_norm.weight")),
    "the last norm left out": (step, "summed_over_tp", lambda name, *, sequence: name != "norm.weight"
                               and summed_over_tp(name, sequence=sequence)),
    "q and k norms left out": (step, "summed_over_tp", all_but("q_norm.weight", "k_norm.weight")),
    "router left out": (step, "summed_over_tp", all_but("router.weight")),
    "whole norms summed": (step, "summed_over_tp", lambda name, *, sequence: replicated(name)),
    "copies in the norm": (RankModel, "counts_in_norm", lambda self, name: True),
    "tied left out": (step, "_sum_tied_embedding", nothing),
    "tied twice": (step, "_sum_tied_embedding", twice(step._sum_tied_embedding)),
    "data left out": (RankOrderSum, "reduce_scatter", own_shard_alone),
    "data twice": (RankOrderSum, "reduce_scatter", added_twice),
    "targets not summed": (step, "_sum_targets", uncounted),
    "experts not summed": (fsdp_wrap, "_experts_mesh", each_rank_alone),
    "other experts summed": (fsdp_wrap, "_experts_mesh", shared_by_all),
}  # fmt: skip

# Ranks, layout, and what is done wrongly on it.
CASES = [
    (2, ("parallel.tp=2",), ("tp left out", "tp twice", "norms of layers left out", "the last norm left out",
                             "q and k norms left out", "copies in the norm")),
    (2, ("parallel.tp=2", "parallel.sequence=false"), ("q and k norms left out", "whole norms summed")),
    (2, ("parallel.pp=2",), ("tied left out", "tied twice", "copies in the norm")),
    (2, ("parallel.dp=2",), ("targets not summed", "data left out", "data twice")),
    (2, ("parallel.cp=2",), ("data left out", "data twice")),
    (2, (*EXPERTS, "parallel.tp=2", "parallel.sequence=false"), ("router left out", "tp twice")),
    (4, (*EXPERTS, "parallel.dp=4", "parallel.ep=2"), ("experts not summed", "other experts summed")),
]  # fmt: skip


@contextmanager
def wrongly(how: str) -> Iterator[None]:
    where, name, instead = WRONGS[how]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(where, name, instead, raising=how != "right")
        yield


def train_wrongly(rank: int, ranks: int, texts: dict[str, str]) -> list[str]:
    """The same run once for each kind of mistake; those that a check of the run's own refused."""
    refused = []
    for how, text in texts.items():
        world = world_of(rank, ranks)
        try:
            with wrongly(how):
                train_in(TrainConfig.from_text(text), replace(world, store=PrefixStore(how, world.store)))
        except dist_ckpt.CheckpointError:  # two owners of one part, found by all ranks before a byte is written
            refused.append(how)
    return refused


def differences(one: TrainConfig, other: TrainConfig) -> list[str]:
    """Parameters whose gradients are not those of ``other``, as AdamW's first moments have them, and the norm."""
    found, expected = final_tensors(one), final_tensors(other)
    assert found.keys() == expected.keys()
    moments = [key for key in expected if key.startswith("optimizer.state.exp_avg.")]
    assert len(moments) > 10, f"{list(expected)}"
    off = {key: float((found[key] - expected[key]).abs().max() / expected[key].abs().max()) for key in moments}
    norms = [lines(config, "step")[0]["grad_norm"] for config in (one, other)]
    off["norm of all"] = abs(norms[0] - norms[1]) / norms[1]
    return [f"{key} by {by:.1e}" for key, by in off.items() if not by < SAME]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("ranks", "layout", "wrongs"), CASES, ids=lambda v: ",".join(v) if isinstance(v, tuple) else v)
@pytest.mark.slow
def test_a_sum_that_is_left_out_or_done_twice_is_seen(tmp_path, ranks, layout, wrongs):
    configs = {how: tiny_config(tmp_path, *SMALL, *layout, run=how.replace(" ", "-")) for how in ("right", *wrongs)}
    texts = {how: one.to_toml() for how, one in configs.items()}
    refused = ranktest.run_ranks(train_wrongly, ranks, texts, timeout=JOB_S)[0]
    alone = tiny_config(tmp_path, *SMALL, *[key for key in layout if not key.startswith("parallel.")], run="alone")
    run(alone, 1)
    assert differences(configs.pop("right"), alone) == []
    unseen = [how for how, one in configs.items() if how not in refused and not differences(one, alone)]
    assert not unseen, f"nothing is seen of {unseen}"
