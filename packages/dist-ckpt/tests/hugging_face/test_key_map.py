"""KeyMap: names there and back by one map, and what is refused when it is made and when it is applied."""

from dataclasses import FrozenInstanceError

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sixfold.dist_ckpt import CheckpointError, MismatchError
from sixfold.dist_ckpt.hugging_face import KeyMap

LLAMA = {
    "tok.weight": "model.embed_tokens.weight",
    "blocks.{n}.att.{part}.weight": "model.layers.{n}.self_attn.{part}_proj.weight",
    "blocks.{n}.up.weight": "model.layers.{n}.mlp.up_proj.weight",
    "norm.{*rest}": "model.norm.{*rest}",
}
PAIRS = {
    "tok.weight": "model.embed_tokens.weight",
    "blocks.0.att.q.weight": "model.layers.0.self_attn.q_proj.weight",
    "blocks.11.att.o.weight": "model.layers.11.self_attn.o_proj.weight",
    "blocks.11.up.weight": "model.layers.11.mlp.up_proj.weight",
    "norm.weight": "model.norm.weight",
    "norm.a.b": "model.norm.a.b",
}


def test_one_map_gives_the_names_there_and_back():
    names = KeyMap(LLAMA)
    assert names.theirs(PAIRS) == PAIRS
    assert names.ours(PAIRS.values()) == {theirs: ours for ours, theirs in PAIRS.items()}


def test_a_map_is_a_value_that_prints_as_its_rules():
    names = KeyMap({"a.{n}": "b.{n}"}, others="keep")
    assert str(names) == "a.{n} -> b.{n}\nothers: keep"
    assert names == KeyMap([("a.{n}", "b.{n}")], others="keep")
    assert hash(names) == hash(KeyMap([("a.{n}", "b.{n}")], others="keep"))
    with pytest.raises(FrozenInstanceError):
        names.others = "error"


def test_a_placeholder_is_one_part_and_a_starred_one_at_least_one():
    assert KeyMap({"a.{n}": "b.{n}"}, others="keep").theirs(["a.x.y", "a.x", "a."]) == {
        "a.x.y": "a.x.y",
        "a.x": "b.x",
        "a.": "a.",
    }
    assert KeyMap({"a.{*n}": "{*n}"}, others="keep").theirs(["a.x.y", "a."]) == {"a.x.y": "x.y", "a.": "a."}


def test_the_first_rule_that_fits_is_taken_and_its_inverse_knows():
    names = KeyMap({"a.0.w": "first.w", "a.{n}.w": "rest.{n}.w"})
    assert names.theirs(["a.0.w", "a.1.w"]) == {"a.0.w": "first.w", "a.1.w": "rest.1.w"}
    assert names.ours(["first.w", "rest.1.w"]) == {"first.w": "a.0.w", "rest.1.w": "a.1.w"}
    with pytest.raises(MismatchError, match=r"rest\.0\.w"):  # no name of ours becomes it
        names.ours(["rest.0.w"])


def test_text_around_a_placeholder_is_text_and_no_pattern():
    names = KeyMap({"a+b(.*)[0]|{n}$": "^{n}.w"})
    assert names.theirs(["a+b(.*)[0]|7$"]) == {"a+b(.*)[0]|7$": "^7.w"}
    assert names.ours(["^7.w"]) == {"^7.w": "a+b(.*)[0]|7$"}
    with pytest.raises(MismatchError, match="no rule"):
        names.theirs(["aab(.*)[0]|7$"])


