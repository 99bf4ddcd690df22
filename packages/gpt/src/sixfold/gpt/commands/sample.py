"""Let a model write, one token at a time.

    prompt --> tokenizer --> model --> temperature, top k, top p, one draw --> next token   (this file) --> text

[Note: how a text without a prompt begins] With the end of a document alone: what follows it is a first token. A model
that reads each document by itself (data.document_mask, the default) has met that end behind its document only, never
before a text. So it goes with the first draw, and the text goes on as one whose first token was the prompt.

The model sees the last ``context`` tokens at each position; it keeps no cache. Draws come from a generator of
their own on the CPU, so a seed gives the same text whatever ran before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sixfold.gpt.errors import ConfigError

if TYPE_CHECKING:
    from sixfold.gpt.data.tokenizer import Tokenizer
    from sixfold.gpt.model.decoder import GPTModel


def next_token(
    logits: torch.Tensor, temperature: float, top_k: int, generator: torch.Generator, *, top_p: float = 1.0
) -> int:
    """Draw a token: temperature, then the K likeliest, then of these the likeliest that together have ``top_p``.

    Args:
        logits: (vocab_size,), any float dtype, on the CPU.
        temperature: 0 takes the likeliest, the lowest id among equals.
        top_k: only the K likeliest can be drawn; 0 allows all.
        top_p: in (0, 1]: the fewest tokens whose probabilities reach it (arXiv 1904.09751); 1 allows all.
    """
    scores = logits.double()
    if temperature == 0:
        return int(scores.argmax())
    if 0 < top_k < len(scores):
        least = scores.topk(top_k).values[-1]
        scores = scores.masked_fill(scores < least, float("-inf"))
    chances = (scores / temperature).softmax(0)
    if top_p < 1:
        falling, ids = chances.sort(descending=True, stable=True)
        chances[ids[falling.cumsum(0) - falling >= top_p]] = 0.0  # multinomial takes weights of any sum
    return int(torch.multinomial(chances, 1, generator=generator))


@dataclass(frozen=True, kw_only=True, slots=True)
class Draws:
    """How tokens are drawn, see `next_token`; checked when made.

    Attributes:
        tokens: at most this many.
        seed: of the draws' own generator.
        context: tokens that the model sees at most; longer than it was trained on is of no use.
        document_mask: the model was trained to read each document by itself, as runs do by default; see [Note: how a
            text without a prompt begins].
    Raises:
        ConfigError: a value outside its range.
    """

    tokens: int = 200
    temperature: float = 0.8
    top_k: int = 50
    top_p: float = 1.0
    seed: int = 0
    context: int = 1024
    document_mask: bool = True

    def __post_init__(self) -> None:
        for name, value, least in (("tokens", self.tokens, 0), ("top_k", self.top_k, 0), ("context", self.context, 1)):
            if value < least:
                raise ConfigError(f"{name} is {value}; it is >= {least}")
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(f"temperature is {self.temperature}; it is >= 0, and 0 takes the likeliest token")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p is {self.top_p}; it is > 0 and <= 1, and 1 allows every token")


def sample(model: GPTModel, tokenizer: Tokenizer, prompt: str = "", **draws: Any) -> str:
    """The text that ``model`` writes after ``prompt``, without the prompt. Arguments and errors as of `stream`."""
    return "".join(stream(model, tokenizer, prompt, **draws))


def stream(model: GPTModel, tokenizer: Tokenizer, prompt: str = "", **draws: Any) -> Iterator[str]:
    """Yield the text that ``model`` writes after ``prompt``, in pieces. Together they are what `sample` returns.

    An empty prompt is the start of a document: its template's first token (a BOS) where the tokenizer adds one, else
    the end of the document before; see [Note: how a text without a prompt begins]. The text ends with its document or
    after so many tokens. A character whose last token has not come yet waits for it.

    Args:
        draws: fields of `Draws`.
    Raises:
        ConfigError: a value outside its range, or a prompt with ids that the model does not have.
    """
    how = Draws(**draws)
    ids = tokenizer.encode(prompt)
    lead = [] if ids else [tokenizer.eod]
    vocab_size, largest = model.config.vocab_size, max(lead + ids)
    if largest >= vocab_size:
        raise ConfigError(f"tokenizer {tokenizer.name!r} gives id {largest}, model.vocab_size is {vocab_size}")
    generator, device = torch.Generator().manual_seed(how.seed), next(model.parameters()).device

    def draw(written: list[int]) -> int:
        before = [] if written and how.document_mask else lead
        with torch.inference_mode():
            logits = model(torch.tensor([(before + ids + written)[-how.context :]], device=device))[0, -1]
            return next_token(logits.cpu(), how.temperature, how.top_k, generator, top_p=how.top_p)

    return _pieces(draw, tokenizer, how.tokens, ids)


def _pieces(
    draw: Callable[[list[int]], int], tokenizer: Tokenizer, tokens: int, prompt: Sequence[int]
) -> Iterator[str]:
    """Text of the tokens that ``draw`` gives, from what was written before, until the document's end.

    Decoded behind the prompt: many a tokenizer takes the space away from what it decodes first.
    """
    written, shown = list[int](), len(tokenizer.decode(prompt))
    for _ in range(tokens):
        token = draw(written)
        if token == tokenizer.eod:
            break
        written.append(token)
        text = tokenizer.decode([*prompt, *written])
        if len(whole := text.rstrip("\ufffd")) > shown:  # a part of a character is decoded as U+FFFD
            yield whole[shown:]
            shown = len(whole)
    if rest := tokenizer.decode([*prompt, *written])[shown:]:
        yield rest


@dataclass(frozen=True, kw_only=True, slots=True)
class Opened:
    """A trained model and what it is sampled with.

    Attributes:
        context: length of the rows that it was trained on.
        document_mask: it was trained to read each document by itself; False of an import.
    """

    model: GPTModel
    context: int
    tokenizer: Tokenizer
    document_mask: bool


def open_run(path: str | Path, tokenizer: str = "", eod_token: str = "", *, ema: bool = False) -> Opened:
    """Open a run folder or checkpoint folder on the CPU: the model, the length of its rows and the tokenizer.

    Args:
        tokenizer, eod_token: as of `tokenizer_for`; "" are the run's own.
        ema: the average of the weights in their place.
    Raises:
        ConfigError: there is no checkpoint or no tokenizer, or no average.
        CheckpointError: the checkpoint is damaged.
    """
    from sixfold.gpt.checkpoints.trained_model import (
        IMPORTED,
        load_model,
        longest_row,
        saved_common,
        saved_config,
        saved_tokenizer,
    )
    from sixfold.gpt.checkpoints.training_state import find

    folder = find(path)
    found = saved_tokenizer(folder, tokenizer, eod_token)
    apart = IMPORTED not in saved_common(folder) and saved_config(folder).data.document_mask
    return Opened(model=load_model(folder, ema=ema), context=longest_row(folder), tokenizer=found, document_mask=apart)


def stream_run(
    path: str | Path, prompt: str = "", *, tokenizer: str = "", eod_token: str = "", ema: bool = False, **draws: Any
) -> Iterator[str]:
    """``stream`` with the model, tokenizer and context length of a run folder or checkpoint folder; see `open_run`."""
    Draws(**draws)  # refused before a model is read
    run = open_run(path, tokenizer, eod_token, ema=ema)
    return stream(
        run.model, run.tokenizer, prompt, **{"context": run.context, "document_mask": run.document_mask} | draws
    )


def sample_run(path: str | Path, prompt: str = "", **options: Any) -> str:
    """What ``stream_run`` gives, as one text."""
    return "".join(stream_run(path, prompt, **options))
