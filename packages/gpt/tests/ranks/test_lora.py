"""Adapters at every layout beside peft with torch's AdamW, and their way to peft and back into weights."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from gpt_helpers import tiny_config
from hf_helpers import write_folder
from run_helpers import assert_same_tensors, final_tensors, losses, run, run_all

from sixfold import dist_ckpt
from sixfold.gpt import ConfigError, TrainConfig, global_batches, load_model
from sixfold.gpt.commands.cli import main
from sixfold.gpt.huggingface.adapters import export_adapters
from sixfold.gpt.huggingface.convert import export_model, import_model

pytest.importorskip("safetensors", reason="needs the extra hf")
transformers = pytest.importorskip("transformers", reason="needs transformers, a peer that only tests use")
peft = pytest.importorskip("peft", reason="needs peft, a peer that only tests use")

STEPS, LR, DECAY, CLIP = 5, 3e-3, 0.1, 0.25
LORA = (
    "lora.rank=4", "lora.alpha=10", f"train.steps={STEPS}", "schedule.shape=constant", "schedule.warmup_steps=0",
    f"optimizer.lr={LR}", f"train.clip_grad={CLIP}", "checkpoint.save_initial=true", "checkpoint.every=2",
    "checkpoint.keep=9",
)  # fmt: skip
LAYOUTS = {
    "one": (1,),
    "dp": (2, "parallel.dp=2"),
    "dp, optim": (2, "parallel.dp=2", "parallel.sharding=optim"),
    "pp": (2, "parallel.pp=2"),
    "split": (2, "parallel.pp=2", "parallel.schedule=zb_h1"),
    "tp": (2, "parallel.tp=2"),
    "tp, whole rows": (2, "parallel.tp=2", "parallel.sequence=false", "train.recompute=full"),
    "tp, chunks": (2, "parallel.tp=2", "parallel.tp_overlap=true"),
    "cp": (2, "parallel.cp=2"),
}
PEFT = {name: f"{'o' if name == 'out' else name}_proj" for name in ("q", "k", "v", "out", "gate", "up", "down")}


def config_of(folder, *overrides, run="run", case="llama"):
    """The tiny run that begins from an import, whose [model] it has."""
    if not (folder / "imported").exists():
        write_folder(folder / "hf", case, vocab_size=257)
        import_model(folder / "hf", folder / "imported")
    text = tiny_config(folder, run=run).to_toml()
    text = (folder / "imported/config.toml").read_text() + text[text.index("[data]") :]
    return TrainConfig.from_text(text, [*LORA, f"checkpoint.init_from={folder / 'imported'}", *overrides])


def adapters_of(config, step):
    folder = Path(config.run.dir) / f"checkpoints/step-{step:08}"
    return {k: v for k, v in dist_ckpt.load_plain_tensors(folder).items() if k.startswith("model.") and "lora" in k}


def peft_name(key):
    """model.layers.0.attention.q.lora_a -> the name of peft's parameter."""
    _, _, layer, part, target, end = key.split(".")
    module = {"attention": "self_attn", "ffn": "mlp"}[part]
    return f"base_model.model.model.layers.{layer}.{module}.{PEFT[target]}.lora_{end[-1].upper()}.default.weight"


def with_peft(config, base):
    """peft's model with the adapters that the run began with."""
    names = [PEFT[target] for target in config.lora.targets]
    made = peft.LoraConfig(r=config.lora.rank, lora_alpha=config.lora.alpha, target_modules=names)
    model = peft.get_peft_model(base, made)
    parameters = dict(model.named_parameters())
    for key, value in adapters_of(config, 0).items():
        assert bool(value.any()) is key.endswith("lora_a")
        parameters.pop(peft_name(key)).data.copy_(value)
    assert not [name for name, parameter in parameters.items() if parameter.requires_grad]
    return model


