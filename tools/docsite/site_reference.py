""" "Reference": the public names, the commands and the configuration.

    packages/*/src --> pages (this file) --> site_pages.py --> mkdocstrings, command_help.py

Names are those of each package's ``__all__``; their docstrings are read by mkdocstrings when the site is built.
So are the commands' help texts, by command_help.py, which runs the commands. The configuration is read from its
dataclasses' source.
"""

import ast
import io
import re
import tokenize
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from site_raises import BASES, first_line, last

HELP = "<!-- help of {} -->"  # what hooks.py puts a command's help in the place of
COMMANDS = {
    "sixfold": "sixfold.gpt.command",
    "sixfold-data": "sixfold.indexed_data.cli",
    "sixfold-ckpt": "sixfold.dist_ckpt.__main__",
    "sixfold-pipeline": "sixfold.pipeline.cli",
    "python -m sixfold.blending": "sixfold.blending.__main__",
    "python -m sixfold.fsdp.cost_model": "sixfold.fsdp.cost_model",
}
SETTINGS = ("config/model_config.py", "config/train_config.py", "config/lora.py")
# Modules that a package's __init__ does not hold and its users import by name.
BESIDE = {
    "blending": ("torch",),
    "dist-ckpt": ("dcp", "optimizers", "retention", "strategies.torch", "strategies.fully_parallel"),
    "fsdp": ("cost_model",),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """One key of a table of the configuration."""

    name: str
    type: str
    default: str
    meaning: str  # the comment beside it


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    name: str
    meaning: str
    keys: list[Key]


def pages(root: Path) -> dict[str, str]:
    api = {f"reference/{package}.md": api_page(package, root) for package in BASES}
    return {
        "reference/README.md": overview(),
        **api,
        "reference/commands.md": commands_page(),
        "reference/configuration.md": configuration_page(root),
    }


def overview() -> str:
    lines = [f"- [sixfold-{package}]({package}.md): the names of `{module_of(package)}`" for package in BASES]
    return OVERVIEW + "\n".join(lines) + "\n- [Commands](commands.md)\n- [Configuration](configuration.md)\n"


def api_page(package: str, root: Path) -> str:
    """A directive for each public name, and for modules that are imported by name."""
    module = module_of(package)
    text = (root / f"packages/{package}/src/{module.replace('.', '/')}/__init__.py").read_text()
    parts = [f"# {module}\n", (ast.get_docstring(ast.parse(text)) or "").split("\n")[0] + "\n"]
    parts += [f"::: {module}.{name}\n" for name in public_names(package, root) if not _is_module(module, name, root)]
    for beside in BESIDE.get(package, ()):
        parts.append(f"::: {module}.{beside}\n    options: {{show_root_full_path: true}}\n")
    return "\n".join(parts)


def public_names(package: str, root: Path) -> list[str]:
    """``__all__``, in which pipeline's splices that of its schedules."""
    folder = root / f"packages/{package}/src" / module_of(package).replace(".", "/")
    for node in ast.parse((folder / "__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and last(node.targets[0]) == "__all__" and isinstance(node.value, ast.List):
            names = [str(item.value) for item in node.value.elts if isinstance(item, ast.Constant)]
            return names + (_schedules(folder) if len(names) < len(node.value.elts) else [])
    raise ValueError(f"{folder}/__init__.py has no __all__")


def _schedules(folder: Path) -> list[str]:
    """Functions under ``@schedule(...)``."""
    return sorted(
        node.name
        for path in sorted((folder / "schedules").glob("*.py"))
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef)
        and any(isinstance(mark, ast.Call) and last(mark.func) == "schedule" for mark in node.decorator_list)
    )


def _is_module(module: str, name: str, root: Path) -> bool:
    path = root / "packages" / module.split(".")[1].replace("_", "-") / "src" / module.replace(".", "/") / name
    return path.is_dir() or path.with_suffix(".py").is_file()


def commands_page() -> str:
    parts = ["# Commands\n", "Each as its own `--help` prints it.\n"]
    for command, module in COMMANDS.items():
        parts += [f"## {command}\n", HELP.format(module) + "\n"]
    return "\n".join(parts)


def configuration_page(root: Path) -> str:
    parts = ["# Configuration\n", CONFIGURATION]
    said = tomllib.loads((root / "docs/reference/configuration.toml").read_text())
    for table in tables(root):
        parts += [f"## [{table.name}]\n", f"{table.meaning}\n", "| key | type | default | |", "|---|---|---|---|"]
        for key in table.keys:
            meaning = key.meaning or said.get(table.name, {}).get(key.name, "")
            parts.append(f"| `{key.name}` | {_code(key.type)} | {_code(key.default)} | {meaning} |")
        parts.append("")
    return "\n".join(parts)


def tables(root: Path) -> list[Table]:
    """The tables of gpt's configuration, in the order of their source."""
    found = []
    for name in SETTINGS:
        text = (root / "packages/gpt/src/sixfold/gpt" / name).read_text()
        comments = _comments(text)
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef) and "Table" in map(last, node.bases):
                keys = list(_keys(node, comments))
                meaning = first_line(node).split(": ", 1)[-1]
                found.append(Table(name=_table_name(node), meaning=meaning[0].upper() + meaning[1:], keys=keys))
    return found


def _keys(node: ast.ClassDef, comments: dict[int, str]) -> Iterator[Key]:
    for line in node.body:
        if isinstance(line, ast.AnnAssign) and last(line.target) != "TABLE":
            default = "" if line.value is None else ast.unparse(line.value)
            default = re.sub(r"field\(default_factory=(\w+)\)", r"\1()", default)
            yield Key(
                name=last(line.target),
                type=ast.unparse(line.annotation),
                default=default,
                meaning=comments.get(line.end_lineno or 0, ""),
            )


def _table_name(node: ast.ClassDef) -> str:
    for line in node.body:
        if isinstance(line, ast.AnnAssign) and last(line.target) == "TABLE" and isinstance(line.value, ast.Constant):
            return str(line.value.value)
    raise ValueError(f"{node.name} has no TABLE")


def _comments(text: str) -> dict[int, str]:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}


def _code(text: str) -> str:
    return f"`{text}`".replace("|", "\\|") if text else "required"


def module_of(package: str) -> str:
    return "sixfold." + package.replace("-", "_")


OVERVIEW = """\
# Reference

Public names come from the packages' docstrings, commands from their own help, the configuration from its dataclasses.
A name that is not here is not public; `packages/<name>/tests/golden/api.txt` holds the same names with their
signatures, and a test compares them with the code.

"""
CONFIGURATION = """\
The tables and keys of a run's TOML file (`sixfold train run.toml`, `TrainConfig.from_toml`). On the command line
`table.key=value` behind the file overrides one. `Positive` is a whole number >= 1, `Count` >= 0, `Size` a number >=
0, `Rate` > 0, `Fraction` in [0, 1). An unknown key, a value of the wrong type and tables that do not fit together are
refused before anything starts.
"""
