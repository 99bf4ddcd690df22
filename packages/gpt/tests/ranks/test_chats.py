"""Fine-tuning on chats: an import, its chat template, masks, three layouts, beside transformers with labels of -100."""

from __future__ import annotations

import itertools

import pytest
import torch
from chat_helpers import conversations, write_chat_model, write_chats
from run_helpers import lines, losses, run_all

from sixfold.gpt import ConfigError, TrainConfig, global_batches
from sixfold.gpt.data.prepare import prepare
from sixfold.gpt.huggingface.convert import export_model, import_model

pytest.importorskip("safetensors", reason="needs the extra hf")
pytest.importorskip("tokenizers", reason="needs the extra tokenizers")
pytest.importorskip("jinja2", reason="chat templates need jinja2")
transformers = pytest.importorskip("transformers", reason="needs transformers, a peer that only tests use")

STEPS, LR, DECAY, CLIP = 3, 1e-3, 0.1, 0.25
REST = f"""
[data]
blend = ["chats"]
split = "1,0,0"
seq_length = 96
packing = "best_fit"
[train]
steps = {STEPS}
global_batch_size = 8
micro_batch_size = 2
precision = "fp32"
clip_grad = {CLIP}
[optimizer]
lr = {LR}
weight_decay = {DECAY}
[schedule]
shape = "constant"
[checkpoint]
background = false
init_from = "imported"
[run]
dir = "tuned"
device = "cpu"
"""
LAYOUTS = {"one": (1, []), "dp": (2, ["parallel.dp=2"]), "pp": (2, ["parallel.pp=2"])}


def plain_run(model, tokenizer, chats, config):
    """Losses of torch's own loop over the chats of each global batch: labels of -100 but for what the assistant says.

    A batch's loss is the mean over all its labels that count, and so is its gradient.
    """
    labelled = {}
    for chat in chats:
        made = tokenizer.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
        ids = [*made["input_ids"], tokenizer.eos_token_id]
        says = [*made["assistant_masks"], 0]
        labelled[tuple(ids)] = [token if says_it else -100 for token, says_it in zip(ids, says, strict=True)]
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8)
    found = []
    for batch in global_batches(config):
        ends = batch.cu_seqlens.tolist()
        rows = batch.tokens.flatten()
        # Of a row's pieces those that are a chat; the others are padding, which nothing counts.
        here = [tuple(rows[a:b].tolist()) for a, b in itertools.pairwise(ends)]
        here = [ids for ids in here if ids in labelled]
        count = sum(label != -100 for ids in here for label in labelled[ids][1:])
        assert count == batch.loss_mask.sum(), "a row lost a chat"
        total = 0.0
        for ids in here:
            labels = torch.tensor([labelled[ids]])
            loss = model(torch.tensor([ids]), labels=labels, num_items_in_batch=torch.tensor(count)).loss
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        found.append(total)
    return found


@pytest.mark.slow
def test_chats_train_as_transformers_does_with_labels_of_minus_100_and_come_back_with_their_template(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    model, tokenizer = write_chat_model(tmp_path / "hf")
    chats = conversations(60)
    write_chats(tmp_path / "chats.jsonl", chats)
    import_model("hf", "imported")
    prepare(["chats.jsonl"], "chats", tokenizer="imported", messages_key="messages")
    text = (tmp_path / "imported/config.toml").read_text() + REST.replace('"imported"', f'"{tmp_path / "imported"}"')
    text = text.replace('"chats"', f'"{tmp_path / "chats"}"')
    layouts = {
        name: (ranks, TrainConfig.from_text(text, [*keys, f"run.dir={tmp_path / name}"]))
        for name, (ranks, keys) in LAYOUTS.items()
    }
    run_all(layouts.values())
    expected = plain_run(model, tokenizer, chats, layouts["one"][1])
    for name, (_, config) in layouts.items():
        assert losses(config) == pytest.approx(expected, rel=1e-6), name
        assert lines(config, "end")[0]["reason"] == "finished"
        export_model(tmp_path / name, tmp_path / f"{name}-hf")
        opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / f"{name}-hf", dtype=torch.float32)
        for key, value in model.state_dict().items():
            torch.testing.assert_close(opened.state_dict()[key], value, rtol=0, atol=1e-5, msg=lambda m, k=key: k + m)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "dp-hf")
    assert theirs.apply_chat_template(chats[0]) == tokenizer.apply_chat_template(chats[0])


def test_chats_need_a_tokenizer_with_a_template(tmp_path):
    write_chats(tmp_path / "chats.jsonl", conversations(3))
    with pytest.raises(ConfigError, match=r"messages_key is 'messages' and the tokenizer is bytes.*chat template"):
        prepare([tmp_path / "chats.jsonl"], tmp_path / "chats", messages_key="messages")
    assert not list(tmp_path.glob("chats.[bim]*"))
