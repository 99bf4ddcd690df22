"""DESIGN.md's rules about source text: who may import what, and how long a thing may be.

Everything is read from syntax trees, so that a rule holds for code that no test runs.
"""

import ast
import graphlib
import tomllib

import pytest
from repository_helpers import (
    PACKAGE_NAMES,
    PACKAGES,
    ROOT,
    Package,
    dotted,
    functions_of,
    is_standard,
    run_at_load,
    top_of,
)

# An arrow of DESIGN.md: what a package may import of its siblings, and in which one file if it is an extra.
ARROWS = {
    "blending": {"sixfold.indexed_data"},
    "gpt": {f"sixfold.{name.replace('-', '_')}" for name in PACKAGE_NAMES if name != "gpt"},
}
RUN_TIME_DEPENDENCIES = {
    "indexed-data": {"numpy"},
    "blending": {"numpy"},
    "dist-ckpt": {"torch"},
    "pipeline": {"torch"},
    "fsdp": {"torch"},
    "gpt": ARROWS["gpt"],
}
# Files that exist for one extra and that only its users import; they may do so when loaded. That importing the package
# itself loads none of them is seen by `nox -s isolation`, where the extra is not installed.
FILES_OF_AN_EXTRA = {"packages/blending/src/sixfold/blending/dataset/position_sampler.py": "torch"}
GPU_ONLY = {"triton", "transformer_engine", "apex", "cupy", "flash_attn", "pynvml"}
ENVIRONMENT = ("os.environ", "os.getenv", "os.putenv", "os.environb")
# Calls that mean the default group when no group is given.
RANK_LOOK_UPS = {"get_rank", "get_world_size", "get_backend"}
DEFAULT_GROUP = {
    "_get_default_group",
    "init_process_group",
    "group.WORLD",
    "GroupMember.WORLD",
    "distributed_c10d._get_default_group",
}
MOST_FUNCTION_LINES = 110
MOST_FILE_LINES = 600

each_package = pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
below_gpt = pytest.mark.parametrize(
    "package", [package for package in PACKAGES if package.name != "gpt"], ids=lambda package: package.name
)


def test_the_packages_are_the_six_of_the_design():
    found = {path.parent.name for path in ROOT.glob("packages/*/pyproject.toml")}
    assert found == set(PACKAGE_NAMES)


@each_package
def test_imports_follow_the_arrows(package: Package):
    allowed = ARROWS.get(package.name, set()) | {f"sixfold.{package.module}"}
    wrong = [
        f"{file.place}:{line.line}: {line.module}"
        for file in package.files
        for line in file.imports
        if line.module.startswith("sixfold") and top_of(line.module) not in allowed
    ]
    assert not wrong, f"{package.name} may import of its siblings only {sorted(allowed)}"


def test_only_one_file_of_blending_opens_indexed_data_and_only_when_used():
    package = next(p for p in PACKAGES if p.name == "blending")
    lines = [
        (file.place, line)
        for file in package.files
        for line in file.imports
        if top_of(line.module) == "sixfold.indexed_data" and not line.for_types
    ]
    assert len({place for place, _ in lines}) <= 1, f"more than one file imports sixfold.indexed_data: {lines}"
    assert not [line for _, line in lines if line.at_load], f"imported when loaded, not when used: {lines}"


@each_package
def test_third_party_imports_are_declared(package: Package):
    own = f"sixfold.{package.module}"
    wrong = []
    for file in package.files:
        for line in file.imports:
            name = top_of(line.module)
            if is_standard(name) or name == own or name in package.required | reachable(package):
                continue
            if name in package.optional and (not line.at_load or FILES_OF_AN_EXTRA.get(file.place) == name):
                continue
            rule = (
                "inside a function: it is an extra" if name in package.optional else "nowhere: it is not a dependency"
            )
            wrong.append(f"{file.place}:{line.line}: {line.module} may be imported {rule}")
    assert not wrong, "\n".join(wrong)


def reachable(package: Package) -> set[str]:
    """What the siblings of gpt bring along: it may use torch and numpy without naming them again."""
    return {"torch", "numpy"} if package.name == "gpt" else set()


def test_numpy_is_not_used_by_the_torch_packages():
    wrong = [
        f"{file.place}:{line.line}"
        for package in PACKAGES
        if package.name in ("dist-ckpt", "pipeline", "fsdp")
        for file in package.files
        for line in file.imports
        if top_of(line.module) == "numpy"
    ]
    assert not wrong, f"torch and the standard library are enough there: {wrong}"


@each_package
def test_run_time_dependencies_are_those_of_the_design(package: Package):
    assert package.required == RUN_TIME_DEPENDENCIES[package.name]


def test_indexed_data_never_imports_torch():
    package = next(p for p in PACKAGES if p.name == "indexed-data")
    assert not [f.place for f in package.files for line in f.imports if top_of(line.module) == "torch"]


@each_package
def test_nothing_that_needs_a_gpu_happens_when_a_file_is_loaded(package: Package):
    wrong = []
    for file in package.files:
        wrong += [
            f"{file.place}:{i.line}: import {i.module}"
            for i in file.imports
            if i.at_load and top_of(i.module) in GPU_ONLY
        ]
        wrong += [
            f"{file.place}:{node.lineno}: {dotted(node.func)}"
            for node in run_at_load(file.tree)
            if isinstance(node, ast.Call) and dotted(node.func).startswith("torch.cuda.")
        ]
    assert not wrong, "\n".join(wrong)


