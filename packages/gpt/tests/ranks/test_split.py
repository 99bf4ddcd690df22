"""Split backwards (I, W): bit for bit what whole backwards give, with sharded weights under them."""

from __future__ import annotations

import pytest
from gpt_helpers import tiny_config
from run_helpers import assert_same_tensors, final_tensors, losses, run_all

from sixfold.pipeline.schedules import by_name, registered

# A stage holds what it holds in the whole program beside it, so norms are sums of the same parts. Tied ends on one rank
# (V placements) add their two gradients in the order of the schedule.
TWO = ("parallel.pp=2", "train.steps=2")
PLAIN = (*TWO, "parallel.schedule=one_f_one_b")
LOOPED = (*TWO, "parallel.schedule=interleaved", "parallel.stages_per_rank=2")
WAVE = (*TWO, "parallel.schedule=hanayo", "parallel.stages_per_rank=2", "model.tie_embeddings=false")
ZERO_3 = ("parallel.sharding=optim_grads_params", "fsdp.grad_reduce=last")
BF16 = ("train.precision=bf16",)
RECOMPUTE = ("train.recompute=full",)
CASES = {
    "zb_h1": (2, PLAIN, ()),
    "zb_h2": (2, PLAIN, ()),
    "zb_interleaved": (2, LOOPED, ()),
    "zb_v": (2, WAVE, ()),
    "v_half": (2, WAVE, ()),
    "v_min": (2, WAVE, ()),
    "dualpipe_v": (2, WAVE, ()),
    "zb_h1 bf16 zero-3": (2, PLAIN, (*BF16, *ZERO_3)),
    "zb_v recompute": (2, WAVE, RECOMPUTE),
    "zb_v zero-3 dp 2": (4, WAVE, ("parallel.dp=2", *ZERO_3)),
}


def test_every_split_schedule_is_here():
    here = {case.split()[0] for case in CASES}
    assert here == {entry.name for entry in registered() if entry.split}


@pytest.fixture(scope="module")
def trained(tmp_path_factory, chosen):
    """The split and the whole run of every case; cases share whole ones."""
    folder = tmp_path_factory.mktemp("split")
    configs = {}
    for (case,) in chosen("case"):
        ranks, whole, options = CASES[case]
        schedule = f"parallel.schedule={case.split()[0]}"
        split = [schedule if option.startswith("parallel.schedule") else option for option in whole]
        for overrides in ((*whole, *options), (*split, *options)):
            key = ranks, tuple(overrides)
            if key not in configs:
                configs[key] = tiny_config(folder, *overrides, run=f"run{len(configs)}")
        configs[case] = configs[ranks, (*split, *options)], configs[ranks, (*whole, *options)]
    run_all((key[0], config) for key, config in configs.items() if isinstance(key, tuple))
    return configs


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.slow
def test_a_split_backward_is_bitwise_the_whole_one(trained, case):
    assert by_name(case.split()[0]).split and not by_name(CASES[case][1][2].partition("=")[2]).split
    split, whole = trained[case]
    assert losses(split) == losses(whole)
    assert_same_tensors(final_tensors(whole), final_tensors(split))
