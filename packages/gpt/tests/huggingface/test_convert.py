"""Hugging Face folders in and out: logits, bits, faults. transformers writes and reads the other side."""

import errno
import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from hf_helpers import CASES, OURS, edit_json, from_folder, peer, run_of, tensors_of, write_folder
from model_helpers import boundaries, small

pytest.importorskip("safetensors", reason="needs the extra hf")
pytest.importorskip("transformers", reason="needs transformers, a peer that only tests use")

from sixfold import dist_ckpt
from sixfold.gpt import GPTModel, load_model
from sixfold.gpt.commands.cli import main
from sixfold.gpt.errors import ConfigError
from sixfold.gpt.huggingface import convert
from sixfold.gpt.huggingface.convert import INDEX, export_model, import_model

TOKENS = torch.randint(0, 100, (2, 40), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.slow
def test_an_imported_model_has_the_logits_of_the_peer_of_rows_and_of_packed_documents(tmp_path, case):
    model = write_folder(tmp_path / "hf", case)
    import_model(tmp_path / "hf", tmp_path / "run")
    ours, cu = load_model(tmp_path / "run"), boundaries(2, 40, [1, 13, 52, 79])
    assert ours.config.padded_vocab_size == 128
    with torch.no_grad():
        expected = model(TOKENS).logits
        assert expected.abs().max() > 0.3
        torch.testing.assert_close(ours(TOKENS), expected, rtol=0, atol=1e-5)
        packed = ours(TOKENS, cu_seqlens=cu).flatten(0, 1)
        for begin, end in zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True):
            alone = model(TOKENS.flatten()[None, begin:end]).logits[0]
            torch.testing.assert_close(packed[begin:end], alone, rtol=0, atol=1e-5)


NEWER = ["mistral", "mistral_plain", "mixtral", "olmo2", "olmo3", "gemma2", "gemma3_text", "deepseek_v3"]


