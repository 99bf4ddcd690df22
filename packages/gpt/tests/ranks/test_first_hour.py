"""A user's first hour by the command line, with a corpus and a tokenizer that are not ours."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from sixfold.gpt import load_model
from sixfold.gpt.commands import cli
from sixfold.gpt.data.cpython_corpus import topics
from sixfold.gpt.observe.metrics import read_all

tokenizers = pytest.importorskip("tokenizers", reason="needs the extra tokenizers")
transformers = pytest.importorskip("transformers", reason="needs transformers, a peer that only tests use")
pytest.importorskip("safetensors", reason="needs the extra hf")
pytest.importorskip("matplotlib", reason="needs matplotlib, the extra plot")

TOML = """
model = {{num_layers = 2, hidden_size = 48, num_attention_heads = 4, ffn_hidden_size = 96, vocab_size = {vocab}}}
data = {{blend = ["data/docs", "data/book"], seq_length = 48}}
train = {{steps = 100000, global_batch_size = 8, micro_batch_size = 2, precision = "fp32"}}
optimizer = {{lr = 3e-3}}
schedule = {{shape = "constant", warmup_steps = 2}}
checkpoint = {{every = 3, background = false}}
eval = {{every = 4, batches = 1}}
run = {{dir = "run", device = "cpu", timeout_seconds = 120.0}}
"""


def steps_of(run):
    return [r for r in read_all(run) if r["kind"] == "step"] if (run / "metrics.jsonl").exists() else []


def killed_after(run, count, *words):
    """The command, killed by SIGKILL with all that it started once ``run`` has so many steps."""
    command = [sys.executable, "-m", "sixfold.gpt", "train", *words]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True)
    try:
        deadline = time.monotonic() + 240
        while len(steps_of(run)) < count:
            assert process.poll() is None, process.communicate()[1].decode()
            assert time.monotonic() < deadline, f"no {count} steps within four minutes"
            time.sleep(0.02)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.mark.slow
def test_prepare_train_kill_resume_plot_sample_export_with_a_bpe_tokenizer(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    texts = [text.decode() for text in topics()]
    lines, book = texts[:60], "\n\n".join(texts[60:90])
    (tmp_path / "docs.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in lines))
    (tmp_path / "book.txt").write_text(book)
    trained = tokenizers.ByteLevelBPETokenizer()
    trained.train(["book.txt"], vocab_size=600, special_tokens=["<|endoftext|>"])
    trained.save("tokenizer.json")

    prepare = ("--tokenizer", "tokenizer.json", "--out")
    assert cli.main(["prepare", "docs.jsonl", *prepare, "data/docs"]) == 0
    assert cli.main(["prepare", "book.txt", "--documents", "paragraph", *prepare, "data/book"]) == 0
    vocab = re.search(r"vocab_size (\d+), documents end with <\|endoftext\|>", capsys.readouterr().out)[1]
    (tmp_path / "my.toml").write_text(TOML.format(vocab=vocab))

    killed_after(tmp_path / "run", 5, "my.toml", "parallel.pp=2")
    assert cli.main(["train", "my.toml", "parallel.dp=2", "train.steps=26"]) == 0
    records = read_all(tmp_path / "run")
    [resume] = [r for r in records if r["kind"] == "resume"]
    losses = [(r["step"], r["loss"]) for r in records if r["kind"] == "step"]
    again = [loss for step, loss in losses if step == resume["step"] + 1]
    assert resume["layout"]["dp"] == 2 and len(again) in (1, 2)
    assert again[-1] == pytest.approx(again[0], abs=1e-5), "the repeated step has the loss that it had"
    assert losses[-1][0] == 26 and losses[-1][1] < losses[0][1] - 0.7
    assert {r["step"] for r in records if r["kind"] == "eval"} >= {8, 12, 16, 20, 24, 26}

    assert cli.main(["plot", "run", "--by-dataset", "--out", "loss.svg"]) == 0
    assert b"<svg" in (tmp_path / "loss.svg").read_bytes()
    assert cli.main(["export", "run", "hf"]) == 0
    capsys.readouterr()
    prompt = "The 'if' statement"
    greedy = ["--prompt", prompt, "--temperature", "0", "--tokens", "12", "--json"]
    assert cli.main(["sample", "run", *greedy]) == 0
    written = json.loads(capsys.readouterr().out)["text"]

    theirs = transformers.AutoModelForCausalLM.from_pretrained("hf").eval()
    words = transformers.PreTrainedTokenizerFast(tokenizer_file="hf/tokenizer.json")
    ids = words(prompt, return_tensors="pt").input_ids
    ours = load_model("run")(ids)[..., : int(vocab)]
    assert (theirs(ids).logits - ours).abs().max() < 1e-4
    drawn = theirs.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0)[0]
    expected = words.decode(drawn).removesuffix("<|endoftext|>")
    assert prompt + written == expected and theirs.config.eos_token_id == 0
