"""A trainer of torchtitan's shape: parts on the meta device, filled behind the schedule, masks as extra arguments."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from ranktest import run_ranks
from sixfold.pipeline import TorchSchedule

WORDS, WIDTH, LENGTH, ROWS, M, ACCUMULATED, STEPS = 32, 16, 32, 4, 2, 2, 3


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)  # a key's bias has a gradient of rounding alone

    def forward(self, x: Tensor, allowed: Tensor | None) -> Tensor:
        q, k, v = (part[:, None] for part in self.qkv(self.norm(x)).chunk(3, -1))
        seen = functional.scaled_dot_product_attention(q, k, v, attn_mask=allowed, is_causal=allowed is None)
        return x + self.out(seen[:, 0])


class Transformer(nn.Module):
    """Parts that a stage has not are None, as torchtitan's pipeline_module_split leaves them."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.tok_embeddings: nn.Module | None = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleDict({str(i): Layer() for i in range(layers)})
        self.norm: nn.Module | None = nn.RMSNorm(WIDTH)
        self.output: nn.Module | None = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor, *, attention_masks: Any = None) -> Tensor:
        h = self.tok_embeddings(tokens) if self.tok_embeddings is not None else tokens
        allowed = None
        if attention_masks is not None:  # flex_attention has no backward on CPUs: its mask is read pair by pair
            b, q, kv = torch.arange(len(h)), torch.arange(h.shape[1]), torch.arange(h.shape[1])
            allowed = attention_masks.mask_mod(b[:, None, None, None], 0, q[:, None], kv)
        for layer in self.layers.values():
            h = layer(h, allowed)
        h = self.norm(h) if self.norm is not None else h
        return self.output(h) if self.output is not None else h

    def init_weights(self, names: set[str]) -> None:
        """Each parameter by a seed of its own, so that parts and the whole begin alike."""
        for name, parameter in self.named_parameters():
            generator = torch.Generator().manual_seed(sum(map(ord, name)))
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
            names.add(name)


def split(whole: Transformer, stage: int, stages: int) -> Transformer:
    part, layers = copy.deepcopy(whole), list(whole.layers)
    each = len(layers) // stages
    part.layers = nn.ModuleDict({i: part.layers[i] for i in layers[stage * each : (stage + 1) * each]})
    if stage > 0:
        part.tok_embeddings = None
    if stage < stages - 1:
        part.norm = part.output = None
    return part


