"""What mkdocs calls while it builds the site: pages made from the code join those of docs/.

site_pages.pages --> hooks (this file) --> mkdocs --> site/
"""

import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import site_pages
import site_reference
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

NAMED = ("move/", "do/", "understand/")  # others call a package's page after the package, as search is not to


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.nav = [filled for entry in config.nav or [] if (filled := _filled(entry))]
    return config


def on_files(files: Files, /, *, config: MkDocsConfig) -> Files:
    for address, page in site_pages.pages().items():
        if page.made:
            files.append(File.generated(config, address, content=page.text))
    for address, path in site_pages.pictures().items():
        files.append(File.generated(config, address, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, /, *, page: Any, config: MkDocsConfig, files: Files) -> str:
    text = site_pages.pages()[page.file.src_uri].text
    return re.sub(site_reference.HELP.format(r"([\w.]+)"), lambda found: command_help()[found[1]], text)


@cache
def command_help() -> dict[str, str]:
    """The help of each command as Markdown, by the module that it is in."""
    tool = Path(__file__).with_name("command_help.py")
    done = subprocess.run(
        [sys.executable, str(tool), *site_reference.COMMANDS.values()],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{tool.name} ended with status {done.returncode}:\n{done.stderr}")
    found = json.loads(done.stdout)
    return {module: "\n".join(_one_help(*one) for one in enumerate(texts.items())) for module, texts in found.items()}


def _one_help(index: int, said: tuple[str, str]) -> str:
    """The first is the command's own and stands below its heading; verbs get headings."""
    name, text = said
    heading = f"### {name}\n\n" if index else ""
    return f"{heading}```text\n{text.rstrip()}\n```\n"


def _filled(entry: dict[str, Any]) -> dict[str, Any] | None:
    """``Do: do/`` --> ``Do: [do/README.md, the pages that it links]``; nothing where there is no page."""
    ((title, value),) = entry.items()
    if not str(value).endswith("/"):
        return entry if value in site_pages.pages() else None
    found, names = site_pages.section(value), site_pages.titles(value) if value in NAMED else {}
    return {title: [{names[page]: page} if page in names else page for page in found]} if found else None
