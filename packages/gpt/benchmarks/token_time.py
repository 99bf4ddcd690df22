"""CPU time of one more token behind 64 and behind 2,000, with the cache and without, beside transformers' own cache.

    OMP_NUM_THREADS=1 python packages/gpt/benchmarks/token_time.py [ROUNDS]

Scale: Llama of 10.8 M parameters (6 layers of 384, 6 heads, 2 key heads) with 2,048 ids, float32, one thread, one row.
The ways take turns; a round is the mean of 16 tokens with a cache and one token without. The floor is the layers' and
the head's matrix products of one token, done alone.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch

from sixfold.gpt import GPTModel
from sixfold.gpt.commands.next_logits import NextLogits
from sixfold.gpt.config.train_config import GPTConfig

SHAPE = {"num_layers": 6, "hidden_size": 384, "num_attention_heads": 6, "num_query_groups": 2, "ffn_hidden_size": 1024}
CONFIG = GPTConfig(**SHAPE, vocab_size=2048, tie_embeddings=False)
TOKENS = 16
IDS = torch.randint(0, 2048, (2100,), generator=torch.Generator().manual_seed(0)).tolist()


def ours(behind: int, *, cache: bool) -> Callable[[], float]:
    """CPU seconds of a token."""
    model = GPTModel(CONFIG).eval()

    def run() -> float:
        read = NextLogits(model, behind + TOKENS + 1, cache=cache)
        if cache:
            read([IDS[:behind]])
        start, tokens = time.process_time(), TOKENS if cache else 1
        for more in range(1, tokens + 1):
            read([IDS[: behind + more]])
        return (time.process_time() - start) / tokens

    return run


def transformers_cache(behind: int) -> Callable[[], float]:
    """The same of transformers' Llama and its DynamicCache, called as its generate calls it."""
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=2048,
            hidden_size=384,
            intermediate_size=1024,
            num_hidden_layers=6,
            num_attention_heads=6,
            num_key_value_heads=2,
            max_position_embeddings=4096,
        )
    ).eval()

    @torch.inference_mode()
    def run() -> float:
        kept = DynamicCache(config=model.config)
        model(torch.tensor([IDS[:behind]]), past_key_values=kept, logits_to_keep=1)
        start = time.process_time()
        for more in range(TOKENS):
            model(torch.tensor([[IDS[behind + more]]]), past_key_values=kept, logits_to_keep=1)
        return (time.process_time() - start) / TOKENS

    return run


def products() -> Callable[[], float]:
    """One token by every matrix of the model, nothing else."""
    model = GPTModel(CONFIG)
    matrices = [one for name, one in model.named_parameters() if one.dim() > 1 and name != "embedding.weight"]
    rows = {width: torch.randn(1, width) for width in (384, 1024)}

    @torch.inference_mode()
    def run() -> float:
        start = time.process_time()
        for _ in range(TOKENS):
            for matrix in matrices:
                torch.nn.functional.linear(rows[matrix.shape[1]], matrix)
        return (time.process_time() - start) / TOKENS

    return run


def main(rounds: int) -> None:
    ways = {
        (name, behind): way(behind)
        for behind in (64, 2000)
        for name, way in (
            ("with the cache", lambda n: ours(n, cache=True)),
            ("without", lambda n: ours(n, cache=False)),
            ("transformers, its cache", transformers_cache),
        )
    }
    ways["floor: its matrix products alone", 64] = products()
    taken: dict[tuple[str, int], list[float]] = {key: [] for key in ways}
    for turn in range(rounds + 1):
        for key, run in ways.items():
            seconds = run()
            if turn:  # the first warms up
                taken[key].append(seconds)
    print("| one more token | behind 64 tokens, CPU ms | behind 2,000 tokens, CPU ms |\n|---|---|---|")
    for name in dict.fromkeys(name for name, _ in ways):
        cells = [
            f"{1e3 * min(taken[name, behind]):.2f} ({1e3 * statistics.median(taken[name, behind]):.2f})"
            if (name, behind) in taken
            else ""
            for behind in (64, 2000)
        ]
        print(f"| {name} | {cells[0]} | {cells[1]} |")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10)