def test_a_placeholder_twice_is_the_same_text_twice():
    names = KeyMap({"layer{n}": "layers.{n}.layer{n}"})
    assert names.theirs(["layer3"]) == {"layer3": "layers.3.layer3"}
    assert names.ours(["layers.3.layer3"]) == {"layers.3.layer3": "layer3"}
    with pytest.raises(MismatchError, match="no rule"):
        names.ours(["layers.3.layer4"])


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ({"a.{n}": "b.{m}"}, r"a\.\{n\} -> b\.\{m\}: \{m\} stands on the right alone"),
        ({"a.{rest}": "{*rest}"}, "stands on the right alone"),
        ([("a", "x"), ("a", "y")], "two rules have 'a' as ours"),
        ({"a": "x", "b": "x"}, "two rules have 'x' as theirs"),
        ({"a.{n}": "x.{n}", "b.{m}": "x.{m}"}, "two rules have 'x.{m}' as theirs"),
        ({"a.{n": "x"}, "'a.{n': a brace"),
        ({"a.{}": "x"}, "a brace"),
        ({"a.{0}": "x"}, "a brace"),
        ({"a": "x}"}, "a brace"),
        ({"a": 3}, "a pair of texts"),
        ([("a", "b", "c")], "a pair of texts"),
    ],
)
def test_a_map_that_cannot_work_is_refused_when_it_is_made(rules, words):
    with pytest.raises(CheckpointError, match=words):
        KeyMap(rules)


def test_others_is_one_of_two_words():
    with pytest.raises(CheckpointError, match="others is 'drop'"):
        KeyMap({}, others="drop")


def test_names_that_no_rule_fits_are_all_told_or_kept():
    with pytest.raises(MismatchError, match=r"others='keep':\n  b\n  c$"):
        KeyMap({"a": "x"}).theirs(["a", "b", "c"])
    assert KeyMap({"a": "x"}, others="keep").theirs(["a", "b"]) == {"a": "x", "b": "b"}
    assert KeyMap({"a": "x"}, others="keep").ours(["x", "b"]) == {"x": "a", "b": "b"}


def test_two_names_that_become_one_are_told_both():
    with pytest.raises(MismatchError, match=r"w: a\.w and w both become it"):
        KeyMap({"a.{*rest}": "{*rest}"}, others="keep").theirs(["a.w", "w"])
    with pytest.raises(MismatchError, match=r"x: a\.0 and a\.1 both become it"):
        KeyMap({"a.{n}": "x"}).theirs(["a.0", "a.1"])


def test_a_name_of_theirs_that_two_of_ours_become_is_told():
    names = KeyMap({"a.{n}": "w.{n}", "b.0": "w.0"})
    with pytest.raises(MismatchError, match=r"w\.0: it is that of a\.0 and of b\.0"):
        names.ours(["w.0"])


def test_a_rule_goes_before_a_name_that_is_kept():
    assert KeyMap({"a.{*rest}": "{*rest}"}, others="keep").ours(["w", "a.w"]) == {"w": "a.w", "a.w": "a.a.w"}


def test_a_map_of_one_way_exports_and_does_not_load():
    names = KeyMap({"a.{n}.w": "w"})
    assert names.theirs(["a.0.w"]) == {"a.0.w": "w"}
    with pytest.raises(MismatchError, match=r"a\.\{n\}\.w -> w: \{n\} stands on the left alone"):
        names.ours(["w"])


part = st.text("ab0", min_size=1, max_size=2)
name = st.lists(part, min_size=1, max_size=4).map(".".join)
hole = st.sampled_from(["{x}", "{y}", "{*z}"])
side = st.lists(st.one_of(part, hole), min_size=1, max_size=4).map(".".join)


@pytest.mark.slow
@settings(deadline=None)
@given(st.lists(st.tuples(side, side), max_size=4), st.sampled_from(["error", "keep"]), st.sets(name, max_size=6))
def test_what_goes_there_comes_back_or_is_refused(rules, others, names):
    """Any map of any names: never two names in one place, and never back as another name."""
    try:
        made = KeyMap(rules, others=others)
        there = made.theirs(names)
    except CheckpointError:
        return
    assert there.keys() == names
    assert len(set(there.values())) == len(names)
    try:
        back = made.ours(there.values())
    except MismatchError:
        return
    assert made.theirs(back.values()) == {ours: theirs for theirs, ours in back.items()}
    if others == "error":
        assert back == {theirs: ours for ours, theirs in there.items()}
