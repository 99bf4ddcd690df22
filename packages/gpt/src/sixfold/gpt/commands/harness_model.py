"""Our models as EleutherAI's evaluation harness (lm-eval) asks them: likelihoods of texts, and greedy texts.

    lm-eval's tasks --> requests --> HarnessModel (this file) --> GPTModel, next_logits.py --> numbers, texts

The harness joins contexts and continuations; what is here encodes, reads and writes. Rows are read as the model was
trained: where each document was read by itself, what follows an end of document does not see it. So the first token of
a text without a context is predicted from that end, and the others from the text alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sixfold.gpt.commands.next_logits import NextLogits, write_all
from sixfold.gpt.commands.sample import Draws, Opened, next_token
from sixfold.gpt.commands.score import document_arguments
from sixfold.gpt.errors import ConfigError

TOKENS = 256  # of an answer, where a task does not say: as lm-eval's own models
NO_HARNESS = "sixfold eval needs lm-eval, EleutherAI's harness: pip install 'sixfold-gpt[eval]'"


def harness_model(run: Opened, *, batch: int = 8) -> Any:
    """An instance of lm-eval's ``LM``.

    Raises:
        ConfigError: lm-eval is not installed.
    """
    try:
        from lm_eval.api.model import TemplateLM
    except ImportError as error:
        raise ConfigError(NO_HARNESS) from error
    return type("SixfoldModel", (HarnessModel, TemplateLM), {})(run, batch)


class HarnessModel:
    """What lm-eval's ``TemplateLM`` leaves to its models. Requests come in any order, and are read longest first."""

    backend = "causal"

    def __init__(self, run: Opened, batch: int) -> None:
        super().__init__()
        self.run, self.batch = run, batch
        self.lead = run.tokenizer.encode("")  # what the tokenizer's template puts before a text
        self.device_of_model = next(run.model.parameters()).device
        largest = max(self.prefix_token_id, *self.lead, 0)
        if largest >= run.model.config.vocab_size:
            raise ConfigError(
                f"tokenizer {run.tokenizer.name!r} gives id {largest}, "
                f"model.vocab_size is {run.model.config.vocab_size}"
            )

    @property
    def eot_token_id(self) -> int:
        """The end of a document."""
        return self.run.tokenizer.eod

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text without a context."""
        return self.lead[0] if self.lead else self.run.tokenizer.eod

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Ids of a text behind the lead of the template.

        The lead is there once if the text has it already, and not at all if ``add_special_tokens`` is False.
        """
        ids, lead = self.run.tokenizer.encode(string), self.lead
        if lead and ids[: len(lead)] == lead and (add_special_tokens is False or ids[len(lead) :][: len(lead)] == lead):
            return ids[len(lead) :]
        return ids

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Of each whole text: every token predicted once, from as much as the context holds of what is before it."""
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        found, windows = [0.0] * len(requests), []
        for number, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            rolled = get_rolling_token_windows(ids, self.prefix_token_id, self.run.context, 1)
            windows += [(number, *make_disjoint_window(one)) for one in rolled]
        for (number, *_), (value, _) in zip(windows, self._loglikelihood_tokens(windows), strict=True):
            found[number] += value
        return found

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """(anything, context, continuation) each --> log-likelihood of the continuation, and whether it is greedy."""
        context, found = self.run.context, [(0.0, False)] * len(requests)
        longest = max((len(one[2]) for one in requests), default=0)
        if longest > context:
            raise ConfigError(
                f"a task asks for {longest} tokens behind a context, and the model takes {context} at most"
            )
        order = sorted(range(len(requests)), key=lambda n: -len(requests[n][1]) - len(requests[n][2]))
        for first in range(0, len(order), self.batch):
            numbers = order[first : first + self.batch]
            rows = [(requests[n][1] + requests[n][2])[-context - 1 :] for n in numbers]
            for n, row, logits in zip(numbers, rows, self._logits([row[:-1] for row in rows]), strict=True):
                wanted = torch.tensor(requests[n][2])
                chances = logits[len(row) - 1 - len(wanted) : len(row) - 1].float().log_softmax(-1).cpu()
                likelihood = float(chances.gather(1, wanted.unsqueeze(1)).sum())
                found[n] = likelihood, bool((chances.argmax(-1) == wanted).all())
        return found

    @torch.inference_mode()
    def _logits(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """(rows, longest, vocabulary). Rows are padded at their ends, which none of their own tokens sees."""
        inputs = np.zeros((len(rows), max(map(len, rows))), dtype=np.int64)
        for number, row in enumerate(rows):
            inputs[number, : len(row)] = row
        apart = document_arguments(inputs, self.run.tokenizer.eod, self.run.document_mask)
        kwargs = {name: tensor.to(self.device_of_model) for name, tensor in apart.items()}
        logits: Tensor = self.run.model(torch.from_numpy(inputs).to(self.device_of_model), **kwargs)
        return logits

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """What the model writes behind each context, until a stop, the end of its document or its last token."""
        answers = [_Answer(self, *request.args) for request in requests]
        order = sorted(answers, key=lambda one: (one.tokens, -len(one.ids)))
        for tokens, alike in groupby(order, key=lambda one: one.tokens):  # no row of a batch outgrows the context
            for part in _batched(alike, self.batch):
                read = NextLogits(self.run.model, max(1, *(len(one.ids) for one in part)) + tokens)
                write_all(part, read, tokens)
        return [one.text() for one in answers]


class _Answer:
    """A context and what is written behind it: a text of ``write_all``."""

    def __init__(self, model: HarnessModel, context: str, wanted: Mapping[str, Any]) -> None:
        self.tokenizer, self.ended = model.run.tokenizer, False
        self.stops, self.tokens, self.how = _asked(wanted)
        if self.tokens >= model.run.context:
            raise ConfigError(
                f"a task asks for answers of {self.tokens} tokens, and the model's context is {model.run.context}; "
                f"give less by --gen-tokens"
            )
        ids = model.tok_encode(context)
        self.ids = ids[-(model.run.context - self.tokens) :]
        self.lead = [] if ids else [model.prefix_token_id]
        self.apart = model.run.document_mask
        self.written: list[int] = []
        self.generator = torch.Generator().manual_seed(self.how.seed)

    def view(self) -> list[int]:
        """What the model reads next; see [Note: how a text without a prompt begins] of sample.py."""
        lead = [] if self.written and self.apart else self.lead
        return lead + self.ids + self.written

    def draw(self, logits: Tensor) -> None:
        """Take the next token; a text that has ended grows by ends of documents."""
        how, eod = self.how, self.tokenizer.eod
        token = eod if self.ended else next_token(logits, how.temperature, how.top_k, self.generator, top_p=how.top_p)
        self.written.append(token)
        if not self.ended:
            self.ended = token == eod or len(self.written) >= self.tokens or self.text() != self._decoded()

    def text(self) -> str:
        """Up to the first stop."""
        text = self._decoded()
        for stop in self.stops:
            text = text.split(stop)[0]
        return text

    def _decoded(self) -> str:
        eod = self.tokenizer.eod
        ends = self.written.index(eod) if eod in self.written else len(self.written)
        return self.tokenizer.decode(self.written[:ends])


def _asked(wanted: Mapping[str, Any]) -> tuple[list[str], int, Draws]:
    """Stops, most tokens, and how to draw, from the ``generation_kwargs`` of a task."""
    rest = dict(wanted)
    until = rest.pop("until", None) or []
    stops = [until] if isinstance(until, str) else list(until)
    limits = [rest.pop(key, None) for key in ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")]
    tokens = next((int(limit) for limit in limits if limit is not None), TOKENS)
    draws: dict[str, Any] = {key: rest.pop(key) for key in ("top_k", "top_p") if key in rest}
    temperature = float(rest.pop("temperature", None) or 0.0)
    if not rest.pop("do_sample", temperature > 0):
        temperature, draws = 0.0, {}
    if rest:
        asked = ", ".join(sorted(rest))
        raise ConfigError(f"a task asks for {asked} in its generation_kwargs, which sixfold eval does not have")
    return [stop for stop in stops if stop], tokens, Draws(temperature=temperature, **{"top_k": 0, **draws})


def _batched(items: Iterable[_Answer], size: int) -> Iterator[list[_Answer]]:
    """itertools.batched, of Python 3.12."""
    rest = iter(items)
    while part := list(islice(rest, size)):
        yield part
