"""Let a model write, one token at a time.

    prompt --> tokenizer --> model --> temperature, top k, one draw --> next token   (this file) --> text

The model sees the last ``context`` tokens at each position; it keeps no cache. Draws come from a generator of
their own on the CPU, so a seed gives the same text whatever ran before.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from sixfold.gpt.errors import ConfigError

if TYPE_CHECKING:
    from sixfold.gpt.config import TrainConfig
    from sixfold.gpt.model import GPTModel
    from sixfold.gpt.tokenizer import Tokenizer


def next_token(logits: torch.Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    """Draw a token.

    Args:
        logits: (vocab_size,), any float dtype, on the CPU.
        temperature: 0 takes the likeliest, the lowest id among equals.
        top_k: only the K likeliest can be drawn; 0 allows all.
    """
    scores = logits.double()
    if temperature == 0:
        return int(scores.argmax())
    if 0 < top_k < len(scores):
        least = scores.topk(top_k).values[-1]
        scores = scores.masked_fill(scores < least, float("-inf"))
    return int(torch.multinomial((scores / temperature).softmax(0), 1, generator=generator))


@torch.inference_mode()
def sample(
    model: GPTModel,
    tokenizer: Tokenizer,
    prompt: str = "",
    *,
    tokens: int = 200,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
    context: int = 1024,
) -> str:
    """What ``model`` writes after ``prompt``, the prompt not included.

    An empty prompt is the start of a document. The text ends with its document or after ``tokens`` tokens.

    Args:
        context: tokens that the model sees at most; longer than it was trained on is of no use.
    Raises:
        ConfigError: a value outside its range, or a prompt with ids that the model does not have.
    """
    _check(tokens, temperature, top_k, context)
    ids = [tokenizer.eod, *tokenizer.encode(prompt)]
    # The lead token stands for the document before; with text to go on from, the text alone is the context.
    ids = ids[1:] or ids
    vocab_size, written = model.config.vocab_size, list[int]()
    if max(ids) >= vocab_size:
        raise ConfigError(f"tokenizer {tokenizer.name!r} gives id {max(ids)}, model.vocab_size is {vocab_size}")
    generator, device = torch.Generator().manual_seed(seed), next(model.parameters()).device
    for _ in range(tokens):
        logits = model(torch.tensor([(ids + written)[-context:]], device=device))[0, -1]
        token = next_token(logits.cpu(), temperature, top_k, generator)
        if token == tokenizer.eod:
            break
        written.append(token)
    return tokenizer.decode(written)


def _check(tokens: int, temperature: float, top_k: int, context: int) -> None:
    for name, value, least in (("tokens", tokens, 0), ("top_k", top_k, 0), ("context", context, 1)):
        if value < least:
            raise ConfigError(f"{name} is {value}; it is >= {least}")
    if not 0 <= temperature < float("inf"):
        raise ConfigError(f"temperature is {temperature}; it is >= 0, and 0 takes the likeliest token")


def open_run(path: str | Path) -> tuple[GPTModel, TrainConfig, Tokenizer]:
    """Model, config and tokenizer of a run folder or checkpoint folder, for one process on the CPU.

    Raises:
        ConfigError: no checkpoint there. CheckpointError: it is damaged.
    """
    from sixfold.gpt.checkpoint import find
    from sixfold.gpt.load import load_model, saved_config
    from sixfold.gpt.tokenizer import tokenizer_of

    folder = find(path)
    config = saved_config(folder)
    return load_model(folder), config, tokenizer_of(config.data.blend, config.data.tokenizer)


def sample_run(
    path: str | Path, prompt: str = "", *, tokens: int = 200, temperature: float = 0.8, top_k: int = 50, seed: int = 0
) -> str:
    """``sample`` with the model, tokenizer and context length of a run folder or checkpoint folder."""
    _check(tokens, temperature, top_k, 1)
    model, config, tokenizer = open_run(path)
    return sample(
        model,
        tokenizer,
        prompt,
        tokens=tokens,
        temperature=temperature,
        top_k=top_k,
        seed=seed,
        context=config.data.seq_length,
    )
