"""Conversations by the chat template of a tokenizer: ids, and which of them a model learns.

messages --> chat_encoder (this file) --> ids, loss mask --> document_ids.py

A model learns what the assistant says. A template that marks it, by ``{% generation %}``, is believed: each token that
has characters in a marked stretch counts. Of another the conversation is encoded up to each of its turns: what the
assistant's turn adds counts, without what a prompt for it begins with. That holds only if each beginning of a
conversation gives a beginning of its ids, which is checked.
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
        made = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        if _MARKED.search(str(made.chat_template)):
            if getattr(made, "backend_tokenizer", None) is None:
                raise NotImplementedError(  # of every conversation, so no line is bad by it
                    f"{folder} has no tokenizer.json, without which nobody knows where in a text its tokens lie; its "
                    "template marks answers by {% generation %}: save a fast tokenizer, or take the marks out"
                )
            _keep_blanks(made)
        return made

    def encode(messages: Chat, tools: Tools = None) -> tuple[list[int], list[bool]]:
        tokenizer = loaded()
        for number, message in enumerate(messages):
            if not isinstance(message.get("content"), str):
                _refuse_unwritten(tokenizer, messages, tools, number)
        if _MARKED.search(str(tokenizer.chat_template)):
            return _Marked(tokenizer).encoded(messages, tools)
        return _by_turns(tokenizer, messages, tools)

    return encode


def _keep_blanks(tokenizer: Any) -> None:
    """Let the offsets of tokens have their blanks, which ``trim_offsets`` leaves out; no id changes.

    Pythia's and RoBERTa's files ask for it. An answer that begins or ends with a blank would belong to no token there.
    """
    import json  # only here: reading pairs should not load it

    backend = tokenizer.backend_tokenizer
    if backend.post_processor is not None:
        said = json.loads(backend.to_str())
        said["post_processor"] = _untrimmed(said["post_processor"])
        backend.post_processor = type(backend).from_str(json.dumps(said)).post_processor


def _untrimmed(said: Any) -> Any:
    if isinstance(said, dict):
        return {key: False if key == "trim_offsets" else _untrimmed(value) for key, value in said.items()}
    return [_untrimmed(each) for each in said] if isinstance(said, list) else said


class _Marked:
    """Stands for a tokenizer in transformers' ``apply_chat_template``, and keeps what that asks of it.

    transformers asks for the tokens of the first and the last character of each marked stretch. Where one is of no
    token, as a line feed of WordPiece, its mask has all that follows, or nothing more. So the stretches are kept, and
    the mask is made of them.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._asked: list[int] = []
        self._offsets: list[tuple[int, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, text: str, **options: Any) -> Any:
        made = self._tokenizer(text, **options, return_offsets_mapping=True)
        self._offsets = made.pop("offset_mapping")
        made.char_to_token = self._token_of
        return made

    def _token_of(self, _: int, character: int) -> int:
        self._asked.append(character)
        return 0

    def encoded(self, messages: Chat, tools: Tools) -> tuple[list[int], list[bool]]:
        """Ids, and whether each is of a marked stretch."""
        made = type(self._tokenizer).apply_chat_template(
            self, messages, tools=tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        stretches = list(zip(self._asked[::2], self._asked[1::2], strict=True))  # first and last character

        def is_marked(begin: int, end: int) -> bool:  # a token without characters lies where it begins
            return any(begin <= last and max(end, begin + 1) > first for first, last in stretches)

        return list(made["input_ids"]), [is_marked(begin, end) for begin, end in self._offsets]


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
