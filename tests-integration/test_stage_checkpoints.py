"""A Hugging Face model cut into stages, saved by its ranks with their optimizers, and gone on with at another number.

The lines between the marks are those of docs/guide/pipeline-cut-a-model.md.
"""

import re

import pytest
import torch
import torch.distributed as dist
from repository_helpers import ROOT
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from ranktest import run_ranks
from sixfold import dist_ckpt
from sixfold.pipeline import PipelineRunner, schedules

transformers = pytest.importorskip("transformers", reason="needs transformers, a peer that only tests use")

WORDS = 60
GUIDE = ROOT / "docs" / "guide" / "pipeline-cut-a-model.md"


def llama(seed, tied):
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    return transformers.LlamaForCausalLM(config)


def loss_of(outputs, ids):
    return torch.nn.functional.cross_entropy(outputs[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class Run:
    """The stages of one rank with their AdamW."""

    def __init__(self, rank, ranks, seed, tied=False):
        from sixfold.pipeline import stages_of_causal_lm

        self.model = llama(seed, tied)
        program = schedules.one_f_one_b(ranks, 4) if ranks > 1 else schedules.gpipe(1, 4)
        stages = stages_of_causal_lm(self.model, ranks)
        self.mine = [stages[index] for index in program.stages_of(rank)]
        parameters = [p for stage in self.mine for p in stage.parameters()]
        self.optimizer = torch.optim.AdamW(parameters, lr=1e-2)
        group = dist.group.WORLD if ranks > 1 else None
        self.runner = PipelineRunner(program, self.mine, group, loss_of)

    def train(self, steps):
        losses = []
        for step in steps:
            ids = torch.randint(1, WORDS, (4, 8), generator=torch.Generator().manual_seed(step))
            found = self.runner.step(ids, ids).losses
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses += [float(torch.stack(found).mean())] if found else []
        return losses

    def state(self):
        model, optimizer, mine = self.model, self.optimizer, self.mine
        # of the guide
        own = {id(p) for stage in mine for p in stage.parameters()}
        weights = {name: p.detach() for name, p in model.named_parameters() if id(p) in own}
        moments = get_optimizer_state_dict(model, optimizer)["state"]  # a new optimizer gets them made
        # to here
        return {"model": weights, "optimizer": moments}


def save(rank, ranks, folder):
    run = Run(rank, ranks, seed=0)
    run.train(range(3))
    dist_ckpt.save(run.state(), folder)
    return run.train(range(3, 6))


def load(rank, ranks, folder):
    run = Run(rank, ranks, seed=1)
    dist_ckpt.load(run.state(), folder)
    return run.train(range(3, 6))


@pytest.mark.parametrize(("before", "after"), [(2, 1), (2, 4)])
@pytest.mark.slow
def test_stages_go_on_at_another_number_as_if_unbroken(before, after, tmp_path):
    expected = run_ranks(save, before, tmp_path / "c")[-1]
    found = run_ranks(load, after, tmp_path / "c")[-1]
    assert found == pytest.approx(expected, abs=1e-5)


def test_the_lines_are_those_of_the_guide():
    shown = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), flags=re.S)
    (block,) = [text for text in shown if "moments =" in text and "own =" in text]
    (ours,) = re.findall(
        r"# of the guide\n(.*?) *# to here",
        (ROOT / "tests-integration" / "test_stage_checkpoints.py").read_text(),
        flags=re.S,
    )
    assert [line.strip() for line in ours.splitlines()] == [
        line for line in block.splitlines() if line.startswith(("own", "weights", "moments"))
    ]
