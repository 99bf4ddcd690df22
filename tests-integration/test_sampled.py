"""Which cases of a test that is marked `sampled` the default command runs: conftest.py beside packages/."""

import importlib.util
from itertools import product
from types import SimpleNamespace

import pytest
from repository_helpers import ROOT

SPEC = importlib.util.spec_from_file_location("root_conftest", ROOT / "conftest.py")
root_conftest = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(root_conftest)


class Case(SimpleNamespace):
    """What `sample` reads of a pytest.Item."""

    def get_closest_marker(self, name):
        return SimpleNamespace(args=self.args)


def sampled(ids, *args):
    """The ids that are taken of these, each a tuple with one of every parametrize."""
    cases = [Case(nodeid=str(one), args=args, callspec=SimpleNamespace(_idlist=list(one))) for one in ids]
    return [tuple(case.callspec._idlist) for case in root_conftest.sample(cases)]


@pytest.mark.parametrize("sizes", [(1, 1), (3, 1), (4, 14), (2, 3, 5), (3, 3, 3)])
def test_each_row_is_in_one_case_and_no_more_cases_than_the_longest_list_has_rows(sizes):
    ids = list(product(*([f"{axis}{row}" for row in range(size)] for axis, size in zip("abc", sizes, strict=False))))
    taken = sampled(ids)
    assert {one for case in taken for one in case} == {one for case in ids for one in case}
    assert len(taken) == max(sizes)


def test_rows_that_are_left_over_meet_all_rows_of_the_shorter_list_in_turn():
    taken = sampled(list(product("abcdef", "xyz")))
    assert sorted(short for _, short in taken) == ["x", "x", "y", "y", "z", "z"]


@pytest.mark.parametrize(
    ("cases", "count", "places"),
    [(60, 4, [0, 19, 39, 59]), (5, 2, [0, 4]), (3, 9, [0, 1, 2]), (7, 1, [0]), (1, 2, [0])],
)
def test_a_number_of_cases_is_spread_from_the_first_to_the_last(cases, count, places):
    ids = [(str(place),) for place in range(cases)]
    assert sampled(ids, count) == [(str(place),) for place in places]


def named(name, slow):
    return SimpleNamespace(nodeid=name, get_closest_marker=lambda mark: True if slow and mark == "slow" else None)


def test_the_turns_share_the_slow_tests_and_each_has_all_others():
    quick = [named(f"t.py::test_quick[{number}]", slow=False) for number in range(5)]
    slow = [named(f"t.py::test_slow[{number}]", slow=True) for number in range(40)]
    turns = [root_conftest.of_turn(f"{part}/4", [*quick, *slow]) for part in range(4)]
    assert all(turn[:5] == quick for turn in turns)
    assert sorted(item.nodeid for turn in turns for item in turn[5:]) == sorted(item.nodeid for item in slow)
    assert all(len(turn) > 8 for turn in turns)
    assert root_conftest.of_turn("", [*quick, *slow]) == [*quick, *slow]


@pytest.mark.parametrize("turn", ["4/4", "-1/4"])
def test_a_turn_that_is_none_is_refused(turn):
    with pytest.raises(pytest.UsageError, match="K from 0 to N - 1"):
        root_conftest.of_turn(turn, [])
