"""Tokenizers by name; the code is in data/tokenizer.py."""

from sixfold.gpt.data.tokenizer import (
    ByteTokenizer,
    FileTokenizer,
    NoTokenizer,
    Tokenizer,
    tokenizer_for,
    tokenizer_of,
)

__all__ = ["ByteTokenizer", "FileTokenizer", "NoTokenizer", "Tokenizer", "tokenizer_for", "tokenizer_of"]
