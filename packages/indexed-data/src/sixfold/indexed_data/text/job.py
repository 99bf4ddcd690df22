"""All that decides the bytes of a build, besides its inputs. Each process of a build gets it.

options, tokenizer --> Job (this file) --> plan.json, parts.py
"""

from __future__ import annotations

from dataclasses import dataclass

from sixfold.indexed_data.errors import IndexedDataError
from sixfold.indexed_data.text.fingerprints import Fingerprint
from sixfold.indexed_data.text.inputs import TextOptions


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What decides the bytes of a build, besides its inputs."""

    text: TextOptions
    tokenizer: str
    eod_token: str | None
    append_eod: bool
    special_tokens: str
    template: bool
    dtype: str
    on_error: str
    provenance: bool
    encoding: Fingerprint

    def __post_init__(self) -> None:
        if self.on_error not in ("fail", "skip"):
            raise IndexedDataError(f"on_error is {self.on_error!r}; it is fail or skip")
