"""examples/sft.py and dpo.py: loops of one's own over the same parts, on one rank and on two."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from run_helpers import losses, run

import ranktest
import sixfold.blending  # noqa: F401 - imported late; here the server of ranks has it loaded
from sixfold.gpt import TrainConfig, load_model
from sixfold.gpt.tokenizer import ByteTokenizer

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def fine_tuned(rank: int, ranks: int, text: str) -> list[float]:
    return example("sft").fine_tune(TrainConfig.from_text(text))


def preferred(rank: int, ranks: int, base: str, out: str) -> list[float]:
    dpo = example("dpo")
    return dpo.train(Path(base), PAIRS, ByteTokenizer(), Path(out), steps=4, batch=4)


def test_the_examples_are_short():
    assert all(len((EXAMPLES / f"{name}.py").read_text().splitlines()) < 150 for name in ("sft", "dpo"))


@pytest.mark.slow
def test_the_loop_of_sft_has_the_losses_and_weights_of_sixfold_train_on_one_rank_and_on_two(tmp_path):
    sft = example("sft")
    sft.write_tiny(tmp_path)
    keys = ["schedule.shape=constant", "train.steps=4", "checkpoint.background=false", "optimizer.eps=1e-3"]
    config = TrainConfig.from_text(sft.TINY.format(folder=tmp_path), keys)
    run(config, 1)
    expected, wanted = losses(config), load_model(config.run.dir).state_dict()
    for ranks in (1, 2):
        own = TrainConfig.from_text(config.to_toml(), [f"run.dir={tmp_path / f'own-{ranks}'}"])
        if ranks == 1:
            found = [fine_tuned(0, 1, own.to_toml())]
        else:
            found = ranktest.run_ranks(fine_tuned, ranks, own.to_toml(), timeout=120)
        assert all(one == pytest.approx(expected, rel=1e-6) for one in found)
        for name, value in load_model(own.run.dir).state_dict().items():
            torch.testing.assert_close(value, wanted[name], rtol=0, atol=1e-5)


PAIRS = [
    {"prompt": "one and one? ", "chosen": "two", "rejected": "three, of course"},
    {"prompt": "", "chosen": "yes", "rejected": "no"},
    {"prompt": "a longer question, what is it? ", "chosen": "an answer of more letters", "rejected": "none"},
    {"prompt": "x", "chosen": "y", "rejected": "z"},
    {"prompt": "who? ", "chosen": "the fox", "rejected": "the dog"},
]


def log_p(model, prompt, answer):
    """Of the answer's bytes and the end behind them."""
    prompt, answer = list(prompt.encode()), [*answer.encode(), 256]
    tokens = torch.tensor([prompt + answer])
    shares = torch.log_softmax(model(tokens[:, :-1]), -1)[0]
    first = max(len(prompt), 1)  # nothing says the first token of a text
    return sum(shares[at - 1, tokens[0, at]] for at in range(first, tokens.shape[1]))


def plain_dpo(base, *, steps, batch, beta, lr):
    """Rafailov et al. 2023, equation 7, pair by pair."""
    policy, reference = load_model(base), load_model(base)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=lr, weight_decay=0.0)
    found = []
    for step in range(steps):
        total = torch.zeros(())
        for at in range(step * batch, (step + 1) * batch):
            pair = PAIRS[at % len(PAIRS)]
            sides = [pair["chosen"], pair["rejected"]]
            with torch.no_grad():
                q = [log_p(reference, pair["prompt"], side) for side in sides]
            p = [log_p(policy, pair["prompt"], side) for side in sides]
            ratio = torch.sigmoid(beta * ((p[0] - q[0]) - (p[1] - q[1])))
            total = total - torch.log(ratio) / batch
        total.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(total.detach()))
    return found


@pytest.mark.slow
def test_the_loop_of_dpo_has_the_losses_of_the_papers_formula_on_one_rank_and_on_two(tmp_path):
    example("dpo").write_tiny(tmp_path / "base")
    base = str(tmp_path / "base/checkpoints/step-00000000")
    expected = plain_dpo(base, steps=4, batch=4, beta=0.1, lr=1e-3)
    assert expected[0] == pytest.approx(0.693147, rel=1e-5) and expected[-1] < 0.69
    one = preferred(0, 1, base, str(tmp_path / "one"))
    assert one == pytest.approx(expected, rel=1e-5)
    for two in ranktest.run_ranks(preferred, 2, base, str(tmp_path / "two"), timeout=120):
        assert two == pytest.approx(one, rel=1e-6)
    assert load_model(tmp_path / "two").config == load_model(base).config
