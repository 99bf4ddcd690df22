"""Let a model write, one token at a time.

    prompt --> tokenizer --> next_logits.py --> temperature, top k, top p, one draw --> next token (this file) --> text

[Note: how a text without a prompt begins] With the end of a document alone: what follows it is a first token. A model
that reads each document by itself (data.document_mask, the default) has seen that end only behind a document, never
before a text. So that end is left out after the first draw, and the text goes on as if its first token was the prompt.

[Note: a full context] The model sees the last ``context`` tokens. It reads each token once until the context is full.
From then on each token that leaves moves all others by one position, and they are read anew: a token costs a whole
context. With ``drop = n`` the n oldest tokens leave at once, so the context is read anew once in n tokens.

Draws come from a generator of their own on the CPU, so a seed gives the same text whatever ran before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sixfold.gpt.commands.next_logits import NextLogits, in_view, write_all
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
        cache: keep what the model has read, so that a token costs one token's work; else all is read for each token.
        drop: how many of the oldest tokens leave when the context is full; 1 keeps the context longest, and more is
            faster, see [Note: a full context].
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
    cache: bool = True
    drop: int = 1

    def __post_init__(self) -> None:
        for name, least in (("tokens", 0), ("top_k", 0), ("context", 1), ("drop", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} is {getattr(self, name)}; it is >= {least}")
        if self.drop > self.context:
            raise ConfigError(f"drop is {self.drop} and the context {self.context}; drop is at most the context")
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
    text = _Text(model.config.vocab_size, tokenizer, prompt, how)  # refused here, not at the first piece
    return _pieces(model, text, how)


def sample_many(model: GPTModel, tokenizer: Tokenizer, prompts: Sequence[str], **draws: Any) -> list[str]:
    """What `sample` gives for each prompt, read as one batch. Each text is drawn by a generator of its own.

    It is the text that the prompt has alone, unless rounding decides between two tokens. Arguments, errors: `stream`.
    """
    how = Draws(**draws)
    texts = [_Text(model.config.vocab_size, tokenizer, prompt, how) for prompt in prompts]
    write_all(texts, NextLogits(model, max((text.longest for text in texts), default=0), cache=how.cache), how.tokens)
    return [text.written() for text in texts]


def _pieces(model: GPTModel, text: _Text, how: Draws) -> Iterator[str]:
    read = NextLogits(model, text.longest, cache=how.cache)
    for _ in range(how.tokens):
        piece = text.draw(read([text.view()])[0].cpu())
        if text.ended:
            break
        if piece:
            yield piece
    if rest := text.rest():
        yield rest


class _Text:
    """A prompt and what is written behind it, until its document ends.

    [Note: what is decoded] New tokens are decoded behind the prompt, because many tokenizers take the space away from
    the first token that they decode. Of a long text only the tail is decoded, which starts with a whole character.
    ``shown`` counts the characters of the decoded tail that were given out, or are of the prompt.
    """

    TAIL = 64  # tokens; the tail grows to twice as many

    def __init__(self, vocab_size: int, tokenizer: Tokenizer, prompt: str, how: Draws) -> None:
        self.tokenizer, self.how, self.ended = tokenizer, how, False
        ids = tokenizer.encode(prompt)
        self.lead = [] if ids else [tokenizer.eod]
        if (largest := max(self.lead + ids)) >= vocab_size:
            raise ConfigError(f"tokenizer {tokenizer.name!r} gives id {largest}, model.vocab_size is {vocab_size}")
        self.ids, self.prompt_tokens = ids, len(ids)
        self.tail, self.shown = list(ids), len(tokenizer.decode(ids))  # [Note: what is decoded]
        self.longest = min(how.context, len(self.lead + ids) + how.tokens)
        self.generator = torch.Generator().manual_seed(how.seed)

    def view(self) -> list[int]:
        """What the model sees. [Note: how a text without a prompt begins]"""
        lead = [] if self.ids and self.how.document_mask else self.lead
        return in_view(lead + self.ids, self.how.context, self.how.drop)

    def draw(self, logits: torch.Tensor) -> str:
        """Take the next token, and give the text that is certain by now; nothing once the document has ended."""
        how = self.how
        if not self.ended:
            token = next_token(logits, how.temperature, how.top_k, self.generator, top_p=how.top_p)
            self.ended = token == self.tokenizer.eod
        if self.ended:
            self.ids.append(self.tokenizer.eod)  # in a batch rows grow alike
            return ""
        self.ids.append(token)
        self.tail.append(token)
        text = self.tokenizer.decode(self.tail)
        whole = text.rstrip("\ufffd")  # a part of a character is decoded as U+FFFD
        piece, self.shown = whole[self.shown :], max(self.shown, len(whole))
        if len(self.tail) >= 2 * self.TAIL and len(text) == self.shown:
            shorter = self.tokenizer.decode(self.tail[-self.TAIL :])
            if text.endswith(shorter):
                self.tail, self.shown = self.tail[-self.TAIL :], len(shorter)
        return piece

    def written(self) -> str:
        """The whole text, without the prompt."""
        ends = self.ids.index(self.tokenizer.eod, self.prompt_tokens) if self.ended else len(self.ids)
        prompt = self.tokenizer.decode(self.ids[: self.prompt_tokens])
        return self.tokenizer.decode(self.ids[:ends])[len(prompt) :]

    def rest(self) -> str:
        """What is left to give out after the last token."""
        return self.tokenizer.decode(self.tail)[self.shown :]


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
        ema: take the average of the weights (``optimizer.ema_decay``) in their place.
    Raises:
        ConfigError: there is no checkpoint, no tokenizer or no average.
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
    run, draws = _opened(path, tokenizer, eod_token, ema, draws)
    return stream(run.model, run.tokenizer, prompt, **draws)


def sample_run(path: str | Path, prompt: str = "", **options: Any) -> str:
    """What ``stream_run`` gives, as one text."""
    return "".join(stream_run(path, prompt, **options))


def sample_run_many(
    path: str | Path,
    prompts: Sequence[str],
    *,
    tokenizer: str = "",
    eod_token: str = "",
    ema: bool = False,
    **draws: Any,
) -> list[str]:
    """``sample_many`` with the model, tokenizer and context length of a run folder or checkpoint folder."""
    run, draws = _opened(path, tokenizer, eod_token, ema, draws)
    return sample_many(run.model, run.tokenizer, prompts, **draws)


def _opened(
    path: str | Path, tokenizer: str, eod_token: str, ema: bool, draws: dict[str, Any]
) -> tuple[Opened, dict[str, Any]]:
    """A run, and ``draws`` with the run's own context and mask where they are not given."""
    # Refused before the model is read. The run's context is not known yet: one that takes any drop stands for it.
    Draws(**{"context": draws.get("drop", 1)} | draws)
    run = open_run(path, tokenizer, eod_token, ema=ema)
    return run, {"context": run.context, "document_mask": run.document_mask} | draws
