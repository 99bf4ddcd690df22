"""Sentences of a Markdown page, their lengths, and turns of phrase that stopped readers.

    python tests-integration/prose.py README.md docs/start/*.md      what a page has too long, sentence by sentence

page -> prose_blocks (paragraphs, items, cells; no code, no pictures) -> sentences -> Reading
"""

import re
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path

MOST_WORDS = 40  # of one sentence
MOST_WORDS_ON_AVERAGE = 18  # of the sentences of a page
# Each stopped somebody who read a page for the first time; the remedy is what the reader is to know.
BANNED = {
    r"\b(?:is|are|was|were|be) told of\b": "say who says what: 'the run warns about'",
    r"\bgo(?:es)? past\b": "say what is skipped or not used",
    r"\bends? this word\b": "say which characters end a name",
    r"\bin an afternoon\b": "say how many lines which folder has",
    r"\bby accident\b": "say which condition must hold",
    r"\bnone empty\b": "say 'at least one'",
    r"\bthe rest is silence\b|\bso to speak\b": "leave it out",
    r"\b(?:hears|tells) of (?:it|them|that)\b": "say who is notified and how",
    r"\bby halves\b": "say 'in part'",
    r"\bat a look\b|\bon the way\b": "say when",
}
CODE_BLOCK = re.compile(r"^([ \t]*)```.*?^\1```[^\n]*$", re.MULTILINE | re.DOTALL)
ABBREVIATIONS = re.compile(r"\b(e\.g|i\.e|vs|cf|approx|no|Fig|Sec|et al|etc)\.", re.IGNORECASE)
END = re.compile(r"(?<=[.!?])[)\"'*_]*\s+(?=[(\[\"'*_`]*(?:[A-Z0-9`]|code\b))")


@dataclass(frozen=True, slots=True)
class Reading:
    """What a page asks of its reader."""

    words: list[int]  # of each sentence
    too_long: list[str]  # sentences of more than MOST_WORDS words
    banned: list[str] = field(default_factory=list)  # "phrase: what to say"

    @property
    def mean(self) -> float:
        return statistics.mean(self.words) if self.words else 0.0


def prose_blocks(text: str) -> list[str]:
    """Paragraphs, items of lists and cells of tables, one line each, without code blocks, headings and pictures."""
    text = re.sub(r"\A---\n.*?\n---\n", "", text, flags=re.DOTALL)
    text = CODE_BLOCK.sub("\n", text)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    blocks: list[str] = [""]
    for line in text.splitlines():
        bare = line.strip()
        if re.match(r"^(#|!\[|<|\|?\s*:?-{3,}|:::)", bare) or not bare:
            blocks.append("")
        elif bare.startswith("|"):
            blocks += [*(cell.strip() for cell in re.split(r"(?<!\\)\|", bare)), ""]
        elif re.match(r"^([-*+]|\d+[.)])\s|^(\?\?\?|!!!)", bare):
            blocks.append(re.sub(r"^([-*+]|\d+[.)])\s+", "", bare))
        else:
            blocks[-1] = f"{blocks[-1]} {bare}".strip()
    return [block for block in blocks if block]


def plain(block: str) -> str:
    """The words of a block: a piece of code is one word, a link its text."""
    block = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", block)
    block = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", block)
    block = re.sub(r"``[^`]+``|`[^`]+`", "code", block)
    return re.sub(r"<[^>]+>", "", block)


def sentences(text: str) -> list[str]:
    found = []
    for block in prose_blocks(text):
        whole = ABBREVIATIONS.sub(lambda match: match.group(1) + " ", plain(block))
        found += [part.strip() for part in END.split(whole) if part.strip()]
    return found


def count(sentence: str) -> int:
    """Words: what stands between blanks and has a letter or a digit."""
    return sum(bool(re.search(r"\w", word)) for word in sentence.split())


def read(text: str) -> Reading:
    found = sentences(text)
    lengths = [count(sentence) for sentence in found]
    prose = " ".join(found)
    banned = [
        f"{match.group(0)!r}: {remedy}"
        for pattern, remedy in BANNED.items()
        for match in re.finditer(pattern, prose, re.IGNORECASE)
    ]
    long = [sentence for sentence, words in zip(found, lengths, strict=True) if words > MOST_WORDS]
    return Reading([words for words in lengths if words > 3], long, banned)


def main() -> None:
    for name in sys.argv[1:]:
        reading = read(Path(name).read_text())
        print(f"{name}: {len(reading.words)} sentences of {reading.mean:.1f} words in the mean")
        for sentence in sentences(Path(name).read_text()):
            if count(sentence) > 30:
                print(f"   {count(sentence):3d} words: {sentence}")
        for phrase in reading.banned:
            print(f"   {phrase}")


if __name__ == "__main__":
    main()