@pytest.mark.parametrize("case", OURS)
@pytest.mark.parametrize("shard", [10**9, 10_000])
@pytest.mark.slow
def test_an_exported_model_has_our_logits_in_the_peer(tmp_path, case, shard):
    model = GPTModel(small(**OURS[case]))
    with torch.no_grad():
        for number, p in enumerate(model.parameters()):
            drawn = torch.randn(p.shape, generator=torch.Generator().manual_seed(number))
            p.copy_(drawn * 0.1 if p.dim() > 1 else 1.0 + 0.2 * drawn)
    export_model(run_of(tmp_path / "run", model), tmp_path / "hf", max_shard_bytes=shard)
    assert (tmp_path / "hf" / INDEX).exists() == (shard == 10_000)
    theirs, cu = from_folder(tmp_path / "hf"), boundaries(2, 40, [1, 13, 52, 79])
    assert theirs.config.vocab_size == 100 and theirs.config.max_position_embeddings >= 64
    with torch.no_grad():
        expected = theirs(TOKENS).logits
        assert expected.abs().max() > 0.3
        torch.testing.assert_close(model(TOKENS), expected, rtol=0, atol=1e-5)
        packed = model(TOKENS, cu_seqlens=cu).flatten(0, 1)
        for begin, end in zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True):
            alone = theirs(TOKENS.flatten()[None, begin:end]).logits[0]
            torch.testing.assert_close(packed[begin:end], alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", ["llama", "qwen2_tied_scaling", "qwen3", "qwen3_moe", "qwen2_moe", *NEWER])
@pytest.mark.slow
def test_import_then_export_gives_every_bit_back(tmp_path, case, dtype):
    model = write_folder(tmp_path / "hf", case, shard=9_000, dtype=dtype)
    import_model(tmp_path / "hf", tmp_path / "run")
    export_model(tmp_path / "run", tmp_path / "again", max_shard_bytes=9_000)
    before, after = tensors_of(tmp_path / "hf"), tensors_of(tmp_path / "again")
    assert before.keys() == after.keys() and len(list((tmp_path / "hf").glob("*.safetensors"))) > 1
    for name, tensor in before.items():
        assert after[name].dtype == dtype and torch.equal(after[name], tensor), name
    theirs, ours = model.config.to_dict(), from_folder(tmp_path / "again").config.to_dict()
    without = {"_name_or_path", "transformers_version", "max_window_layers", "rope_scaling", "dtype", "head_dim"}
    without |= {"num_nextn_predict_layers"}  # of which none are written
    same = {key for key in theirs if key not in without}
    assert {key: theirs[key] for key in same} == {key: ours.get(key) for key in same}


def test_a_narrower_dtype_is_rounded_and_what_it_cannot_hold_is_refused(tmp_path):
    write_folder(tmp_path / "hf", "llama")
    import_model(tmp_path / "hf", tmp_path / "run")
    export_model(tmp_path / "run", tmp_path / "bf16", dtype="bf16")
    for name, tensor in tensors_of(tmp_path / "hf").items():
        assert torch.equal(tensors_of(tmp_path / "bf16")[name], tensor.bfloat16()), name
    assert json.loads((tmp_path / "bf16/config.json").read_text())["dtype"] == "bfloat16"
    model = load_model(tmp_path / "run")
    with torch.no_grad():
        model.norm.weight[3] = 1e6
    with pytest.raises(ConfigError, match=r"model\.norm\.weight has values up to 1e\+06"):
        export_model(run_of(tmp_path / "large", model), tmp_path / "fp16", dtype="fp16")
    assert not [path for path in tmp_path.iterdir() if "fp16" in path.name], "half a folder is left"


def broken(tmp_path, change):
    """A folder of shards, changed; what import says of it."""
    from safetensors.torch import load_file, save_file

    source = tmp_path / "hf"
    write_folder(source, "qwen3", shard=9_000)
    change(source, load_file, save_file)
    with pytest.raises(ConfigError) as error:
        import_model(source, tmp_path / "run")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"], "half a folder is left"
    return str(error.value)


def test_every_missing_strange_and_mis_shaped_tensor_is_listed_at_once(tmp_path):
    def change(source, load, save):
        for path in source.glob("*.safetensors"):
            path.unlink()
        (source / INDEX).unlink()
        tensors = {n: t.contiguous() for n, t in peer("qwen3").state_dict().items()}
        del tensors["model.layers.0.self_attn.q_norm.weight"], tensors["lm_head.weight"]
        tensors["model.layers.7.mlp.up_proj.weight"] = torch.zeros(3)
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(48)
        tensors["model.norm.weight"] = torch.zeros(31)
        tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(48, 32, dtype=torch.int64)
        save(tensors, source / "model.safetensors")

    said = broken(tmp_path, change)
    for part in (
        "model.layers.0.self_attn.q_norm.weight is missing",
        "lm_head.weight is missing",
        "model.layers.7.mlp.up_proj.weight is no tensor of the model",
        "model.layers.0.self_attn.q_proj.bias is no tensor of the model",
        "model.norm.weight is of shape [31] and config.json says [32]",
        "model.layers.1.mlp.up_proj.weight is of dtype I64",
    ):
        assert part in said
    assert "\n" not in said


def test_a_tensor_of_two_files_is_listed(tmp_path):
    def change(source, load, save):
        first, second, *_ = sorted(source.glob("*.safetensors"))
        save(load(first) | load(second), second)

    said = broken(tmp_path, change)
    assert said.count(" is in model-0000") == len(said.split("; ")) >= 1


def test_what_index_and_files_say_differently_is_listed(tmp_path):
    def change(source, load, save):
        first, second, third, fourth, *_ = sorted(source.glob("*.safetensors"))
        tensors = load(first)
        save(tensors | {"strange": torch.zeros(1)}, first)
        gone = next(iter(load(second)))
        save({n: t for n, t in load(second).items() if n != gone} or {"other": torch.zeros(1)}, second)
        third.unlink()
        fourth.write_bytes(fourth.read_bytes()[:-3])
        edit_json(source / INDEX, lambda index: index["weight_map"].update(outside="../x.safetensors"))

    said = broken(tmp_path, change)
    assert "model-00003-of" in said and "is not there" in said
    assert "model-00004-of" in said and "is not a whole safetensors file" in said
    assert "'../x.safetensors', which is no file of the folder" in said


def test_a_strange_and_a_lost_tensor_of_an_index_are_listed(tmp_path):
    def change(source, load, save):
        first = min(source.glob("*.safetensors"))
        tensors = load(first)
        save({"strange": tensors.pop(next(iter(tensors)))} | tensors, first)

    said = broken(tmp_path, change)
    assert "strange is in model-00001-of" in said and "and not in" in said and "where model.safetensors.index" in said


def test_a_pickled_model_is_refused_with_what_to_do(tmp_path):
    def change(source, load, save):
        for path in source.glob("*.safetensors*"):
            path.unlink()
        (source / "pytorch_model.bin").write_bytes(b"")

    assert "save the model with safe_serialization=True" in broken(tmp_path, change)


def test_a_tied_head_is_dropped_if_it_is_the_embedding_and_refused_if_not(tmp_path):
    from safetensors.torch import save_file

    write_folder(tmp_path / "hf", "qwen3_tied_scaling")
    file = tmp_path / "hf/model.safetensors"
    tensors = tensors_of(tmp_path / "hf")
    table = tensors["model.embed_tokens.weight"]
    save_file(tensors | {"lm_head.weight": table.clone(), "model.rotary_emb.inv_freq": torch.ones(3)}, file)
    import_model(tmp_path / "hf", tmp_path / "run")
    assert "head.weight" not in dict(load_model(tmp_path / "run").named_parameters())
    save_file(tensors | {"lm_head.weight": table + 1}, file)
    with pytest.raises(ConfigError, match=r"lm_head\.weight is not model\.embed_tokens\.weight"):
        import_model(tmp_path / "hf", tmp_path / "other")


def test_nothing_is_replaced(tmp_path, capsys):
    write_folder(tmp_path / "hf", "llama")
    (tmp_path / "run").mkdir()
    assert main(["import", str(tmp_path / "hf"), str(tmp_path / "run")]) == 0  # an empty folder will do
    capsys.readouterr()
    for words in (["import", "hf", "run"], ["export", "run", "hf"], ["export", "run", "hf/config.json"]):
        assert main([words[0], str(tmp_path / words[1]), str(tmp_path / words[2])]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--step", "0", "--dtype", "fp16"]) == 0
    assert capsys.readouterr().out.endswith("out\n")
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "none"), "--step", "7"]) == 2
    assert not (tmp_path / "none").exists()
    for path in ("~/out", "s3://bucket/out"):
        assert main(["export", str(tmp_path / "run"), path]) == 2


