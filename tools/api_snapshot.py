"""The public API of each package as text, so that a change of it is seen in review.

    __all__ of sixfold.<module> --> lines (this file) --> packages/<package>/tests/golden/api.txt

    python tools/api_snapshot.py [package ...]            print
    python tools/api_snapshot.py --write [package ...]    write the golden files (default: all packages)

Signatures are read from the source and not from the running objects: those print differently from one Python
or numpy to the next. A class shows its fields and methods, inherited ones from our own bases included.
"""

import argparse
import ast
import importlib
import importlib.util
import inspect
import textwrap
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PACKAGES = Path(__file__).parent.parent / "packages"

# Modules that DESIGN.md names to users beside the package itself.
PUBLIC_MODULES = {
    "blending": ("order", "torch"),
    "dist-ckpt": (
        "background",
        "dcp",
        "hugging_face",
        "retention",
        "stores",
        "strategies",
        "strategies.torch",
        "strategies.fully_parallel",
        "strategies.zarr",
        "strategies.base",
        "strategies.async_utils",
        "strategies.checkpointable",
        "utils",
        "dict_utils",
        "exchange_utils",
        "optimizers",
        "tools",
    ),
    "fsdp": ("cost_model", "layout", "residency"),
    "pipeline": ("passes",),
}
SPECIAL_METHODS = ("__init__", "__call__", "__getitem__", "__len__", "__iter__", "__enter__", "__exit__")


def snapshot(package: str) -> str:
    """The whole text of one package's api.txt."""
    module = f"sixfold.{package.replace('-', '_')}"
    blocks = [describe_module(importlib.import_module(module))]
    for name in PUBLIC_MODULES.get(package, ()):
        if _exists(f"{module}.{name}"):
            blocks.append(describe_module(importlib.import_module(f"{module}.{name}")))
    return "\n".join(blocks)


def golden_path(package: str) -> Path:
    return PACKAGES / package / "tests" / "golden" / "api.txt"


def describe_module(module: types.ModuleType) -> str:
    """A heading and one block per public name, sorted."""
    names = getattr(module, "__all__", None)
    if names is None and hasattr(module, "__path__"):
        raise SystemExit(f"{module.__name__} has no __all__; a package's public names are those it lists there")
    if names is None:  # a plain module: what it defines itself
        own = {name: value for name, value in vars(module).items() if not name.startswith("_")}
        names = [name for name, value in own.items() if getattr(value, "__module__", "") == module.__name__]
    lines = [f"# {module.__name__}"]
    for name in sorted(names):
        lines += describe(name, getattr(module, name))
    return "\n".join(lines) + "\n"


def describe(name: str, value: Any) -> list[str]:
    if isinstance(value, types.ModuleType):
        return [f"module {name}"]
    if inspect.isclass(value):
        bases = ", ".join(base.__name__ for base in value.__bases__ if base is not object)
        return [*_decorators(value), f"class {name}({bases})" if bases else f"class {name}", *_class_lines(value)]
    if inspect.isroutine(value):
        node = _source_of(inspect.unwrap(value))
        return [_function_line(node, name)] if isinstance(node, ast.FunctionDef) else [f"def {name}(...)"]
    return [f"{name}: {type(value).__name__}"]


def _decorators(cls: type) -> list[str]:
    """A dataclass's options are part of its API: keyword-only, frozen."""
    node = _source_of(cls)
    return [f"@{ast.unparse(d)}" for d in node.decorator_list] if isinstance(node, ast.ClassDef) else []


def _class_lines(cls: type) -> list[str]:
    """Fields in order (they are arguments of a dataclass), then methods by name; a subclass's own come first."""
    fields: dict[str, str] = {}
    methods: dict[str, str] = {}
    for klass in cls.__mro__:
        if not klass.__module__.startswith("sixfold"):
            continue
        node = _source_of(klass)
        assert isinstance(node, ast.ClassDef), f"the source of {klass} is not a class"
        for statement in node.body:
            for name, line in _member(statement):
                (methods if isinstance(statement, ast.FunctionDef) else fields).setdefault(name, line)
    return [*fields.values(), *(methods[name] for name in sorted(methods))]


def _member(statement: ast.stmt) -> Iterator[tuple[str, str]]:
    """Name and line of a public field, enum value or method."""
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        if not statement.target.id.startswith("_"):
            yield statement.target.id, f"    {ast.unparse(statement)}"
    elif isinstance(statement, ast.Assign):
        for target in statement.targets:
            if isinstance(target, ast.Name) and not target.id.startswith("_"):
                yield target.id, f"    {ast.unparse(statement)}"
    elif isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
        name = statement.name
        if name in SPECIAL_METHODS or not name.startswith("_"):
            kinds = [ast.unparse(d) for d in statement.decorator_list]
            shown = [k for k in kinds if k in ("property", "classmethod", "staticmethod", "cached_property")]
            yield name, "    " + "".join(f"@{k} " for k in shown) + _function_line(statement, name)


def _function_line(node: ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> str:
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"def {name}({ast.unparse(node.args)}){returns}"


def _source_of(value: Any) -> ast.stmt:
    return ast.parse(textwrap.dedent(inspect.getsource(value))).body[0]


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("packages", nargs="*", default=sorted(p.parent.name for p in PACKAGES.glob("*/pyproject.toml")))
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    for package in arguments.packages:
        text = snapshot(package)
        if arguments.write:
            golden_path(package).parent.mkdir(parents=True, exist_ok=True)
            golden_path(package).write_text(text)
        else:
            print(text)


if __name__ == "__main__":
    main()
