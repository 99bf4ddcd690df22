"""Architectures of transformers in one process that does what several ranks do: bit for bit plain torch.

fsdp_architectures_helpers.py has the models, the ways of training and the oracle; ranks/test_architectures_ranks.py
has two ranks.
"""

from __future__ import annotations

import pytest

transformers = pytest.importorskip("transformers", reason="needs transformers, a peer that only tests use")
pytest.importorskip("peft", reason="needs peft, a peer that only tests use")

from fsdp_architectures_helpers import ARCHITECTURES, WAYS, difference, refused_by_peft  # noqa: E402

pytestmark = pytest.mark.usefixtures("as_sharded")
CASES = [(name, way) for name in ARCHITECTURES for way in WAYS if way != "lora" or not refused_by_peft(name)]


@pytest.mark.sampled(28)
@pytest.mark.parametrize(("name", "way"), CASES)
def test_a_model_trains_bit_for_bit_as_plain_torch(name, way):
    assert difference(name, way) == ""