@pytest.mark.slow
def test_a_full_disk_or_a_kill_leaves_no_folder_that_looks_whole(tmp_path, monkeypatch):
    write_folder(tmp_path / "hf", "llama")
    import_model(tmp_path / "hf", tmp_path / "run")
    plain, done, last = os.fsync, [], [0]

    def full(handle):
        done.append(handle)
        if len(done) == last[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        plain(handle)

    monkeypatch.setattr(os, "fsync", full)
    for last[0] in range(1, 5):
        done.clear()
        with pytest.raises(OSError, match="No space"):
            export_model(tmp_path / "run", tmp_path / "out")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "run"]
    monkeypatch.undo()
    with monkeypatch.context() as killed:
        killed.setattr(shutil, "rmtree", lambda *_, **__: None)  # who is killed tidies nothing up
        killed.setattr(convert, "_write_beside", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            export_model(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    export_model(tmp_path / "run", tmp_path / "out")


def test_files_of_the_tokenizer_travel_both_ways(tmp_path):
    write_folder(tmp_path / "hf", "llama")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (tmp_path / "hf" / name).write_text(f'{{"it is": "{name}"}}')
    import_model(tmp_path / "hf", tmp_path / "run")
    export_model(tmp_path / "run", tmp_path / "again")
    for folder in ("run", "again"):
        for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            assert (tmp_path / folder / name).read_text() == f'{{"it is": "{name}"}}'


def test_a_runs_own_tokenizer_says_the_end_of_a_document(tmp_path):
    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "<eos>": 7}, unk_token="a"))
    made.save(str(tmp_path / "tokenizer.json"))
    model = GPTModel(small())
    export_model(run_of(tmp_path / "run", model, tokenizer=str(tmp_path / "tokenizer.json")), tmp_path / "out")
    assert (tmp_path / "out/tokenizer.json").read_bytes() == (tmp_path / "tokenizer.json").read_bytes()
    assert json.loads((tmp_path / "out/generation_config.json").read_text()) == {"eos_token_id": 7}
    assert from_folder(tmp_path / "out").generation_config.eos_token_id == 7
    (tmp_path / "tokenizer.json").unlink()
    export_model(tmp_path / "run", tmp_path / "without")
    assert not (tmp_path / "without/tokenizer.json").exists()


