"""What import and export hold in memory: a few rows, never a model."""

import json

import pytest
import torch
from hf_helpers import Peak, tensors_of

from sixfold.gpt import GPTConfig
from sixfold.gpt.huggingface import config as hf_config
from sixfold.gpt.huggingface import convert

safetensors = pytest.importorskip("safetensors.torch", reason="needs the extra hf")

MIB = 2**20
CONFIG = GPTConfig(
    num_layers=9, hidden_size=512, num_attention_heads=8, ffn_hidden_size=1536, vocab_size=4001, tie_embeddings=False
)


def test_the_watch_sees_a_copy_that_is_there():
    with Peak() as peak:
        held = torch.ones(16 * MIB // 4)
        peak.over.wait(0.05)
    assert peak.most > 12 * MIB and held.numel()


@pytest.mark.slow
def test_neither_door_holds_a_copy_of_the_model(tmp_path, monkeypatch):
    source, size = tmp_path / "hf", 0
    source.mkdir()
    raw = hf_config.write(CONFIG, max_positions=64, dtype="float32", tokens={})
    (source / "config.json").write_text(json.dumps(raw))
    files, index = {}, {}
    for number, (name, shape) in enumerate(convert.canonical_shapes(CONFIG).items()):
        files.setdefault(f"part-{number % 3}.safetensors", {})[convert.hf_name(name, {})] = torch.rand(shape)
        index[convert.hf_name(name, {})] = f"part-{number % 3}.safetensors"
        size += 4 * torch.Size(shape).numel()
    for file, tensors in files.items():
        safetensors.save_file(tensors, source / file)
    (source / convert.INDEX).write_text(json.dumps({"weight_map": index}))
    del files, tensors
    assert size > 80 * MIB
    monkeypatch.setattr(convert, "PART_BYTES", MIB)
    convert.import_model(source, tmp_path / "warm")  # what a first call imports and starts is not the model's
    convert.export_model(tmp_path / "warm", tmp_path / "warm-out", max_shard_bytes=30 * MIB, dtype="bf16")
    monkeypatch.undo()
    with Peak() as bringing:
        convert.import_model(source, tmp_path / "run")
    monkeypatch.setattr(convert, "PART_BYTES", MIB)
    with Peak() as taking:
        convert.export_model(tmp_path / "run", tmp_path / "out", max_shard_bytes=30 * MIB, dtype="bf16")
    pieces = 12 * MIB  # a save copies 4 MiB of a tensor in each of its two threads, and hashes what it writes
    assert bringing.most < size / 16 + pieces, f"import held {bringing.most / MIB:.1f} of {size / MIB:.0f} MiB"
    assert taking.most < size / 16, f"export held {taking.most / MIB:.1f} of {size / MIB:.0f} MiB"
    written = tensors_of(tmp_path / "out")
    assert all(torch.equal(written[name], tensor.bfloat16()) for name, tensor in tensors_of(source).items())
    print(f"import {bringing.most / MIB:.1f}, export {taking.most / MIB:.1f}, of {size / MIB:.0f} MiB")
