"""The code blocks of a page, as its reader runs them: from top to bottom in one folder.

    docs/<section>/*.md --> blocks --> Page's run (this file) --> test_site.py

| block | what the test does |
|---|---|
| `python` | runs it; those of a page share their names, as in one session |
| `sh` | runs it with bash, which ends at the first error |
| any with `title="NAME"` | writes it as the file NAME |
| `text` | compares it with what the block above it printed; a line that is `...` stands for any lines |

`<!-- not run: REASON -->` above a block says why it is only looked at: Python that compiles, shell that parses.
"""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FENCE = re.compile(
    r"(?:^<!-- not run: (?P<reason>.+?) -->\n+)?^```(?P<language>\w+)(?P<options>[^\n]*)\n(?P<body>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
LANGUAGES = {"python", "sh", "text", "toml", "yaml", "json", "diff", "c"}
NEEDS_TORCH = re.compile(r"torch|fsdp|dist_ckpt|sixfold-ckpt|sixfold[. ](?!blending|indexed_data|pipeline)")
MARK = "==== end of block"
TIMEOUT_S = 900  # of a block; a minute on a quiet machine


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    language: str
    body: str
    title: str  # of a file; empty for what runs
    not_run: str  # the reason; empty for what runs


def blocks(text: str) -> list[Block]:
    found = []
    for match in FENCE.finditer(text):
        title = re.search(r'title="([^"]+)"', match["options"])
        found.append(
            Block(
                language=match["language"],
                body=match["body"],
                title=title[1] if title else "",
                not_run=match["reason"] or "",
            )
        )
    return found


def is_quick(text: str) -> bool:
    """Whether a page's blocks are one process without torch."""
    running = [block for block in blocks(text) if runs(block)]
    return all(block.language == "python" and not NEEDS_TORCH.search(block.body) for block in running)


def runs(block: Block) -> bool:
    return block.language in ("python", "sh") and not block.title and not block.not_run


def faults(text: str) -> list[str]:
    """What is wrong with the blocks of a page, without running one."""
    wrong = []
    fences = len(re.findall(r"^```\w", text, re.MULTILINE))
    if fences != len(blocks(text)):
        wrong.append(f"{fences} fences begin and {len(blocks(text))} blocks are whole")
    for block in blocks(text):
        first = block.body.strip().split("\n")[0]
        if block.language not in LANGUAGES:
            wrong.append(f"{first}: the language {block.language} is none of {sorted(LANGUAGES)}")
        if block.language == "python":
            try:
                ast.parse(block.body)
            except SyntaxError as error:
                wrong.append(f"{first}: {error}")
    return wrong


def run(text: str, folder: Path) -> list[str]:
    """Run a page's blocks in ``folder``; what came out otherwise than the page says."""
    wrong, output, waiting = [], "", []
    for block in [*blocks(text), None]:
        if waiting and not _joins(block):
            said = list(_run_python(waiting, folder))
            wrong += [line for body, found in zip(waiting, said, strict=True) for line in _against(body, found)]
            waiting, output = [], said[-1]
        if block is None or block.not_run:
            continue
        if block.title:
            (folder / block.title).parent.mkdir(parents=True, exist_ok=True)
            (folder / block.title).write_text(block.body)
        elif block.language == "python":
            waiting.append([block.body, None])
        elif block.language == "text" and waiting:
            waiting[-1][1] = block.body
        elif block.language == "text":
            wrong += _differences(block.body, output)
        elif block.language == "sh":
            output = _run(["bash", "-euo", "pipefail", "-c", block.body], folder)
    return wrong


def _joins(block: Block | None) -> bool:
    """Whether a block belongs to the run of Python above it: more of it, or what it prints."""
    return block is not None and not block.not_run and block.language in ("python", "text") and not block.title


def _against(waiting: list[str | None], found: str) -> list[str]:
    return _differences(waiting[1], found) if waiting[1] is not None else []


def _differences(said: str, found: str) -> list[str]:
    """Lines of ``said`` that ``found`` has not, in their order."""
    left, wrong = [line.rstrip() for line in found.splitlines()], []
    for line in (line.rstrip() for line in said.splitlines()):
        if line == "...":
            continue
        if line not in left:
            wrong.append(f"the page says {line!r}, and the block printed\n{found}")
            continue
        left = left[left.index(line) + 1 :]
    return wrong


def _run_python(waiting: list[list[str | None]], folder: Path) -> Iterator[str]:
    """What each of the blocks printed, run in one process."""
    script = f"\nprint({MARK!r}, flush=True)\n".join(str(body) for body, _ in waiting)
    (folder / "page.py").write_text(script)
    yield from _run([sys.executable, "page.py"], folder).split(f"{MARK}\n")


def _run(command: list[str], folder: Path) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg", "COLUMNS": "110"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode:
        raise AssertionError(f"status {done.returncode} of\n{command[-1]}\n{done.stdout}\n{done.stderr}")
    return done.stdout
