"""The repository as data, for the tests that check its shape.

    packages/*/pyproject.toml, src/**/*.py --> Package, SourceFile (this file) --> test_architecture.py, ...

Reads text only; imports no package.
"""

import ast
import functools
import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE_NAMES = ("blending", "dist-ckpt", "fsdp", "gpt", "indexed-data", "pipeline")


@dataclass(frozen=True, kw_only=True, slots=True)
class Import:
    """One imported module, where it stands, and whether it runs when the file is loaded."""

    module: str  # dotted, absolute
    line: int
    at_load: bool  # False inside a function, and under `if TYPE_CHECKING:`
    for_types: bool


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    path: Path
    tree: ast.Module
    lines: int

    @property
    def place(self) -> str:
        return str(self.path.relative_to(ROOT))

    @functools.cached_property
    def imports(self) -> list[Import]:
        return list(_imports(self.tree, self.path, at_load=True, for_types=False))


@dataclass(frozen=True, kw_only=True)
class Package:
    name: str

    @property
    def folder(self) -> Path:
        return ROOT / "packages" / self.name

    @property
    def module(self) -> str:
        return self.name.replace("-", "_")

    @property
    def source_folder(self) -> Path:
        return self.folder / "src/sixfold" / self.module

    @functools.cached_property
    def project(self) -> dict[str, object]:
        return tomllib.loads((self.folder / "pyproject.toml").read_text())["project"]

    @functools.cached_property
    def required(self) -> set[str]:
        """Import names of the run-time dependencies."""
        return {import_name(line) for line in self.project["dependencies"]}

    @functools.cached_property
    def optional(self) -> set[str]:
        """Import names of the extras, the one for tests left out."""
        extras = self.project.get("optional-dependencies", {})
        return {import_name(line) for extra, lines in extras.items() if extra != "test" for line in lines}

    @functools.cached_property
    def files(self) -> list[SourceFile]:
        files = []
        for path in sorted(self.source_folder.rglob("*.py")):
            text = path.read_text()
            files.append(SourceFile(path=path, tree=ast.parse(text, str(path)), lines=text.count("\n")))
        assert files, f"{self.source_folder} holds no Python file"
        return files


PACKAGES = [Package(name=name) for name in PACKAGE_NAMES]


def import_name(requirement: str) -> str:
    """``sixfold-dist-ckpt>=0.1`` --> ``sixfold.dist_ckpt``; ``torch>=2.11`` --> ``torch``."""
    distribution = re.match(r"[A-Za-z0-9._-]+", requirement)[0].lower()
    if distribution.startswith("sixfold-"):
        return "sixfold." + distribution.removeprefix("sixfold-").replace("-", "_")
    return distribution.replace("-", "_")


def top_of(module: str) -> str:
    """The part of a dotted name that a distribution provides."""
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == "sixfold" else parts[0]


def is_standard(module: str) -> bool:
    return module.split(".")[0] in sys.stdlib_module_names


def functions_of(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def dotted(node: ast.AST) -> str:
    """``a.b.c`` of an attribute chain; empty for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        inner = dotted(node.value)
        return f"{inner}.{node.attr}" if inner else ""
    return ""


def run_at_load(tree: ast.Module) -> Iterator[ast.AST]:
    """Every node that is evaluated when the file is loaded: all but function bodies."""
    todo: list[ast.AST] = list(tree.body)
    while todo:
        node = todo.pop()
        yield node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            todo += [*node.decorator_list, *node.args.defaults, *filter(None, node.args.kw_defaults)]
        elif isinstance(node, ast.Lambda):
            continue
        else:
            todo += ast.iter_child_nodes(node)


def _imports(node: ast.AST, path: Path, *, at_load: bool, for_types: bool) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield Import(module=alias.name, line=node.lineno, at_load=at_load, for_types=for_types)
    elif isinstance(node, ast.ImportFrom):
        yield from _from_import(node, path, at_load, for_types)
    elif isinstance(node, ast.If) and dotted(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
        for child in node.body:
            yield from _imports(child, path, at_load=False, for_types=True)
        for child in node.orelse:
            yield from _imports(child, path, at_load=at_load, for_types=for_types)
    else:
        inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from _imports(child, path, at_load=at_load and not inside, for_types=for_types)


def _from_import(node: ast.ImportFrom, path: Path, at_load: bool, for_types: bool) -> Iterator[Import]:
    base = node.module or ""
    if node.level:
        parts = path.parent.parts
        package = parts[len(parts) - parts[::-1].index("src") :]
        kept = package[: len(package) - node.level + 1]
        base = ".".join([*kept, base] if base else kept)
    # `from sixfold import fsdp` names a package; of other imports the module is enough.
    modules = [f"sixfold.{alias.name}" for alias in node.names] if base == "sixfold" else [base]
    for module in modules:
        yield Import(module=module, line=node.lineno, at_load=at_load, for_types=for_types)