@pytest.mark.parametrize(
    ("beside", "model"), [(False, {}), (True, {}), (False, {"qkv_bias": True}), (False, {"qk_norm": True})]
)
def test_transformers_opens_a_runs_own_tokenizer_as_it_is(tmp_path, capsys, beside, model):
    """A byte-level BPE under Llama, Qwen2, Qwen3: the end of a document is known, and ids are those of the file.

    AutoTokenizer does not for Qwen2: that is told, and what the line says instead does.
    """
    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra tokenizers")
    transformers = pytest.importorskip("transformers", reason="needs transformers, a peer that only tests use")
    made = tokenizers.ByteLevelBPETokenizer()
    made.train_from_iterator(
        ["the quick brown fox, le caf\u00e9"] * 9, vocab_size=290, special_tokens=["<|endoftext|>"]
    )
    (tmp_path / "own").mkdir()
    made.save(str(tmp_path / "own/tokenizer.json"))
    if beside:
        text = '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", "chat_template": "mine"}'
        (tmp_path / "own/tokenizer_config.json").write_text(text)
    run = run_of(tmp_path / "run", GPTModel(small(vocab_size=290, **model)), tokenizer=str(tmp_path / "own"))
    export_model(run, tmp_path / "out")
    told = "transformers.PreTrainedTokenizerFast.from_pretrained(OUT_DIR)" in capsys.readouterr().err
    assert told == ("qkv_bias" in model)
    kind = transformers.PreTrainedTokenizerFast if told else transformers.AutoTokenizer
    found = kind.from_pretrained(tmp_path / "out")
    for text in ("the quick  brown", " caf\u00e9\n", "\u6771"):
        ids = made.encode(text).ids
        assert found.encode(text) == ids and found.decode(ids) == text
    assert found.eos_token_id == 0 and found.chat_template == ("mine" if beside else None)


@pytest.mark.parametrize(("config", "ends"), [({}, None), ({"tokenizer": "bytes"}, 256)])
def test_the_end_of_a_document_is_told_only_where_a_run_names_its_tokenizer(tmp_path, config, ends):
    run = run_of(tmp_path / "run", GPTModel(small(vocab_size=300)), **config)
    export_model(run, tmp_path / "out")
    assert json.loads((tmp_path / "out/config.json").read_text())["eos_token_id"] == ends
    assert (tmp_path / "out/generation_config.json").exists() == (ends is not None)


def test_a_model_of_no_architecture_is_refused(tmp_path):
    run = run_of(tmp_path / "run", GPTModel(small(qk_norm=True, qkv_bias=True)))
    with pytest.raises(ConfigError, match=r"the nearest, Qwen2ForCausalLM, has model\.qk_norm = false"):
        export_model(run, tmp_path / "out")
    run = run_of(tmp_path / "odd", GPTModel(small(hidden_size=34, head_dim=8)))
    with pytest.raises(ConfigError, match="wants the second to divide the first"):
        export_model(run, tmp_path / "out")


@pytest.mark.parametrize("open_it", [lambda run: export_model(run, run / "out"), load_model], ids=["export", "load"])
def test_a_checkpoint_with_more_than_the_model_has_or_in_other_shapes_is_refused_with_all_of_it(tmp_path, open_it):
    model = GPTModel(small())
    state = model.sharded_state_dict()
    wider = torch.zeros(len(model.norm.weight) + 8)
    state["model.norm.weight"] = dist_ckpt.ShardedTensor.from_rank_offsets("model.norm.weight", wider)
    for name in ("positions.weight", "layers.0.extra"):
        state[f"model.{name}"] = dist_ckpt.ShardedTensor.from_rank_offsets(f"model.{name}", torch.zeros(3))
    state["model.layers.1._extra_state"] = dist_ckpt.ShardedObject("model.layers.1._extra_state", 1, (1,), (0,), 0)
    model.sharded_state_dict = lambda: state
    run = run_of(tmp_path / "run", model)
    with pytest.raises(ConfigError) as refused:
        open_it(run)
    for part in (
        f"model.norm.weight is of shape [{len(wider)}] and [model] says [{len(wider) - 8}]",
        "model.positions.weight, which is no part of the model",
        "model.layers.0.extra, which is no part of the model",
        "model.layers.1._extra_state",
        "model_provider's own decoder",
    ):
        assert part in str(refused.value)
    assert not (run / "out").exists()


def test_without_the_extra_one_line_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    for words in (["import", "a", "b"], ["export", "a", "b"]):
        assert main(words) == 2
        assert "pip install 'sixfold-gpt[hf]'" in capsys.readouterr().err
    assert not Path("b").exists()


