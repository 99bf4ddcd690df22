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
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

FENCE = re.compile(
    r"(?:^<!-- not run: (?P<reason>.+?) -->\n+)?^```(?P<language>\w+)(?P<options>[^\n]*)\n(?P<body>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
LANGUAGES = {"python", "sh", "text", "toml", "yaml", "json", "diff", "c"}
NEEDS_TORCH = re.compile(r"torch|fsdp|dist_ckpt|sixfold-ckpt|sixfold[. ](?!blending|indexed_data|pipeline)")
MARK = "==== end of block"
DRIVER = """
import json, sys
names, mark = {"__name__": "__main__"}, sys.argv.pop()
for line in sys.stdin:
    exec(compile(json.loads(line), "page", "exec"), names)
    print(mark, flush=True)
"""
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
    wrong: list[str] = []
    output = ""
    with Python(folder) as python:
        for block in blocks(text):
            if block.not_run:
                continue
            if block.title:
                (folder / block.title).parent.mkdir(parents=True, exist_ok=True)
                (folder / block.title).write_text(block.body)
            elif block.language == "python":
                output = python.run(block.body)
            elif block.language == "sh":
                output = _shell(block.body, folder)
            elif block.language == "text":
                wrong += _differences(block.body, output)
    return wrong


class Python:
    """One interpreter, started by the first block, that runs blocks as a session does."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> "Python":
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    def run(self, body: str) -> str:
        """What the block prints."""
        if self._process is None:
            command = [sys.executable, "-u", "-c", DRIVER, MARK]
            self._process = subprocess.Popen(
                command,
                cwd=self._folder,
                env=_environment(),
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        assert self._process.stdin and self._process.stdout, "both are pipes"
        self._process.stdin.write(json.dumps(body) + "\n")
        self._process.stdin.flush()
        printed: list[str] = []
        for line in self._process.stdout:
            if line.rstrip() == MARK:
                return "".join(printed)
            printed.append(line)
        raise AssertionError(f"Python ended in\n{body}\n{''.join(printed)}")


def _environment() -> dict[str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg", "COLUMNS": "110"}


def _shell(body: str, folder: Path) -> str:
    command = ["bash", "-euo", "pipefail", "-c", body]
    done = subprocess.run(command, cwd=folder, env=_environment(), capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode:
        raise AssertionError(f"status {done.returncode} of\n{body}\n{done.stdout}\n{done.stderr}")
    return done.stdout


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