@below_gpt
def test_below_gpt_nothing_reads_the_environment(package: Package):
    wrong = [
        f"{file.place}:{node.lineno}: {dotted(node)}"
        for file in package.files
        for node in ast.walk(file.tree)
        if isinstance(node, ast.Attribute) and dotted(node) in ENVIRONMENT
    ]
    wrong += [
        f"{file.place}:{node.lineno}: from os import {alias.name}"
        for file in package.files
        for node in ast.walk(file.tree)
        if isinstance(node, ast.ImportFrom) and node.module == "os"
        for alias in node.names
        if f"os.{alias.name}" in ENVIRONMENT
    ]
    assert not wrong, "\n".join(wrong)


@below_gpt
def test_below_gpt_groups_come_in_as_arguments(package: Package):
    """The exceptions, dist_ckpt's group="world" and fsdp's process_group="world", live in one file each."""
    wrong: dict[str, list[str]] = {}
    for file in package.files:
        for node in ast.walk(file.tree):
            if text := default_group_use(node):
                wrong.setdefault(file.place, []).append(f"{file.place}:{node.lineno}: {text}")
    if package.name in ("dist-ckpt", "fsdp"):
        assert len(wrong) <= 1, f"the default group is looked up in more than one file: {wrong}"
    else:
        assert not wrong, "\n".join(line for lines in wrong.values() for line in lines)


def default_group_use(node: ast.AST) -> str:
    """Text of a default-group look-up, or nothing."""
    if isinstance(node, ast.Call):
        name = dotted(node.func)
        first, last = name.split(".")[0], name.split(".")[-1]
        if (
            last in RANK_LOOK_UPS
            and first in ("dist", "torch", "distributed", last)
            and not (node.args or node.keywords)
        ):
            return f"{name}() without a group"
    name = dotted(node)
    return name if any(name == text or name.endswith(f".{text}") for text in DEFAULT_GROUP) else ""


@below_gpt
def test_modules_import_each_other_in_no_circle(package: Package):
    """An import inside a function counts, too."""
    names = {}
    for file in package.files:
        parts = file.path.relative_to(package.folder / "src").with_suffix("").parts
        names[".".join(parts).removesuffix(".__init__")] = file
    graph: dict[str, set[str]] = {name: set() for name in names}
    for name, file in names.items():
        for_types = {line.line for line in file.imports if line.for_types}
        for node in ast.walk(file.tree):
            if isinstance(node, ast.ImportFrom) and node.module and node.lineno not in for_types:
                for alias in node.names:
                    whole = f"{node.module}.{alias.name}"
                    module = whole if whole in names else node.module
                    if module in names and module != name:
                        graph[name].add(module)
    assert sum(map(len, graph.values())) > len(names) / 2, "imports were not found"
    list(graphlib.TopologicalSorter(graph).static_order())


@each_package
def test_no_function_and_no_file_is_too_long(package: Package):
    wrong = [
        f"{f.place} has {f.lines} lines; at most {MOST_FILE_LINES}" for f in package.files if f.lines > MOST_FILE_LINES
    ]
    for file in package.files:
        for function in functions_of(file.tree):
            lines = function.end_lineno - function.lineno + 1
            if lines > MOST_FUNCTION_LINES:
                wrong.append(
                    f"{file.place}:{function.lineno}: {function.name} has {lines} lines; at most {MOST_FUNCTION_LINES}"
                )
    assert not wrong, "\n".join(wrong)


@each_package
def test_no_global_statement_and_no_assert_without_its_values(package: Package):
    wrong = []
    for file in package.files:
        for node in ast.walk(file.tree):
            if isinstance(node, ast.Global):
                wrong.append(f"{file.place}:{node.lineno}: global {', '.join(node.names)}")
            if isinstance(node, ast.Assert) and node.msg is None:
                wrong.append(f"{file.place}:{node.lineno}: assert without a message")
    assert not wrong, "\n".join(wrong)


@each_package
def test_every_module_says_what_it_holds(package: Package):
    wrong = [file.place for file in package.files if not ast.get_docstring(file.tree)]
    assert not wrong, f"without a module docstring: {wrong}"


@each_package
def test_the_namespace_has_no_init_file(package: Package):
    assert not (package.folder / "src/sixfold/__init__.py").exists(), "sixfold is a PEP 420 namespace"


@each_package
def test_a_package_folder_is_whole(package: Package):
    needed = ["README.md", "CHANGELOG.md", "pyproject.toml", f"src/sixfold/{package.module}/py.typed"]
    missing = [name for name in needed if not (package.folder / name).is_file()]
    missing += [
        f"{name}/*.py" for name in ("examples", "tests", "benchmarks") if not list((package.folder / name).glob("*.py"))
    ]
    assert not missing, f"packages/{package.name} lacks {missing}"
    assert (ROOT / f"docs/design/{package.name}.md").is_file(), f"docs/design has no page on {package.name}"


@each_package
def test_versions_are_static_and_in_the_changelog(package: Package):
    version = package.project["version"]
    assert f"{version}" in (package.folder / "CHANGELOG.md").read_text(), f"CHANGELOG.md does not name {version}"


def test_constraints_pin_everything_that_a_package_needs():
    pinned = {line.split("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line}
    needed = {
        name.replace("_", "-") for package in PACKAGES for name in package.required if not name.startswith("sixfold")
    }
    assert needed <= pinned


def test_python_of_all_packages_is_one():
    assert {package.project["requires-python"] for package in PACKAGES} == {">=3.11"}
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]["python_version"] == "3.11"
