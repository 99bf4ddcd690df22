"""Every message of a package's typed errors, read from its source.

    packages/<name>/src/**/*.py --> messages (this file) --> site_errors.py

A message is a template: fixed words, with ``{name}`` or ``{...}`` where a value stands. Wherever an error is made, by
``raise`` or not, its text is followed through names, constants, helper functions and their callers; where that ends,
the longer texts of the function that makes it stand for it. Syntax trees alone: nothing is imported.
"""

import ast
import functools
import gc
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

BASES = {
    "indexed-data": ("IndexedDataError",),
    "blending": ("BlendingError",),
    "dist-ckpt": ("CheckpointError",),
    "pipeline": ("ScheduleError",),
    "fsdp": ("FsdpError",),
    "gpt": ("ConfigError", "TrainError"),
}
DEEPEST = 4  # names and calls that a text is followed through
MOST_FORMS = 60  # of one call's text
LONG_ENOUGH = 16  # characters of a text that stands for a message which could not be followed
PLACE = "{...}"
LEAVES = frozenset((ast.JoinedStr, ast.Constant, ast.Name, ast.Load, ast.Store, ast.Del))  # no error is made inside
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Message:
    """One text of one error class in one file."""

    kind: str
    module: str  # dotted
    text: str  # a template; its values in braces


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    name: str
    bases: tuple[str, ...]
    module: str
    meaning: str  # its docstring's first line


@dataclass(frozen=True, kw_only=True, eq=False)
class Source:
    """What stands where in a package, by name: one pass over its syntax trees."""

    functions: dict[str, list[tuple[str, Function]]]
    classes: dict[str, list[tuple[str, ast.ClassDef]]]
    calls: dict[str, list[tuple[str, Function | None, ast.Call]]]  # by the last part of the name
    of_classes: dict[str, list[tuple[str, Function | None, ast.Call]]]  # by the part before it
    constants: dict[str, list[ast.expr]]  # of modules and classes
    meanings: dict[str, str]  # of modules: the first lines of their docstrings

    locals: dict[Function, dict[str, list[ast.expr]]] = field(default_factory=dict)

    def local(self, function: Function) -> dict[str, list[ast.expr]]:
        """What names of a function are assigned."""
        if function in self.locals:
            return self.locals[function]
        found = self.locals[function] = {}
        for node in ast.walk(function):
            target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
            if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and node.value:
                found.setdefault(last(target), []).append(node.value)
        return found

    def add(self, module: str, tree: ast.Module) -> None:
        self.meanings[module] = first_line(tree)
        todo: list[tuple[Function | None, ast.AST]] = [(None, tree)]
        while todo:
            inside, node = todo.pop()
            within = inside
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                self.functions.setdefault(node.name, []).append((module, node))
                within = node
            elif isinstance(node, ast.ClassDef):
                self.classes.setdefault(node.name, []).append((module, node))
            elif isinstance(node, ast.Call):
                self.calls.setdefault(last(node.func), []).append((module, inside, node))
                if isinstance(node.func, ast.Attribute):
                    self.of_classes.setdefault(last(node.func.value), []).append((module, inside, node))
            elif isinstance(node, ast.Assign) and inside is None and isinstance(node.targets[0], ast.Name):
                self.constants.setdefault(node.targets[0].id, []).append(node.value)
            for name in node._fields:  # as ast.iter_child_nodes does, in half of its time
                value = getattr(node, name, None)
                if isinstance(value, list):
                    todo += [(within, child) for child in value if isinstance(child, ast.AST)]
                elif isinstance(value, ast.AST) and type(value) not in LEAVES:
                    todo.append((within, value))


@functools.cache
def source(folder: Path) -> Source:
    root, code = folder / "src", Source(functions={}, classes={}, calls={}, of_classes={}, constants={}, meanings={})
    collects = gc.isenabled()
    gc.disable()  # trees have no circles to find; looking for them takes more time than all else
    try:
        for path in sorted(root.rglob("*.py")):
            module = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
            code.add(module, ast.parse(path.read_text(), str(path)))
    finally:
        if collects:
            gc.enable()
    return code


@functools.cache
def kinds(package: str, root: Path) -> dict[str, Kind]:
    """The typed errors of a package: its bases and what is derived from them, bases first."""
    code = source(root / "packages" / package)
    found: dict[str, Kind] = {}
    wanted = set(BASES[package])
    while True:
        new = {
            name: Kind(name=name, bases=tuple(map(last, node.bases)), module=module, meaning=first_line(node))
            for name, places in code.classes.items()
            for module, node in places
            if name not in found and (name in wanted or set(map(last, node.bases)) & set(found))
        }
        if not new:
            return found
        found |= new


