"""One micro-batch on one core, and one whole update, beside a plain torch Llama under autocast.

    python -m pytest packages/gpt/benchmarks/bench_model.py --benchmark-only

Both hold the same weights in number and shape; ours keeps them in bfloat16, as fsdp hands them out, and the plain
loop casts them in each forward. ``extra_info`` has the tokens of a micro-batch; the time is CPU time of the process.
"""

import time
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sixfold.gpt.config.train_config import GPTConfig, TrainConfig
from sixfold.gpt.data.token_stream import Microbatch
from sixfold.gpt.engine.rank_model import build_rank
from sixfold.gpt.engine.step import train_step
from sixfold.gpt.launch.rendezvous import World
from sixfold.gpt.model.decoder import GPTModel
from sixfold.gpt.parallel.mesh import make_mesh

_BYTES = {"vocab_size": 257}  # the demo's tokenizer
SHAPES = {
    "demo 4x192 b8 s256": (
        GPTConfig(num_layers=4, hidden_size=192, num_attention_heads=3, ffn_hidden_size=512, **_BYTES),
        8,
    ),
    "10.8M 6x384 b4 s256": (
        GPTConfig(num_layers=6, hidden_size=384, num_attention_heads=6, ffn_hidden_size=1024, **_BYTES),
        4,
    ),
}
SEQ = 256


class PlainBlock(nn.Module):
    """A Llama layer as one writes it: fused qkv, torch's RMSNorm and scaled_dot_product_attention."""

    def __init__(self, c: GPTConfig) -> None:
        super().__init__()
        h, f = c.hidden_size, c.ffn_hidden_size
        self.heads = c.num_attention_heads
        self.norm_a, self.norm_f = nn.RMSNorm(h, c.norm_eps), nn.RMSNorm(h, c.norm_eps)
        self.qkv, self.out = nn.Linear(h, 3 * h, bias=False), nn.Linear(h, h, bias=False)
        self.gate, self.up, self.down = (nn.Linear(*io, bias=False) for io in ((h, f), (h, f), (f, h)))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm_a(x)).chunk(3, -1))

        def turn(t: Tensor) -> Tensor:
            first, second = t.chunk(2, -1)
            return t * cos + torch.cat((-second, first), -1) * sin

        mixed = F.scaled_dot_product_attention(turn(q), turn(k), v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        h = self.norm_f(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Plain(nn.Module):
    """The whole plain model; its head is tied."""

    def __init__(self, c: GPTConfig, seq: int = SEQ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(PlainBlock(c) for _ in range(c.num_layers))
        self.norm = nn.RMSNorm(c.hidden_size, c.norm_eps)
        angles = torch.arange(seq).outer(c.rope_theta ** (-torch.arange(0, c.head_dim, 2) / c.head_dim))
        for name, t in (("cos", angles.cos()), ("sin", angles.sin())):
            self.register_buffer(name, torch.cat((t, t), -1).bfloat16())

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        logits = F.linear(self.norm(x), self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


@pytest.mark.benchmark(timer=time.process_time, min_rounds=5, max_time=2.0, warmup=True, warmup_iterations=1)
@pytest.mark.parametrize("who", ["sixfold", "sixfold documents", "plain autocast"])
@pytest.mark.parametrize("shape", SHAPES)
def test_forward_and_backward(benchmark, who, shape):
    config, b = SHAPES[shape]
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, config.vocab_size, (b, SEQ), generator=generator)
    labels, mask = tokens.roll(-1, 1), torch.ones(b, SEQ)
    cuts = torch.randint(1, b * SEQ, (b,), generator=generator).tolist() if who == "sixfold documents" else []
    cu = torch.tensor(sorted({*range(0, b * SEQ + 1, SEQ), *cuts}), dtype=torch.int32)
    if who == "plain autocast":
        model: nn.Module = Plain(config)

        def step() -> None:
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(tokens, labels)
            loss.backward()
            model.zero_grad()
    else:
        model = GPTModel(config).bfloat16()

        def step() -> None:
            model(tokens, cu_seqlens=cu, labels=labels, loss_mask=mask).sum().backward()
            model.zero_grad()

    benchmark.extra_info.update(tokens=b * SEQ, parameters=config.num_parameters)
    benchmark(step)


CONFIG = """
model = {{num_layers = {c.num_layers}, hidden_size = {c.hidden_size}, num_attention_heads = {c.num_attention_heads}, \
ffn_hidden_size = {c.ffn_hidden_size}, vocab_size = 257}}
data = {{blend = ["unused"], seq_length = 256}}
train = {{steps = 1, global_batch_size = {b}, micro_batch_size = {b}}}
optimizer = {{lr = 1e-4}}
parallel = {{sharding = "{sharding}"}}
run = {{dir = "unused", device = "cpu"}}
"""


def sixfold_update(config: GPTConfig, b: int, sharding: str, tokens: Tensor, *overrides: str) -> Callable[[], object]:
    """One update of the train loop in one process: runner, fsdp, norm, clip, AdamW."""
    text = CONFIG.format(c=config, b=b, sharding=sharding)
    world = World(rank=0, size=1, local_rank=0, store=None, device=torch.device("cpu"))
    train_config = TrainConfig.from_text(text, overrides)
    rank = build_rank(train_config, make_mesh(train_config.parallel, world, world.device, 60.0), world)
    cu = torch.arange(0, b * SEQ + 1, SEQ, dtype=torch.int32)
    kwargs = {
        "labels": tokens.roll(-1, 1),
        "loss_mask": torch.ones(b, SEQ),
        "cu_seqlens": cu,
        "position_ids": torch.arange(SEQ).expand(b, SEQ),
    }
    batch = [Microbatch(tokens=tokens, kwargs=kwargs, targets=float(b * SEQ))]
    return lambda: train_step(rank, batch, 1e-4)


def plain_update(config: GPTConfig, tokens: Tensor, precision: str = "bf16") -> Callable[[], object]:
    """The same by hand: autocast (none for ``fp32``), clip_grad_norm_, fused AdamW."""
    model = Plain(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    labels = tokens.roll(-1, 1)

    def update() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = model(tokens, labels) / tokens.numel()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()

    return update


@pytest.mark.benchmark(timer=time.process_time, min_rounds=5, max_time=3.0, warmup=True, warmup_iterations=2)
@pytest.mark.parametrize("who", ["sixfold no_shard", "sixfold zero3", "plain autocast"])
@pytest.mark.parametrize("shape", SHAPES)
def test_update(benchmark, who, shape):
    config, b = SHAPES[shape]
    torch.set_num_threads(1)
    tokens = torch.randint(0, config.vocab_size, (b, SEQ), generator=torch.Generator().manual_seed(0))
    if who == "plain autocast":
        update = plain_update(config, tokens)
    else:
        sharding = "no_shard" if who.endswith("no_shard") else "optim_grads_params"
        update = sixfold_update(config, b, sharding, tokens, "fsdp.gathered_bytes=double")
    benchmark.extra_info.update(tokens=b * SEQ, parameters=config.num_parameters)
    benchmark(update)
