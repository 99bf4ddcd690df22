"""Ctrl-C between any two lines of a builder's call, caught by a caller that goes on: it is added whole or not."""

import sys
from itertools import count

import numpy as np
import pytest

from sixfold.indexed_data import IndexedDataset, IndexedDatasetBuilder
from sixfold.indexed_data import writer as under_test

CALLS = {
    "one sequence": lambda builder, _: builder.add_document([7, 8, 9]),
    "several sequences": lambda builder, _: builder.add_document([7, 8, 9], [1, 2]),
    "an item": lambda builder, _: (builder.add_item([7, 8]), builder.end_document()),
    "another pair": lambda builder, other: builder.add_index(other),
}


def interrupted_at(line_number, call):
    """Run ``call`` with KeyboardInterrupt raised before the n-th line that it runs in writer.py; whether it came."""
    seen = count(1)

    def trace(frame, event, arg):
        if frame.f_code.co_filename != under_test.__file__ or frame.f_code.co_name in ("_undo", "abort"):
            return None
        if event == "line" and next(seen) == line_number:
            raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


@pytest.mark.parametrize("multimodal", [False, True])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.slow
def test_an_interrupted_call_adds_all_or_nothing(tmp_path, name, multimodal):
    other = str(tmp_path / "other")
    with IndexedDatasetBuilder(other + ".bin", np.int32, multimodal) as builder:
        builder.add_document([7, 8, 9], [1, 2])
        builder.add_document([10])
    came = True
    for line_number in count(1):
        prefix = str(tmp_path / f"pair-{line_number}")
        with IndexedDatasetBuilder(prefix + ".bin", np.int32, multimodal) as builder:
            builder.add_document([1, 2])
            came = interrupted_at(line_number, lambda made=builder: CALLS[name](made, other))
            open_items = len(builder._lengths) - builder._documents[-1]
            builder.add_document([3])
        with IndexedDataset(prefix, multimodal) as pair:
            pair.check()
            ids = np.concatenate([pair[i][0] if multimodal else pair[i] for i in range(len(pair))]).tolist()
            assert ids[:2] == [1, 2] and ids[-1] == 3
            whole = [7, 8] if name == "an item" else [7, 8, 9, 10] if name == "another pair" else [7, 8, 9]
            assert ids[2:-1] in ([], whole), f"line {line_number}: {ids}"
            assert open_items == 0 or name == "an item", f"line {line_number} left a sequence open"
        if not came:
            break
    assert line_number > 5, "no line was interrupted"