@functools.cache
def messages(package: str, root: Path, listed: tuple[tuple[str, str], ...] = ()) -> list[Message]:
    """Sorted, each once; ``listed`` are (class, function) where a function makes the lines of a list in a message."""
    code = source(root / "packages" / package)
    found = set()
    for kind, name in listed:
        for module, function in code.functions[name]:
            texts = _rules(code, function) or _long_texts(code, function)
            found |= {Message(kind=kind, module=module, text=" ".join(text.split())) for text in texts}
    for kind in kinds(package, root):
        for module, inside, call in _makers(code, kind):
            for text in _texts_of_error(code, kind, inside, call):
                if re.search(r"\w", text.replace(PLACE, "")):
                    found.add(Message(kind=kind, module=module, text=" ".join(text.split())))
    return sorted(found)


def _makers(code: Source, kind: str) -> Iterator[tuple[str, Function | None, ast.Call]]:
    """Calls of the class, and of its class methods."""
    yield from code.calls.get(kind, [])
    yield from code.of_classes.get(kind, [])


def _texts_of_error(code: Source, kind: str, inside: Function | None, call: ast.Call) -> list[str]:
    own = _own_text(code, kind)
    if own is not None:
        return _texts(code, None, own, DEEPEST)
    if last(call.func) == "broken":
        problem = _texts(code, inside, _assigned(inside, call), DEEPEST)
        remedies = _texts(code, inside, call.args[1], DEEPEST) if len(call.args) > 1 else []
        found = [". ".join(filter(None, [text, *remedies[:1]])) for text in problem or [_problem()]]
    else:
        found = _texts(code, inside, call.args[0], DEEPEST) if call.args else []
    return (found or _long_texts(code, inside))[:MOST_FORMS]


def _assigned(inside: Function | None, call: ast.Call) -> ast.expr:
    """The first argument; of a name, the value that it was given last above the call."""
    (name, *_), above = call.args, []
    for node in ast.walk(inside) if inside else ():
        if isinstance(node, ast.Assign) and last(node.targets[0]) == last(name) and node.lineno < call.lineno:
            above.append(node)
    return max(above, key=lambda node: node.lineno).value if above and isinstance(name, ast.Name) else name


def _own_text(code: Source, kind: str) -> ast.expr | None:
    """What the class's own ``__init__`` says, where that is more than the text that it is given."""
    for _, node in code.classes.get(kind, []):
        for call in ast.walk(node):
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "super().__init__":
                return call.args[0] if isinstance(call.args[0], ast.JoinedStr) else None
    return None


def _texts(code: Source, inside: Function | None, node: ast.AST, depth: int) -> list[str]:
    """The templates that an expression may be; none where it cannot be followed."""
    if isinstance(node, ast.Constant):
        return [node.value] if isinstance(node.value, str) else []
    if isinstance(node, ast.JoinedStr):
        return _forms(code, inside, node, depth)
    if isinstance(node, ast.IfExp):
        return _texts(code, inside, node.body, depth) + _texts(code, inside, node.orelse, depth)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = (_texts(code, inside, side, depth) or [PLACE] for side in (node.left, node.right))
        return [a + b for a in left for b in right][:MOST_FORMS]
    if depth == 0:
        return []
    if isinstance(node, ast.Name):
        return _texts_of_name(code, inside, node.id, depth - 1)
    if isinstance(node, ast.Attribute):
        return [text for value in code.constants.get(node.attr, []) for text in _texts(code, None, value, depth - 1)]
    if isinstance(node, ast.Call):
        return _texts_of_call(code, inside, node, depth - 1)
    return []


def _forms(code: Source, inside: Function | None, node: ast.JoinedStr, depth: int) -> list[str]:
    """An f-string's templates: one for each text that a rule or remedy in it may be, as the callers give it."""
    found = [""]
    for part in node.values:
        value = part.value if isinstance(part, ast.FormattedValue) else part
        said = _texts_of_name(code, inside, value.id, depth - 1) if isinstance(value, ast.Name) and depth else []
        long = [text for text in said if len(re.sub(r"\{[\w.]*\}", "", text)) >= LONG_ENOUGH]
        if not long or len(long) * len(found) > MOST_FORMS:
            said = [_piece(code, part)]
        elif len(long) < len(said):
            said = [*long, _piece(code, part)]
        found = [before + text for before in found for text in said]
    return found


def _texts_of_name(code: Source, inside: Function | None, name: str, depth: int) -> list[str]:
    found = []
    for value in code.local(inside).get(name, []) if inside else ():
        found += _texts(code, inside, value, depth)
    if inside and name in (parameters := [a.arg for a in [*inside.args.args, *inside.args.kwonlyargs]]):
        skipped = parameters[0] in ("self", "cls")
        for _, where, call in _calls_of(code, inside):
            given = _given(call, name, parameters.index(name) - skipped)
            if given is not None:
                found += _texts(code, where, given, depth)
            elif name in (defaults := _defaults(inside)):
                found += _texts(code, None, defaults[name], depth)
    if not found:
        found = [text for value in code.constants.get(name, []) for text in _texts(code, None, value, depth)]
    return list(dict.fromkeys(found))


