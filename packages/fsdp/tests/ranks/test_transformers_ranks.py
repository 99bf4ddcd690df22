"""Unmodified transformers models on two ranks, bit for bit plain data parallel. One job: their import takes seconds."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from fsdp_helpers import same

from ranktest import run_ranks
from sixfold.fsdp import fully_shard, fully_shard_optimizer

pytest.importorskip("transformers", reason="needs transformers, of the extra 'test'")
RANKS_IMPORT = tuple(f"transformers.models.{name}.modeling_{name}" for name in ("llama", "esm", "bert"))


def train_all(rank, ranks):
    from fsdp_transformers_helpers import MODELS, emulate, loss_of, make, tokens

    found = {}
    for number, name in enumerate(MODELS):
        reentrant = (None, False, True)[number % 3]
        net = make(name, reentrant)
        model = fully_shard(net, process_group=dist.group.WORLD, fsdp_unit_modules=[MODELS[name][1]])
        optimizer = fully_shard_optimizer(torch.optim.AdamW(net.parameters(), lr=1e-2), model)
        for step in range(2):
            loss_of(net, step, rank).backward()
            optimizer.step()
            optimizer.zero_grad()
        found[name] = same(emulate(name, ranks=ranks, steps=2), model.full_state_dict())
        if name == "llama":
            plain = make(name).eval()
            plain.load_state_dict(model.full_state_dict())
            net.eval()
            prompt = tokens(5, rank)
            asked = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 3, "do_sample": False}
            with torch.no_grad():
                made = model.entry(net, method="generate")(prompt, **asked)
            found["generated"] = [] if torch.equal(made, plain.generate(prompt, **asked)) else ["tokens"]
    return found


@pytest.mark.slow
def test_models_train_bitwise_on_two_ranks_and_generate():
    for found in run_ranks(train_all, 2):
        assert len(found) == 5 and not any(found.values()), found
