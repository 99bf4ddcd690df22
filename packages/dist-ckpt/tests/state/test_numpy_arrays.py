"""Arrays of numpy in common data: their values are looked at as those of tensors are, and their layout comes back."""

from __future__ import annotations

import math

import pytest
import torch

from sixfold import dist_ckpt

np = pytest.importorskip("numpy", reason="needs numpy, which this package can do without")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", ["float16", "float32", ">f8", "complex64"])
def test_an_array_that_is_not_finite_is_told_with_its_place(tmp_path, dtype, value):
    array = np.zeros((3, 4), dtype)
    array[2, 1] = value
    state = {"rng": {"seen": [np.ones(2), array]}}
    with pytest.raises(
        dist_ckpt.ShardingError, match=r"rng\.seen\[1\]\[2, 1\] is .*(nan|inf).* on rank 0, and check_fin"
    ):
        dist_ckpt.save(state, tmp_path / "c", check_finite=True)
    assert not (tmp_path / "c").exists()
    dist_ckpt.save(state, tmp_path / "c")


def test_an_imaginary_part_and_an_array_without_axes_are_looked_at(tmp_path):
    for array, place in ((np.array([1j, complex(0, math.nan)]), r"a\[1\]"), (np.array(math.nan), r"a\[\]")):
        with pytest.raises(dist_ckpt.ShardingError, match=place):
            dist_ckpt.save({"a": array}, tmp_path / "c", check_finite=True)


def test_numbers_texts_and_arrays_that_are_finite_pass(tmp_path):
    state = {
        "best": math.inf,  # a metric that has no value yet
        "number": np.float32("nan"),
        "kept": [np.arange(3), np.array([True]), np.array(["a"]), np.ones((2, 0)), np.ones(3, "float64")],
    }
    dist_ckpt.save(state, tmp_path / "c", check_finite=True)
    assert dist_ckpt.load({}, tmp_path / "c")["best"] == math.inf


@pytest.mark.parametrize("dtype", ["float32", "<i8", "bool", "<U3", ">f4"])
@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4), (5,), (0, 3), ()])
def test_the_order_in_memory_comes_back(tmp_path, dtype, shape):
    values = np.arange(math.prod(shape)).reshape(shape).astype(dtype)
    state = {"C": values, "F": np.asfortranarray(values), "in a tuple": (np.asfortranarray(values),)}
    dist_ckpt.save(state, tmp_path / "c")
    found = dist_ckpt.load({}, tmp_path / "c")
    for name, array in {"C": found["C"], "F": found["F"], "tuple": found["in a tuple"][0]}.items():
        was = values if name == "C" else np.asfortranarray(values)
        assert array.dtype == was.dtype and array.tolist() == was.tolist() and array.flags.writeable, name
        assert (array.flags.c_contiguous, array.flags.f_contiguous) == (was.flags.c_contiguous, was.flags.f_contiguous)


def test_what_has_steps_comes_back_with_its_values(tmp_path):
    array = np.arange(24).reshape(2, 3, 4)
    parts = {"steps": array[:, ::2], "turned": array[::-1], "axes": array.transpose(1, 0, 2)}
    dist_ckpt.save(parts, tmp_path / "c")
    found = dist_ckpt.load({}, tmp_path / "c")
    assert all(np.array_equal(found[name], part) for name, part in parts.items())


def test_a_file_that_names_another_layout_is_refused():
    from sixfold.dist_ckpt.state.plain_types import make_array

    data = bytes(24)
    assert make_array((3,), "<f8", data, 0, None, "F").tolist() == [0, 0, 0]
    for start, strides, order in ((8, None, "C"), (0, (800,), "C"), (0, None, "A"), (0, None, 3)):
        with pytest.raises(ValueError, match="starts at"):
            make_array((3,), "<f8", data, start, strides, order)


def test_tensors_stay_as_they_were(tmp_path):
    with pytest.raises(dist_ckpt.ShardingError, match=r"t\[1\] is nan on rank 0"):
        dist_ckpt.save({"t": torch.tensor([0, math.nan]), "a": np.ones(2)}, tmp_path / "c", check_finite=True)
