"""Keys that change where or how a run computes: what they leave as it is, bit for bit."""

from __future__ import annotations

import pytest
from gpt_helpers import tiny_config
from run_helpers import assert_same_tensors, final_tensors, losses, run_all

# A key, the run beside it, and its own options. Stages hold the same layers in both where norms are to have equal bits.
UNEVEN = ("parallel.pp=2", "parallel.stages_per_rank=2", "parallel.layers_per_stage=[1, 0, 0, 3]")
LAST = "fsdp.grad_reduce=last"  # one order of sums
CASES = {
    "offload of optimizer state": (2, (), ("fsdp.offload=true",)),
    "pieces of units": (2, (), ("fsdp.bucket_bytes=4000",)),
    "uneven and empty stages, split": (
        2,
        (*UNEVEN, LAST, "parallel.schedule=hanayo", "model.tie_embeddings=false"),
        ("parallel.schedule=zb_v",),
    ),
    "fp8 over shards": (
        2,
        (LAST, "train.precision=fp8", "parallel.sharding=optim"),
        ("parallel.sharding=optim_grads_params",),
    ),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("options")
    jobs, found = {}, {}
    for case, (ranks, shared, own) in CASES.items():
        pair = []
        for options in (shared, (*shared, *own)):
            key = ranks, options
            if key not in jobs:
                jobs[key] = tiny_config(folder, "train.steps=2", *options, run=f"run{len(jobs)}")
            pair.append(jobs[key])
        found[case] = pair
    run_all((ranks, config) for (ranks, _), config in jobs.items())
    return found


@pytest.mark.parametrize("case", CASES)
@pytest.mark.slow
def test_a_key_changes_no_bit_of_what_is_trained(trained, case):
    beside, own = trained[case]
    assert losses(own) == losses(beside)
    assert_same_tensors(final_tensors(own), final_tensors(beside))


@pytest.mark.slow
def test_fp8_weights_train_near_bfloat16_and_main_weights_stay_float32(trained, tmp_path):
    fp8 = trained["fp8 over shards"][0]
    plain = tiny_config(tmp_path, "train.steps=2", "train.precision=bf16")
    run_all([(1, plain)])
    assert losses(fp8) == pytest.approx(losses(plain), rel=5e-3)
    assert losses(fp8) != losses(plain)
    assert {str(t.dtype) for key, t in final_tensors(fp8).items() if key.startswith("model.")} == {"torch.float32"}
