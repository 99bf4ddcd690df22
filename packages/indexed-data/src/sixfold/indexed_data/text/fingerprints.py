"""What a tokenizer encodes with, in a few lines that two runs of a build can compare.

    Tokenizer --> fingerprint (this file) --> Job --> plan.json, workers.py

[Note: one tokenizer per build] The parts of a build are made by several processes, and perhaps by several runs of the
command. A tokenizer that was edited between two of them would give a pair of two vocabularies and no error. So each
process compares its fingerprint with the one of the plan. It holds the content of the tokenizer's files, and the ids
of a probe text. The probe shows what the files do not: another library, a vocabulary read from elsewhere, a random
seed. A run that resumes also compares the ids of the first documents of each finished part.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

from sixfold.indexed_data.errors import IndexedDataError
from sixfold.indexed_data.text.tokenizer import Tokenizer

# Words, spaces, digits, code, case, scripts with and without spaces, combining marks, symbols: so that few changes of
# an encoding leave all of its ids alone.
PROBE = (
    "The quick brown fox jumps over 13 lazy dogs, doesn't it?  It's 3.14159e-10 or 1,234,567.89!\n\n\tdef f(x_1):\n"
    "        return {'key': [x_1 ** 2, None]} # TODO\r\nNaïve façade, Übergröße, ŁÓDŹ, e\u0301; Привет мир; Γειά σου; "
    "שלום; مرحبا; नमस्ते; 你好，世界。日本語テキスト 한국어; 😀👩‍👩‍👧 → ∑∞ "
    "<s> </s> [CLS] <|endoftext|> https://example.org/a?b=c&d=%20 antidisestablishmentarianism aaaaaaaaaaaaaaaa ZZZZ zq"
)
VARIES = "varies"


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Equal for two tokenizers that encode alike."""

    vocab_size: int
    eod: int | None
    files: str  # digest of the content of the files it is made of
    library: str  # name and version of the library that encodes, if it is not the files themselves
    probe: str  # digest of the ids of PROBE; VARIES where they differ from call to call


def differences(one: Fingerprint, other: Fingerprint) -> list[str]:
    """The names of the fields in which they differ."""
    return [each.name for each in fields(one) if getattr(one, each.name) != getattr(other, each.name)]


def fingerprint(tokenizer: Tokenizer) -> Fingerprint:
    """The fingerprint of a loaded tokenizer. Encodes PROBE twice, and once in a batch.

    Raises:
        IndexedDataError: a batch of it gives other ids.
    """
    once, again = _probed(tokenizer), _probed(tokenizer)
    if once == again and tokenizer.encode_batch is not None and _probed(tokenizer, in_batch=True) not in (once, None):
        raise IndexedDataError(
            f"tokenizer {tokenizer.name}: encode_batch gives other ids than encode; mend it or leave it out"
        )
    return Fingerprint(
        vocab_size=tokenizer.vocab_size,
        eod=tokenizer.eod,
        files=_digest(_content(path) for path in tokenizer.files),
        library=tokenizer.library,
        probe=once if once == again and once is not None else VARIES,
    )


def _probed(tokenizer: Tokenizer, in_batch: bool = False) -> str | None:
    """A digest of the ids of PROBE, or the kind of error; None for a batch of another number of texts."""
    try:
        if in_batch and tokenizer.encode_batch is not None:
            found = list(tokenizer.encode_batch([PROBE, PROBE]))
            if len(found) != 2:
                return None  # its texts are encoded one by one
            ids = found[1]
        else:
            ids = tokenizer.encode(PROBE)
        return _digest([repr([int(i) for i in ids]).encode()])
    except Exception as error:  # whatever the user's code raises; a text that it can encode may still come
        return type(error).__name__


def _content(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:  # a module inside an archive: its probe tells
        return b""


def _digest(pieces: Iterable[bytes]) -> str:
    import hashlib  # only here: reading pairs should not load it

    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(len(piece).to_bytes(8, "little") + piece)
    return digest.hexdigest()
