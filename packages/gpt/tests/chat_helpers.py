"""A tiny Llama with a tokenizer and a chat template, as transformers writes such a folder, and conversations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

MARKED = (
    "{% for message in messages %}<|start|>{{ message.role }}\n{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}<|end|>{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ message.content }}<|end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
WORDS = ["cat", "dog", "what", "is", "a", "an", "animal", "yes", "no", "thanks", "one", "two", "three", "four"]


def conversations(count: int, seed: int = 0) -> list[list[dict[str, str]]]:
    """Chats of one to three questions and answers; each third begins with what the system says."""
    rng = np.random.default_rng(seed)

    def says(role: str) -> dict[str, str]:
        return {"role": role, "content": " ".join(rng.choice(WORDS, rng.integers(1, 6)))}

    chats = []
    for number in range(count):
        turns = [says(role) for _ in range(rng.integers(1, 4)) for role in ("user", "assistant")]
        chats.append(([says("system")] if number % 3 == 0 else []) + turns)
    return chats


def write_chats(path: Path, chats: list[list[dict[str, str]]]) -> None:
    """A conversation a line, under the key ``messages``."""
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))


def write_chat_model(folder: Path, *, template: str = MARKED, **sizes: int) -> Any:
    """A random Llama of transformers beside its tokenizer; returns (model, tokenizer)."""
    from hf_helpers import peer
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|start|>", "<|end|>", "<eod>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    bpe.train_from_iterator([turn["content"] for chat in conversations(50) for turn in chat], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<eod>", additional_special_tokens=["<|start|>", "<|end|>"]
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": None}
    model = peer("llama", vocab_size=len(tokenizer), **sizes)
    for key, value in ids.items():
        setattr(model.config, key, value)
        setattr(model.generation_config, key, value)
    model.save_pretrained(folder)
    return model, tokenizer
