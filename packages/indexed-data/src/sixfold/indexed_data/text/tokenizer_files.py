"""Tokenizers that a model's files hold: tokenizer.json, SentencePiece's .model, a folder of transformers.

path --> from_tokenizer_file, from_sentencepiece, from_transformers (this file) --> Tokenizer

A document is stored whole: what cuts, fills or varies its ids is switched off, and a note says so.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from sixfold.indexed_data.errors import IndexedDataError
from sixfold.indexed_data.extras import extra
from sixfold.indexed_data.text.chat_templates import chat_encoder
from sixfold.indexed_data.text.tokenizer import Tokenizer


def from_tokenizer_file(path: str, eod_token: str | None, special_as_text: bool, template: bool) -> Tokenizer:
    """The tokenizer of a Hugging Face ``tokenizer.json``; see ``load_tokenizer``."""
    tokenizers = extra("tokenizers", f"tokenizer {path}")
    if not os.path.isfile(path):  # a pipe would wait for its writer
        raise IndexedDataError(f"{path}: no such tokenizer file")
    try:
        loaded = tokenizers.Tokenizer.from_file(path)
    except Exception as error:  # the library raises bare Exception
        raise IndexedDataError(f"{path}: not a Hugging Face tokenizer file: {error}") from error
    return _of_backend(path, loaded, eod_token, special_as_text, template)


def _of_backend(path: str, loaded: Any, eod_token: str | None, special_as_text: bool, template: bool) -> Tokenizer:
    tokenizers = extra("tokenizers", f"tokenizer {path}")
    eod = None if eod_token is None else _eod_of(path, loaded.token_to_id(eod_token), eod_token)
    if special_as_text:
        if not hasattr(loaded, "encode_special_tokens"):
            raise IndexedDataError(
                f"tokenizers {tokenizers.__version__} always takes special tokens out of text; install 0.20 or later, "
                'or pass special_tokens="ids"'
            )
        loaded.encode_special_tokens = True
    changed = [f"{what} is switched off: documents are stored whole" for what in _made_whole(loaded)]
    if not template and loaded.num_special_tokens_to_add(False):
        added = ", ".join(loaded.encode("").tokens)
        changed.append(f"its template, which adds {added}, is left out; template=True (--template) takes it")
    highest = max(loaded.get_vocab(with_added_tokens=True).values(), default=-1)  # there may be gaps: not their number
    # Offsets into the text are a third of the time, and nobody here wants them.
    encode_all = getattr(loaded, "encode_batch_fast", loaded.encode_batch)
    return Tokenizer(
        path,
        highest + 1,
        eod,
        lambda text: loaded.encode(text, add_special_tokens=template).ids,
        lambda ids: str(loaded.decode(ids, skip_special_tokens=False)),
        files=(path,),
        library=f"tokenizers {tokenizers.__version__}",
        notes=tuple(f"{path}: {what}" for what in changed),
        special_texts=tuple(str(token) for token in loaded.get_added_tokens_decoder().values() if token.special),
        encode_batch=lambda texts: [each.ids for each in encode_all(texts, add_special_tokens=template)],
    )


def _eod_of(path: str, eod: int | None, eod_token: str) -> int:
    if eod is None:
        raise IndexedDataError(f"{path}: has no token {eod_token!r}; eod_token names one of its tokens")
    return eod


def _made_whole(loaded: Any) -> list[str]:
    """Switch off what cuts, fills or varies the ids of a document; the names of what was on."""
    found = []
    if loaded.truncation is not None:
        found.append(f"truncation to {loaded.truncation['max_length']} tokens")
        loaded.no_truncation()
    if loaded.padding is not None:
        found.append(f"padding with {loaded.padding['pad_token']}")
        loaded.no_padding()
    if dropout := getattr(loaded.model, "dropout", None):
        found.append(f"dropout of {dropout:g}")
        loaded.model.dropout = None
    return found


def from_sentencepiece(path: str, eod_token: str | None, template: bool) -> Tokenizer:
    """The tokenizer of a SentencePiece model. Its EOD is its ``</s>``, or ``eod_token``; its template is a BOS."""
    sentencepiece = extra("sentencepiece", f"tokenizer {path}")
    if not os.path.isfile(path):
        raise IndexedDataError(f"{path}: no such tokenizer file")
    try:
        loaded = sentencepiece.SentencePieceProcessor(model_file=path)
    except Exception as error:  # a RuntimeError, or an OSError
        raise IndexedDataError(f"{path}: not a SentencePiece model: {error}") from error
    eod = loaded.eos_id()
    if eod_token is not None:
        found = loaded.piece_to_id(eod_token)
        eod = _eod_of(path, found if loaded.id_to_piece(found) == eod_token else None, eod_token)
    if template and loaded.bos_id() < 0:
        raise IndexedDataError(f"template is given with tokenizer {path}; the model has no BOS to add")
    return Tokenizer(
        path,
        loaded.vocab_size(),
        eod if eod >= 0 else None,
        lambda text: loaded.encode(text, out_type=int, add_bos=template),
        lambda ids: str(loaded.decode(ids)),
        files=(path,),
        library=f"sentencepiece {sentencepiece.__version__}",
        may_spell_eod=eod >= 0 and not loaded.is_control(eod),
        encode_batch=lambda texts: loaded.encode(texts, out_type=int, add_bos=template),
    )


def from_transformers(folder: str, eod_token: str | None, special_as_text: bool, template: bool) -> Tokenizer:
    """The tokenizer of a folder that ``save_pretrained`` wrote. Its EOD is its ``eos_token``, or ``eod_token``.

    One that is made of a tokenizer.json inside follows all rules of that file. No code of the folder is run.
    """
    transformers = extra("transformers", f"tokenizer {folder}")
    if not os.path.isfile(os.path.join(folder, "tokenizer_config.json")):
        raise IndexedDataError(
            f"{folder}: has no tokenizer_config.json; give a folder that save_pretrained of a tokenizer wrote"
        )
    try:
        loaded = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of any kind
        raise IndexedDataError(f"{folder}: transformers cannot load it: {type(error).__name__}: {error}") from error
    token = eod_token or loaded.eos_token
    names = sorted(entry.path for entry in os.scandir(folder) if entry.is_file() and _holds_no_weights(entry.name))
    backend = getattr(loaded, "backend_tokenizer", None)
    if backend is not None:
        made = _of_backend(folder, backend, token, special_as_text, template)
        made = replace(made, library=f"{made.library}, transformers {transformers.__version__}")
    else:
        options = {"add_special_tokens": template, "split_special_tokens": special_as_text}
        known = loaded.get_vocab()
        made = Tokenizer(
            folder,
            max(known.values(), default=-1) + 1,
            None if token is None else _eod_of(folder, known.get(token), token),
            lambda text: loaded(text, **options)["input_ids"],
            lambda ids: str(loaded.decode(ids, skip_special_tokens=False)),
            library=f"transformers {transformers.__version__}",
            special_texts=tuple(map(str, loaded.all_special_tokens)),
        )
    has_template = getattr(loaded, "chat_template", None) is not None
    return replace(made, files=tuple(names), encode_chat=chat_encoder(folder) if has_template else None)


def _holds_no_weights(name: str) -> bool:
    return not name.endswith((".safetensors", ".bin", ".pt", ".pth", ".gguf", ".msgpack", ".h5"))
