"""What everybody calls on a transformers model: save_pretrained, generate, a loss after the forward."""

from __future__ import annotations

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="needs transformers, a peer that only tests use")

from fsdp_helpers import same  # noqa: E402
from fsdp_transformers_helpers import make, tokens  # noqa: E402

from sixfold.fsdp import FsdpError, FullyShardedDataParallel  # noqa: E402


def test_save_pretrained_and_generate_work_by_the_calls_that_the_wrapper_names(tmp_path):
    plain, net = make("llama").eval(), make("llama").eval()
    model = FullyShardedDataParallel(net, fsdp_unit_modules=["LlamaDecoderLayer"])
    with pytest.raises(FsdpError, match=r"net.save_pretrained\(folder, state_dict=model.full_state_dict\(\)\)"):
        model.save_pretrained(tmp_path)
    net.save_pretrained(tmp_path / "given", state_dict=model.full_state_dict())
    net.save_pretrained(tmp_path / "alone")  # one process
    for folder in ("given", "alone"):
        loaded = type(plain).from_pretrained(tmp_path / folder)
        assert same(plain.state_dict(), loaded.state_dict()) == []
    with pytest.raises(FsdpError, match=r"model.entry\(model.module, method='generate'\)"):
        model.generate(tokens(0, 0))
    asked = {"max_new_tokens": 3, "do_sample": False, "attention_mask": torch.ones(2, 7, dtype=torch.long)}
    with torch.no_grad():
        made = model.entry(model.module, method="generate")(tokens(0, 0), **asked)
    assert torch.equal(made, plain.generate(tokens(0, 0), **asked))
