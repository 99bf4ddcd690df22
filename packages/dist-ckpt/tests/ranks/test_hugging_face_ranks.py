"""Models of transformers out of any layout and into any layout; transformers, safetensors and torch are the oracles."""

import pytest
import torch
from hugging_face_helpers import CUTS, llama, logits, same, whole_of

from ranktest import run_ranks
from sixfold.dist_ckpt import hugging_face

transformers = pytest.importorskip("transformers", reason="needs transformers, which is the oracle")
safe = pytest.importorskip("safetensors.torch", reason="needs the extra safetensors")

RANKS_IMPORT = ("transformers.models.llama.modeling_llama", "safetensors.torch")


def export(rank, ranks, folder, cut, options):
    model = llama(tied=options.pop("tied", False))
    return hugging_face.export(CUTS[cut](model, ranks), folder, extras=[model.config], **options)


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("cut", CUTS)
def test_transformers_computes_the_same_from_what_two_ranks_have_exported(tmp_path, cut):
    found = run_ranks(export, 2, tmp_path / "m", cut, {"max_shard_bytes": 6000})
    assert found[0] == found[1]
    assert len(found[0]["files"]) > 3
    read = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "m", attn_implementation="eager")
    assert same(read.state_dict(), llama().state_dict())
    assert torch.equal(logits(read), logits(llama()))


def load(rank, ranks, folder, cut):
    model = CUTS[cut](llama(seed=1), ranks)
    assert hugging_face.load(model, folder) is model
    return whole_of(model)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("cut", CUTS)
def test_a_model_that_transformers_saved_loads_at_any_layout(tmp_path, cut, ranks):
    llama().save_pretrained(tmp_path / "m", max_shard_size="6KB")
    assert (tmp_path / "m" / "model.safetensors.index.json").exists()
    for found in run_ranks(load, ranks, tmp_path / "m", cut):
        assert same(found, llama().state_dict())
