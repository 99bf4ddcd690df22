"""Conversations by the chat template of a tokenizer: ids, and which of them a model learns.

messages --> chat_encoder (this file) --> ids, loss mask --> document_ids.py

A model learns what the assistant says. A template that marks it, by ``{% generation %}``, is believed. Of another the
conversation is encoded up to each of its turns: what the assistant's turn adds counts, without what a prompt for it
begins with. That holds only if each beginning of a conversation gives a beginning of its ids, which is checked.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

from sixfold.indexed_data.errors import IndexedDataError
from sixfold.indexed_data.extras import extra

Messages = list[dict[str, Any]]
_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")


def chat_encoder(folder: str) -> Callable[[Messages], tuple[list[int], list[bool]]]:
    """What encodes a conversation by the chat template of a transformers tokenizer in ``folder``."""

    @cache
    def loaded() -> Any:  # its own: a call with a template changes how the other takes special tokens
        transformers = extra("transformers", f"tokenizer {folder}")
        return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)

    def encode(messages: Messages) -> tuple[list[int], list[bool]]:
        tokenizer = loaded()
        if _MARKED.search(str(tokenizer.chat_template)):
            made = tokenizer.apply_chat_template(
                messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
            )
            return list(made["input_ids"]), [bool(each) for each in made["assistant_masks"]]
        return _by_turns(tokenizer, messages)

    return encode


def _by_turns(tokenizer: Any, messages: Messages) -> tuple[list[int], list[bool]]:
    whole = _ids(tokenizer, messages, prompt=False)
    mask = [False] * len(whole)
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = _ids(tokenizer, messages[:number], prompt=True) if number else _prompt(tokenizer, messages[:1])
        after = whole if number + 1 == len(messages) else _ids(tokenizer, messages[: number + 1], prompt=False)
        if whole[: len(before)] != before or whole[: len(after)] != after:
            raise IndexedDataError(
                f"the chat template gives other ids to the turns before message {number} than to the whole; mark what "
                "the assistant says with {% generation %} and {% endgeneration %} in the template"
            )
        mask[len(before) : len(after)] = [True] * (len(after) - len(before))
    return whole, mask


def _prompt(tokenizer: Any, first: Messages) -> list[int]:
    """What a prompt for an answer begins with: the template of nothing is an error."""
    return _ids(tokenizer, first, prompt=True)[len(_ids(tokenizer, first, prompt=False)) :]


def _ids(tokenizer: Any, messages: Messages, prompt: bool) -> list[int]:
    made = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, add_generation_prompt=prompt)
    return list(made["input_ids"])
