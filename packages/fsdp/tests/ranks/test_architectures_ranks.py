"""Architectures of transformers on two ranks with default options, bit for bit an emulation in one process."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from ranktest import run_ranks

pytest.importorskip("transformers", reason="needs transformers, a peer that only tests use")
pytest.importorskip("peft", reason="needs peft, a peer that only tests use")

from fsdp_architectures_helpers import ARCHITECTURES, WAYS, difference, refused_by_peft

RANKS_IMPORT = ("transformers", "peft", *(f"transformers.models.{name}" for name in ("llama", "bert", "t5", "vit")))


def train(rank, ranks, cases):
    return {
        f"{name}: {way}": difference(name, way, group=dist.group.WORLD, rank=rank, ranks=ranks) for name, way in cases
    }


CASES = [(name, way) for name in ARCHITECTURES for way in WAYS if way != "lora" or not refused_by_peft(name)]


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("part", range(0, len(CASES), 6))
def test_models_train_bit_for_bit_on_two_ranks(part):
    for found in run_ranks(train, 2, CASES[part : part + 6], timeout=300):
        wrong = {case: text for case, text in found.items() if text}
        assert not wrong, wrong
