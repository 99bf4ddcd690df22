"""The header and the dtype codes."""

import numpy as np
import pytest
from indexed_data_helpers import CODES, idx_bytes

from sixfold.indexed_data import DType, IndexedDataError
from sixfold.indexed_data.format import Header


def test_codes_are_those_of_the_format():
    assert {member.name: member.value for member in DType} == CODES


@pytest.mark.parametrize(("name", "code"), CODES.items())
def test_a_dtype_and_its_code_name_each_other(name, code):
    for spelling in (name, np.dtype(name), np.dtype(name).type):
        assert DType.code_from_dtype(spelling) == code
    assert DType.dtype_from_code(code) is np.dtype(name).type
    assert DType.size(code) == DType.size(np.dtype(name).type) == np.dtype(name).itemsize


@pytest.mark.parametrize(("vocabulary", "dtype"), [(257, np.uint16), (65_499, np.uint16), (65_500, np.int32)])
def test_the_smallest_dtype_changes_at_the_peers_line(vocabulary, dtype):
    assert DType.optimal_dtype(vocabulary) is dtype
    assert DType.optimal_dtype(None) is np.int32


@pytest.mark.parametrize("dtype", [np.uint32, np.float16, "uint64", bool, "no dtype"])
def test_a_dtype_without_code_is_refused(dtype):
    with pytest.raises(IndexedDataError, match="no code"):
        DType.code_from_dtype(dtype)


def test_an_unknown_code_is_refused():
    with pytest.raises(IndexedDataError, match="code 9 is unknown"):
        DType.dtype_from_code(9)


def test_header_packs_to_the_bytes_of_the_table():
    by_hand = idx_bytes("uint16", [1, 2, 3], [0, 1, 3])[:34]
    header = Header(np.dtype("uint16"), 3, 3)
    assert header.pack() == by_hand
    assert Header.unpack(by_hand, "x.idx") == header


def test_counts_of_2_to_the_60_do_not_overflow():
    header = Header(np.dtype("uint16"), 2**60, 2**60)
    assert header.index_bytes(multimodal=True) == 34 + 2**60 * (4 + 8 + 8 + 1)