def _defaults(function: Function) -> dict[str, ast.expr]:
    """What parameters are where a call does not give them."""
    given, keywords = function.args, function.args.kwonlyargs
    found = {one.arg: value for one, value in zip(reversed(given.args), reversed(given.defaults), strict=False)}
    return found | {one.arg: value for one, value in zip(keywords, given.kw_defaults, strict=True) if value}


def _calls_of(code: Source, function: Function) -> list[tuple[str, Function | None, ast.Call]]:
    """Calls by its name, but for those of an argparse parser; those of a private one stand in its own module.

    Of a ``get`` none: dicts have one too.
    """
    if function.name == "get":
        return []
    found = [
        call for call in code.calls.get(function.name, []) if last(getattr(call[2].func, "value", None)) != "parser"
    ]
    if not function.name.startswith("_"):
        return found
    own = next(module for module, one in code.functions[function.name] if one is function)
    return [call for call in found if call[0] == own]


def _texts_of_call(code: Source, inside: Function | None, call: ast.Call, depth: int) -> list[str]:
    name = last(call.func)
    if name == "Problem":
        rule, *values = (_texts(code, inside, given, depth) or [PLACE] for given in call.args)
        return [_problem(rule[0], *(said[0] if len(said) == 1 else PLACE for said in values))]
    if name == "get" or (name == "join" and call.args and isinstance(call.args[0], ast.Name)):
        return []  # of a dict by its key, which is no text of an error
    found, functions = [], [function for _, function in code.functions.get(name, [])]
    if any(last(function.returns) in ("int", "float", "bool") for function in functions):
        return []
    for function in functions:
        for node in ast.walk(function):
            if isinstance(node, ast.Return) and node.value:
                found += _texts(code, function, node.value, depth)
    if call.args and not any(len(re.sub(r"\{[\w.]*\}", "", text)) >= LONG_ENOUGH for text in found):
        found = _texts(code, inside, call.args[0], depth)  # such as _listed(what, lines)
    return list(dict.fromkeys(found))


def _problem(rule: str = PLACE, where: str = PLACE, value: str = PLACE, expected: str = PLACE) -> str:
    return f"{where}: found {value}, expected {expected} ({rule})"


def _given(call: ast.Call, name: str, position: int) -> ast.expr | None:
    named = [keyword.value for keyword in call.keywords if keyword.arg == name]
    return named[0] if named else call.args[position] if 0 <= position < len(call.args) else None


def _rules(code: Source, function: Function) -> list[str]:
    """Of a function that yields Problems, what each says: its rule is the first argument."""
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    given = [call.args[0] for call in calls if last(call.func) in ("Problem", "_first_break")]
    found = [_problem(rule) for node in given for rule in _texts(code, function, node, DEEPEST)]
    return list(dict.fromkeys(found))


def _long_texts(code: Source, inside: Function | None) -> list[str]:
    found = []
    for node in _outermost_texts(inside) if inside else ():
        texts = [str(node.value)] if isinstance(node, ast.Constant) else _forms(code, inside, node, DEEPEST)
        found += [text for text in texts if len(text.replace(PLACE, "")) >= LONG_ENOUGH and " " in text]
    return found


def _outermost_texts(function: Function) -> Iterator[ast.Constant | ast.JoinedStr]:
    """String expressions of a body in its order, without its docstring and what only an assert says."""
    todo: list[ast.AST] = list(function.body[1:] if ast.get_docstring(function) else function.body)
    while todo:
        node = todo.pop(0)
        if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str)):
            yield node
        elif not isinstance(node, ast.Assert):
            todo[:0] = ast.iter_child_nodes(node)


def _piece(code: Source, node: ast.expr) -> str:
    """A part of an f-string: its words, those of a constant, or a value's name in braces."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    value = node.value if isinstance(node, ast.FormattedValue) else node
    name = last(value)
    constant = code.constants.get(name, []) if name.lstrip("_").isupper() else []
    if len(constant) == 1 and isinstance(constant[0], ast.Constant) and isinstance(constant[0].value, str):
        return constant[0].value
    return "{" + name + "}" if name and isinstance(value, ast.Name | ast.Attribute) else PLACE


def last(node: ast.AST | None) -> str:
    """``c`` of ``a.b.c``; empty for what has no name."""
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else ""


def first_line(node: ast.ClassDef | ast.Module) -> str:
    return (ast.get_docstring(node) or "").split("\n")[0]