def test_the_row_of_the_padding_token_is_trained_and_in_transformers_is_not(tmp_path):
    peers = write_folder(tmp_path / "hf", "llama", pad_token_id=5)
    import_model(tmp_path / "hf", tmp_path / "run")
    ours, tokens = load_model(tmp_path / "run"), torch.tensor([[5, 1, 5, 2]])
    ours(tokens).square().sum().backward()
    peers(tokens).logits.square().sum().backward()
    gradients = ours.embedding.weight.grad, peers.model.embed_tokens.weight.grad
    torch.testing.assert_close(*(gradient[1] for gradient in gradients), rtol=1e-4, atol=1e-5)
    assert gradients[0][5].any() and not gradients[1][5].any()


@pytest.mark.parametrize("case", ["qwen3_moe", "qwen2_moe"])
def test_gradients_of_an_imported_mixture_are_the_peers(tmp_path, case):
    peer = write_folder(tmp_path / "hf", case)
    import_model(tmp_path / "hf", tmp_path / "run")
    ours, labels = load_model(tmp_path / "run"), TOKENS.roll(-1, 1)
    object.__setattr__(ours.layers["1"].ffn.config, "router_aux_loss", 0.0)  # transformers' is off unless asked for
    ours(TOKENS, labels=labels).sum().backward()
    torch.nn.functional.cross_entropy(peer(TOKENS).logits.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    for mixture, block in zip([layer.ffn for layer in ours.layers.values()], peer.model.layers, strict=True):
        if not hasattr(mixture, "experts"):
            continue
        experts = mixture.experts
        pairs = {
            "router": (mixture.router.weight.grad, block.mlp.gate.weight.grad),
            "gate and up": (
                torch.cat((experts.gate.weight.grad, experts.up.weight.grad), 1), block.mlp.experts.gate_up_proj.grad
            ),
            "down": (experts.down.weight.grad, block.mlp.experts.down_proj.grad),
        }  # fmt: skip
        if case == "qwen2_moe":
            pairs["shared"] = (mixture.shared.down.weight.grad, block.mlp.shared_expert.down_proj.weight.grad)
            pairs["shared gate"] = (mixture.shared_gate.weight.grad, block.mlp.shared_expert_gate.weight.grad)
        for name, (found, expected) in pairs.items():
            assert expected.abs().max() > 0
            assert (found - expected).abs().max() < 2e-5 * expected.abs().max().clamp(min=1), name


@pytest.mark.slow
def test_the_balance_of_an_import_is_that_of_transformers(tmp_path):
    model = write_folder(tmp_path / "hf", "qwen2_moe", num_hidden_layers=1)
    import_model(tmp_path / "hf", tmp_path / "run")
    ours = load_model(tmp_path / "run")
    found = model(TOKENS, output_router_logits=True)
    (model.config.router_aux_loss_coef * found.aux_loss).backward()
    expected = model.model.layers[0].mlp.gate.weight.grad
    ours(TOKENS, labels=TOKENS, loss_mask=torch.zeros(TOKENS.shape)).sum().backward()
    balance = ours.layers["0"].ffn.router.weight.grad / TOKENS.numel()  # the run divides by its targets
    torch.testing.assert_close(balance, expected, rtol=1e-5, atol=1e-6 * float(expected.abs().max()))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda tensors, name: tensors.pop(name), "model.layers.1.mlp.experts.3.up_proj.weight is missing"),
        (lambda tensors, name: tensors.update({name: tensors[name].bfloat16()}), "is of dtypes BF16 and F32"),
        (lambda tensors, name: tensors.update({name: tensors[name].t().contiguous()}), "config.json says [20, 32]"),
        (
            lambda tensors, name: tensors.update({name.replace(".3.", ".5."): tensors[name].clone()}),
            "model.layers.1.mlp.experts.5.up_proj.weight is no tensor of the model",
        ),
    ],
)
def test_an_expert_that_is_not_there_or_not_like_the_others_is_named(tmp_path, change, says):
    from safetensors.torch import save_file

    write_folder(tmp_path / "hf", "qwen3_moe")
    tensors = tensors_of(tmp_path / "hf")
    change(tensors, "model.layers.1.mlp.experts.3.up_proj.weight")
    save_file(tensors, tmp_path / "hf/model.safetensors")
    with pytest.raises(ConfigError) as error:
        import_model(tmp_path / "hf", tmp_path / "run")
    assert says in str(error.value)