def plain_run(config, model):
    """Losses of torch's own loop: documents apart, the mean over the targets of the global batch."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=DECAY)
    found = []
    for batch in global_batches(config):
        tokens, labels, mask = (getattr(batch, name).flatten() for name in ("tokens", "labels", "loss_mask"))
        total = torch.zeros(())
        for begin, end in itertools.pairwise(batch.cu_seqlens.tolist()):
            logits = model(tokens[None, begin:end]).logits[0]
            nats = torch.nn.functional.cross_entropy(logits, labels[begin:end], reduction="none")
            total = total + (nats * mask[begin:end]).sum() / mask.sum()
        total.backward()
        torch.nn.utils.clip_grad_norm_(trained, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(total.detach()))
    return found


@pytest.mark.slow
def test_adapters_train_as_in_peft_at_every_layout_and_the_base_keeps_its_bits(tmp_path):
    configs = {
        name: (ranks, config_of(tmp_path, *keys, run=f"run-{number}"))
        for number, (name, (ranks, *keys)) in enumerate(LAYOUTS.items())
    }
    run_all(configs.values())
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    model = with_peft(configs["one"][1], base)
    expected = plain_run(configs["one"][1], model)
    parameters = dict(model.named_parameters())
    imported = dist_ckpt.load_plain_tensors(tmp_path / "imported/checkpoints/step-00000000")
    for name, (_, config) in configs.items():
        assert_same_tensors(adapters_of(config, 0), adapters_of(configs["one"][1], 0))
        assert losses(config) == pytest.approx(expected, rel=1e-5), name
        last = final_tensors(config)
        for key, value in adapters_of(config, STEPS).items():
            torch.testing.assert_close(
                value, parameters[peft_name(key)].data, rtol=0, atol=1e-5, msg=lambda m, k=key: k + m
            )
        assert all(torch.equal(last[key], value) for key, value in imported.items())
        state = {key for key in last if key.startswith("optimizer.state.exp_avg.")}
        assert state == {f"optimizer.state.exp_avg.{key}" for key in adapters_of(config, STEPS)}


@pytest.mark.slow
def test_a_run_with_adapters_goes_on_links_its_base_and_is_exported_as_peft_and_merged(tmp_path, capsys):
    some = ('lora.targets=["q", "out", "down"]', "schedule.shape=constant", "optimizer.ema_decay=0.5")
    whole, cut = (config_of(tmp_path, *some, run=name, case="qwen2") for name in ("whole", "cut"))
    run(whole, 1)
    run(TrainConfig.from_text(cut.to_toml(), ["train.steps=3"]), 1)
    run(cut, 1)
    assert_same_tensors(final_tensors(cut), final_tensors(whole))
    folders = sorted(Path(whole.run.dir, "checkpoints").iterdir())
    linked = [file for file in folders[-1].glob("*.distcp") if file.stat().st_nlink > 1]
    written = sum(file.stat().st_size for file in folders[-1].glob("*.distcp") if file.stat().st_nlink == 1)
    assert linked and written < sum(file.stat().st_size for file in linked) / 2, "the base is on disk once"

    assert main(["export", whole.run.dir, str(tmp_path / "adapters"), "--lora"]) == 0
    assert json.loads((tmp_path / "adapters/adapter_config.json").read_text())["r"] == 4
    export_model(whole.run.dir, tmp_path / "merged")
    tokens = torch.arange(60).reshape(2, 30)
    with torch.no_grad():
        ours = load_model(whole.run.dir)(tokens)
        base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
        plain = base(tokens).logits.clone()
        theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapters").eval()(tokens).logits
        merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()(tokens).logits
    assert (plain - theirs).abs().max() > 1e-2, "five steps changed the model"
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    torch.testing.assert_close(merged, theirs, rtol=0, atol=1e-5)
    export_adapters(whole.run.dir, tmp_path / "average", ema=True)
    export_model(whole.run.dir, tmp_path / "merged average", ema=True)
    with torch.no_grad():
        base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
        theirs = peft.PeftModel.from_pretrained(base, tmp_path / "average").eval()(tokens).logits
        merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged average").eval()(tokens).logits
    assert (ours - theirs).abs().max() > 1e-4, "an average is behind"
    torch.testing.assert_close(merged, theirs, rtol=0, atol=1e-5)

    with pytest.raises(ConfigError, match=r"init_from has adapters of another lora\.rank \(was 4, is 0\).*export"):
        run(TrainConfig.from_text(whole.to_toml(), [
            "lora.rank=0", "lora.alpha=16", f"lora.targets={list(PEFT)}", f"run.dir={tmp_path / 'other'}",
            f"checkpoint.init_from={whole.run.dir}",
        ]), 1)  # fmt: skip
    again = TrainConfig.from_text(
        whole.to_toml(), [f"run.dir={tmp_path / 'again'}", f"checkpoint.init_from={whole.run.dir}"]
    )
    run(again, 1)
    assert_same_tensors(adapters_of(again, 0), adapters_of(whole, STEPS))
    assert main(["export", str(tmp_path / "imported"), str(tmp_path / "none"), "--lora"]) == 2
    assert "has no adapters: its lora.rank is 0" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_in_the_imported_folder_draws_its_adapters_and_its_sums_are_a_tree(tmp_path):
    keys = ("checkpoint.init_from=", "parallel.grad_sum=tree", "train.micro_batch_size=2")
    one = config_of(tmp_path, *keys, run="imported")
    write_folder(tmp_path / "hf2", "llama", vocab_size=257)
    import_model(tmp_path / "hf2", tmp_path / "sharded")
    two = TrainConfig.from_text(one.to_toml(), [f"run.dir={tmp_path / 'sharded'}", "parallel.dp=2"])
    run(one, 1)
    run(two, 2)
    assert losses(two) == losses(one)
    assert_same_tensors(final_tensors(two), final_tensors(one))
