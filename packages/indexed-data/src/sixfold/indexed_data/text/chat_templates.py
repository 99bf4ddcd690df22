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

Chat = list[dict[str, Any]]
Tools = list[Any] | None
_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")


def chat_encoder(folder: str) -> Callable[..., tuple[list[int], list[bool]]]:
    """What encodes a conversation by the chat template of a transformers tokenizer in ``folder``."""

    @cache
    def loaded() -> Any:  # its own: a call with a template changes how the other takes special tokens
        transformers = extra("transformers", f"tokenizer {folder}")
        return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)

    def encode(messages: Chat, tools: Tools = None) -> tuple[list[int], list[bool]]:
        tokenizer = loaded()
        for number, message in enumerate(messages):
            if not isinstance(message.get("content"), str):
                _refuse_unwritten(tokenizer, messages, tools, number)
        if _MARKED.search(str(tokenizer.chat_template)):
            made = tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
            )
            return list(made["input_ids"]), [bool(each) for each in made["assistant_masks"]]
        return _by_turns(tokenizer, messages, tools)

    return encode


def _refuse_unwritten(tokenizer: Any, messages: Chat, tools: Tools, number: int) -> None:
    """IndexedDataError if the template writes the content of a message, which is no text, as Python does.

    One that takes such content writes nothing for None, and parts as the text that they are together.
    """

    def written(content: Any) -> str:
        changed = [*messages[:number], {**messages[number], "content": content}, *messages[number + 1 :]]
        return str(tokenizer.apply_chat_template(changed, tools=tools, tokenize=False))

    content = messages[number].get("content")
    alike = [""] if content is None else [join.join(part["text"] for part in content) for join in ("", "\n")]
    if written(content) not in [written(each) for each in alike]:
        what = "null" if content is None else "a list of parts"
        raise IndexedDataError(
            f"the content of message {number} is {what}, which the chat template does not write as text; give a text "
            f"there{', such as an empty one' if content is None else ''}"
        )


def _by_turns(tokenizer: Any, messages: Chat, tools: Tools) -> tuple[list[int], list[bool]]:
    whole = _ids(tokenizer, messages, tools, prompt=False)
    mask = [False] * len(whole)
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        if number:
            before = _ids(tokenizer, messages[:number], tools, prompt=True)
        else:  # the template of nothing is an error; a BOS is not said by anybody
            bos = [tokenizer.bos_token_id] if tokenizer.bos_token_id is not None else []
            before = (bos if whole[:1] == bos else []) + _prompt(tokenizer, messages[:1], tools)
        last = number + 1 == len(messages)
        after = whole if last else _ids(tokenizer, messages[: number + 1], tools, prompt=False)
        if whole[: len(before)] != before or whole[: len(after)] != after:
            raise IndexedDataError(
                f"the chat template gives other ids to the turns before message {number} than to the whole; mark what "
                "the assistant says with {% generation %} and {% endgeneration %} in the template"
            )
        mask[len(before) : len(after)] = [True] * (len(after) - len(before))
    return whole, mask


def _prompt(tokenizer: Any, first: Chat, tools: Tools) -> list[int]:
    """What a prompt for an answer begins with."""
    return _ids(tokenizer, first, tools, prompt=True)[len(_ids(tokenizer, first, tools, prompt=False)) :]


def _ids(tokenizer: Any, messages: Chat, tools: Tools, prompt: bool) -> list[int]:
    made = tokenizer.apply_chat_template(
        messages, tools=tools, tokenize=True, return_dict=True, add_generation_prompt=prompt
    )
    return list(made["input_ids"])
