"""A run that goes on with another precision or other options of its optimizer: from the same weights, as it was asked.

The pages that advise so (docs/do/debug.md) are right: what a checkpoint holds does not depend on these keys.
"""

import pytest
import torch
from gpt_helpers import tiny_config
from run_helpers import final_tensors, lines, losses

from sixfold.gpt import global_batches, load_model, train

BEGIN = ("model.num_layers=1", "train.steps=2", "checkpoint.every=2", "checkpoint.keep=9")


@pytest.fixture(scope="module")
def trunk(tmp_path_factory):
    """Folder of a run of two steps in bf16, and the loss of the third in fp32 by a plain forward of its checkpoint."""
    folder = tmp_path_factory.mktemp("branches")
    train(tiny_config(folder, *BEGIN, "train.precision=bf16"))
    config = tiny_config(folder, *BEGIN, "train.steps=3")
    model = load_model(config.run.dir)
    batch = next(global_batches(config, first_step=2))
    with torch.no_grad():
        of_tokens = model(
            batch.tokens, cu_seqlens=batch.cu_seqlens, labels=batch.labels, loss_mask=batch.loss_mask
        ).double()
    return folder, float(of_tokens.sum() / batch.loss_mask.sum())


def branch(folder, name, *overrides):
    """Go on for one step from the trunk's checkpoint in a copy of its folder."""
    import shutil

    shutil.copytree(folder / "run", folder / name)
    config = tiny_config(folder, *BEGIN, "train.steps=3", *overrides, run=name)
    train(config)
    return config


@pytest.mark.parametrize(("precision", "within"), [("fp32", 1e-6), ("bf16", 2e-2), ("fp8", 5e-2)])
@pytest.mark.slow
def test_a_run_goes_on_in_another_precision_from_the_same_weights(trunk, precision, within):
    folder, expected = trunk
    config = branch(folder, precision, f"train.precision={precision}")
    assert losses(config)[2] == pytest.approx(expected, rel=within)
    [resume] = lines(config, "resume")
    asked = {} if precision == "bf16" else {"train.precision": ["bf16", precision]}
    assert resume["changed"] == {"train.steps": [2, 3], **asked}  # the learning rate of a cosine depends on the steps


@pytest.mark.slow
def test_another_weight_decay_is_applied_to_the_weights_that_were_there(trunk):
    folder, _ = trunk
    options = ("train.precision=fp32", "schedule.shape=constant", "optimizer.lr=1e-2")
    little, much = (
        final_tensors(branch(folder, f"decay-{decay}", *options, f"optimizer.weight_decay={decay}"))
        for decay in (0.1, 0.6)
    )
    before = final_tensors(tiny_config(folder, *BEGIN))
    for name in ("model.layers.0.ffn.up.weight", "model.embedding.weight"):
        # AdamW decays apart from its gradient: the branches differ by lr * (0.6 - 0.1) * weight, and by nothing else.
        torch.testing.assert_close(little[name] - much[name], 5e-3 * before[name], rtol=1e-3, atol=1e-8)
    assert torch.equal(little["model.norm.weight"], much["model.norm.weight"])
