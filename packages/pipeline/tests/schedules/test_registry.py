"""What the registry says of a schedule is so, and a schedule's file is all that it takes."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import sixfold.pipeline
from sixfold.pipeline import Kind, Program, ScheduleError, Weights, one_f_one_b, schedules
from sixfold.pipeline.program.placement import looped
from sixfold.pipeline.schedules.registry import collected, schedule


@pytest.mark.parametrize("entry", schedules.registered(), ids=lambda entry: entry.name)
def test_placement_weights_and_kinds_are_those_of_its_programs(entry):
    kinds, sizes = set(), []
    for ranks in (1, 2, 3):
        for chunks in range(1, 7):
            if entry.arguments_for(chunks) is None:
                with pytest.raises(ScheduleError, match=f"{entry.name} has .* on each rank.*; chunks is {chunks}"):
                    entry.with_chunks(ranks, 4, chunks)
                continue
            program = entry.with_chunks(ranks, 4, chunks)
            assert program.placement == entry.placement(ranks, chunks)
            assert (program.weights is Weights.FLUSHED) == entry.flushed
            kinds |= {part.kind for _, _, action in program.entries() for part in action.each()}
            sizes.append(chunks)
    assert (Kind.W in kinds) == entry.split
    assert set(sizes) == {entry.chunks} or (entry.chunks is None and len(set(sizes)) > 1)
    assert entry.make is getattr(sixfold.pipeline, entry.name)
    assert entry.name in sixfold.pipeline.__all__


def test_names_are_found_however_they_are_spelled():
    assert schedules.by_name("pipedream-2bw").make is sixfold.pipeline.pipedream_2bw
    assert schedules.by_name("1F1B").make is one_f_one_b
    assert schedules.by_name("zbvzerobubble").name == "zb_v"
    assert schedules.find("1F2B") is None
    with pytest.raises(ScheduleError, match=r"no schedule '1F2B'; there are dualpipe_v, .* also called DualPipeV, "):
        schedules.by_name("1F2B")


def module_of(**functions) -> ModuleType:
    module = ModuleType("elsewhere")
    for name, make in functions.items():
        make.__module__ = "elsewhere"
        setattr(module, name, make)
    return module


def test_a_file_has_the_schedules_that_it_defines_and_two_may_not_have_one_name():
    def twice(ranks: int, microbatches: int, chunks: int = 2) -> Program:
        return one_f_one_b(ranks * chunks, microbatches)

    def other(ranks: int, microbatches: int) -> Program:
        return one_f_one_b(ranks, microbatches)

    module = module_of(twice=schedule(placement=looped, chunks=None)(twice))
    module.one_f_one_b = one_f_one_b  # only imported there
    assert [(entry.name, entry.arguments) for entry in collected([module])] == [("twice", ("chunks",))]
    with pytest.raises(AssertionError, match="twice and other are both called twice"):
        collected([module, module_of(other=schedule(placement=looped, aliases={"Twice": ""})(other))])


MINE = """
from sixfold.pipeline.program.placement import looped
from sixfold.pipeline.schedules.one_f_one_b import one_f_one_b
from sixfold.pipeline.schedules.registry import schedule

@schedule(placement=looped)
def mine(ranks, microbatches):
    return one_f_one_b(ranks, microbatches)
"""
# A package has further folders if its __path__ says so, which it reads when its first line runs.
RUN = """
import pkgutil, sys
folder = sys.argv[1]
every = pkgutil.iter_modules
def with_mine(path=None, prefix=""):
    if path is not None and any("schedules" in place for place in path):
        path.append(folder)
    return every(path, prefix)
pkgutil.iter_modules = with_mine
import sixfold.pipeline
from sixfold.pipeline import cli, mine
assert "mine" in sixfold.pipeline.__all__ and mine(2, 2).ranks
sys.exit(cli.main(["draw", "mine", "--ranks", "1", "--microbatches", "1"]))
"""


@pytest.mark.slow
def test_a_file_in_the_folder_is_all_that_a_schedule_takes(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    done = subprocess.run([sys.executable, "-c", RUN, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "0: 0F0 0B0\n"), done.stderr


# What runs programs, from the list of a rank to the bytes on an edge.
RUNS = (
    "executor/runner",
    "compiler/compile",
    "compiler/wiring",
    "stage/compute",
    "proof/unit_rules",
    "split_backward/weight_gradients",
    "split_backward/layers",
    "compiler/compile_endless",
    "stage/weight_versions",
    "proof/endless",
)


@pytest.mark.slow
def test_what_runs_a_program_knows_no_schedule_by_name():
    folder = Path(schedules.__file__).parents[1]
    names = {entry.name for entry in schedules.registered()}
    for path in [*(folder / f"{name}.py" for name in RUNS), *(folder / "transport").glob("*.py")]:
        tree = ast.parse(path.read_text())
        said = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        said |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        said |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
        said |= {str(node.value) for node in ast.walk(tree) if isinstance(node, ast.Constant)}
        assert not said & names and "schedules" not in said, f"{path.name}: {said & names}"
