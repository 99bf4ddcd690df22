"""How many ranks a run that is kept alive may have, and the word that asks it for another number.

    config, ranks --> sizes_of, config_of (this file) --> supervisor.py, train.py
    sixfold resize RUN RANKS --> ask (this file) --> RUN/.sixfold-resize --> taken (this file) --> supervisor.py

Only the data-parallel degree changes: the global batch stays, and microbatches for each rank grow.
"""

from __future__ import annotations

import os
import secrets
import time
from dataclasses import replace
from pathlib import Path

from sixfold.gpt.config.rules import check_world
from sixfold.gpt.config.train_config import TrainConfig
from sixfold.gpt.errors import ConfigError

WORD, REFUSED = ".sixfold-resize", "refused:"  # a name that no file of a user has
ANSWER_S = 10.0  # a supervisor looks ten times a second


def config_of(config: TrainConfig, ranks: int) -> TrainConfig:
    """``config`` for another number of ranks."""
    parallel = config.parallel
    return replace(config, parallel=replace(parallel, dp=ranks // (parallel.pp * parallel.cp * parallel.tp)))


def sizes_of(config: TrainConfig, ranks: int) -> tuple[int, ...]:
    """Numbers of ranks that a run of ``ranks`` may go on with, the largest first: itself, and those of ``elastic.dp``.

    Without ``elastic.dp``: half of its data-parallel ranks, half of those, and so on, where the configuration works.

    Raises:
        ConfigError: a degree of ``elastic.dp`` with which the configuration does not work.
    """
    model_ranks = config.parallel.pp * config.parallel.cp * config.parallel.tp
    dp, found = ranks // model_ranks, {ranks}
    for degree in config.elastic.dp:
        try:
            check_world(config_of(config, degree * model_ranks), degree * model_ranks)
        except ConfigError as error:
            raise ConfigError(f"elastic.dp has {degree}, with which the run would not work: {error}") from error
        found.add(degree * model_ranks)
    while not config.elastic.dp and dp % 2 == 0:
        dp //= 2
        try:
            check_world(config_of(config, dp * model_ranks), dp * model_ranks)
        except ConfigError:
            continue
        found.add(dp * model_ranks)
    return tuple(sorted(found, reverse=True))


def ask(run_dir: Path, ranks: int) -> None:
    """Ask the run in a folder to go on with so many ranks; returns when it has taken the word.

    Raises:
        ConfigError: the run cannot have so many; or no run that is kept alive has answered within 10 s. The word is
            taken back.
    """
    word = run_dir / WORD
    if not (run_dir / "metrics.jsonl").is_file():
        raise ConfigError(f"{str(run_dir)!r} is no folder of a run: it has no metrics.jsonl")
    deadline = time.monotonic() + ANSWER_S
    while not _put_first(word, f"{ranks}\n"):  # somebody else has asked, and is heard first
        _wait_for_answer(word, deadline)
    while (text := _read(word)) is not None:
        if text.startswith(REFUSED):
            word.unlink(missing_ok=True)
            raise ConfigError(text.removeprefix(REFUSED).strip())
        _wait_for_answer(word, deadline)


def _wait_for_answer(word: Path, deadline: float) -> None:
    if time.monotonic() > deadline:
        word.unlink(missing_ok=True)
        raise ConfigError(
            f"no run in {str(word.parent)!r} has answered within {ANSWER_S:g} s; only one that `sixfold train "
            "--keep-alive` has started can be resized. Stop another one, and start it again with --ranks"
        )
    time.sleep(0.05)


def taken(run_dir: Path, sizes: tuple[int, ...]) -> int | None:
    """The number of ranks, one of ``sizes``, that the run was asked for; once. Another number is refused."""
    word = run_dir / WORD
    text = (_read(word) or "").strip()
    if not text.isdigit():
        return None
    if int(text) not in sizes:
        works = ", ".join(map(str, sizes))
        _put(word, f"{REFUSED} {text} ranks are asked for; this run can have {works}: see elastic.dp\n")
        return None
    word.unlink(missing_ok=True)
    return int(text)


def _put(word: Path, text: str) -> None:
    """At once, over a word of before."""
    draft = word.with_name(f"{WORD}.{os.getpid()}")
    draft.write_text(text)
    draft.replace(word)


def _put_first(word: Path, text: str) -> bool:
    """At once, unless a word is there."""
    draft = word.with_name(f"{WORD}.{secrets.token_hex(4)}")
    draft.write_text(text)
    try:
        os.link(draft, word)
    except FileExistsError:
        return False
    finally:
        draft.unlink()
    return True


def _read(word: Path) -> str | None:
    try:
        return word.read_text()
    except FileNotFoundError:
        return None