def loss_sum(pred: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(pred.flatten(0, 1).float(), labels.flatten(), reduction="sum", ignore_index=-100)


def batches(step: int) -> list[tuple[Tensor, Tensor, Any]]:
    """Tokens, labels and document masks of a step's accumulated batches."""
    flex = pytest.importorskip("torch.nn.attention.flex_attention", reason="needs a torch with flex_attention")
    found = []
    for at in range(ACCUMULATED):
        generator = torch.Generator().manual_seed(10 * step + at)
        tokens = torch.randint(0, WORDS, (ROWS, LENGTH), generator=generator)
        labels = tokens.roll(-1, 1)
        labels[:, -1] = -100
        labels[at, : 5 + step] = -100
        starts = torch.zeros(ROWS, LENGTH, dtype=torch.int64)
        for row in range(ROWS):
            starts[row, 3 + 5 * row + at :: 9] = 1
        document = starts.cumsum(1)

        def same_document(b: Any, h: Any, q: Any, kv: Any, document: Tensor = document) -> Any:
            return (q >= kv) & (document[b, q] == document[b, kv])

        mask = flex.create_block_mask(same_document, ROWS, None, LENGTH, LENGTH, "cpu", 16)
        found.append((tokens, labels, mask))
    return found


class Trainer:
    def __init__(self, rank: int, ranks: int, name: str, chunks: int) -> None:
        from torch.distributed.pipelining import PipelineStage

        with torch.device("meta"):
            whole = Transformer(4)
        stages = ranks * chunks
        mine = [rank + ranks * c for c in range(chunks)]
        if name == "ZBVZeroBubble":
            mine = [rank, stages - 1 - rank]
        parts = [split(whole, s, stages) for s in mine]
        device = torch.device("cpu")
        made = [
            PipelineStage(part, s, stages, device, group=dist.group.WORLD) for part, s in zip(parts, mine, strict=True)
        ]
        self.tokens = 1.0
        self.schedule = TorchSchedule(
            name,
            made if chunks > 1 else made[0],
            n_microbatches=M,
            loss_fn=lambda pred, labels: loss_sum(pred, labels) / self.tokens,
            scale_grads=False,
            timeout_s=20,
        )
        self.first, self.last = 0 in mine, stages - 1 in mine
        self.model_parts = parts
        names: set[str] = set()
        for part in parts:  # behind the schedule, as torchtitan does
            part.to_empty(device=device)
            part.init_weights(names)
            part.train()
        self.parameters = [p for part in parts for p in part.parameters()]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-2)

    def pass_over(self, call: Any, tokens: Tensor, labels: Tensor, mask: Any, **more: Any) -> Tensor:
        targets, losses = (labels, []) if self.last else (None, None)
        given = (tokens,) if self.first else ()
        call(*given, target=targets, losses=losses, attention_masks=mask, **more)
        return torch.sum(torch.stack(losses)) if losses else torch.tensor(-1.0)

    def train_step(self, step: int) -> list[float]:
        self.optimizer.zero_grad()
        data = batches(step)
        self.tokens = float(sum((labels != -100).sum() for _, labels, _ in data))
        losses = [self.pass_over(self.schedule.step, *each, return_outputs=False) for each in data]
        norm = torch.stack([p.grad.norm() ** 2 for p in self.parameters]).sum()
        dist.all_reduce(norm)
        torch.nn.utils.clip_grads_with_norm_(self.parameters, 0.1, norm.sqrt())
        self.optimizer.step()
        for part in self.model_parts:
            part.eval()
        with torch.no_grad():
            losses.append(self.pass_over(self.schedule.eval, *data[0]))
        for part in self.model_parts:
            part.train()
        return [float(torch.stack(losses[:-1]).sum()), float(norm.sqrt()), float(losses[-1])]


def trained(rank: int, ranks: int, name: str, chunks: int) -> tuple[bool, list[list[float]], dict[str, Tensor]]:
    trainer = Trainer(rank, ranks, name, chunks)
    seen = [trainer.train_step(step) for step in range(STEPS)]
    weights = {n: p.detach() for part in trainer.model_parts for n, p in part.named_parameters()}
    return trainer.last, seen, weights


def plainly() -> tuple[list[list[float]], dict[str, Tensor]]:
    """The whole model in plain torch."""
    model = Transformer(4)
    model.init_weights(set())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen = []
    for step in range(STEPS):
        optimizer.zero_grad()
        data = batches(step)
        tokens = float(sum((labels != -100).sum() for _, labels, _ in data))
        losses = [loss_sum(model(x, attention_masks=mask), labels) / tokens for x, labels, mask in data]
        torch.stack(losses).sum().backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        with torch.no_grad():
            after = loss_sum(model(data[0][0], attention_masks=data[0][2]), data[0][1]) / tokens
        seen.append([float(torch.stack(losses).sum().detach()), float(norm), float(after)])
    return seen, {n: p.detach() for n, p in model.named_parameters()}


@pytest.mark.parametrize(("name", "chunks"), [("1F1B", 1), ("Interleaved1F1B", 2), ("ZBVZeroBubble", 2)])
@pytest.mark.slow
def test_a_trainer_of_torchtitans_shape_learns_what_plain_torch_learns(name, chunks):
    expected, weights = plainly()
    found = run_ranks(trained, 2, name, chunks)
    for last, seen, _ in found:
        for ours, theirs in zip(seen, expected, strict=True):
            assert ours[1] == pytest.approx(theirs[1], rel=1e-4)
            assert not last or ours == pytest.approx(theirs, rel=1e-4)
    assert any(last for last, _, _ in found)
    ours = found[0][2] | found[1][2]
    assert set(ours) == set(weights)
    for key, weight in weights.items():
        torch.testing.assert_close(ours[key], weight, rtol=1e-3, atol=1e-4)
