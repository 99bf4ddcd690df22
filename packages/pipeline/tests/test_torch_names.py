"""Batches are cut and joined as torch does; a name or file gives the program that it says."""

from __future__ import annotations

import pytest
import torch

from sixfold.pipeline import ScheduleError, interleaved, one_f_one_b, program_of, zb_v
from sixfold.pipeline.from_torch import cut, joined
from sixfold.pipeline.passes import lower


def test_a_name_or_file_gives_its_program(tmp_path):
    assert program_of("1F1B", 3, 4) == one_f_one_b(3, 4)
    assert program_of("Interleaved1F1B", 2, 4, 3) == interleaved(2, 4, 3)
    assert program_of("zb-v", 2, 4, 2) == program_of("ZBVZeroBubble", 2, 4, 2) == zb_v(2, 4)
    for program in (interleaved(2, 4, 2), lower(interleaved(2, 4, 2))):
        file = tmp_path / "program.csv"
        file.write_text(program.to_csv(), newline="")
        assert program_of(file, 2, 4, 2) == program_of(str(file), 2, 4, 2) == program
    for sizes, words in (((4, 4, 1), "has 2 ranks; here there are 4"), ((2, 5, 2), "has 4 microbatches; .* 5"),
                         ((2, 4, 1), "has 4 stages; here there are 2")):  # fmt: skip
        with pytest.raises(ScheduleError, match=words):
            program_of(file, *sizes)
    with pytest.raises(ScheduleError, match="zb_v has 2 on each rank; chunks is 1"):
        program_of("ZBVZeroBubble", 2, 4)
    with pytest.raises(ScheduleError, match="no schedule '2F2B'"):
        program_of("2F2B", 2, 4)


def test_tensors_are_cut_as_torch_cuts_them_and_joined_again():
    microbatch = pytest.importorskip("torch.distributed.pipelining.microbatch", reason="torch's cuts are the oracle")
    args = (torch.arange(14).reshape(7, 2), [torch.arange(7), 3], "text")
    kwargs = {"mask": torch.ones(7), "table": {"a": torch.arange(7)}, "none": None}
    theirs, theirs_by_name = microbatch.split_args_kwargs_into_chunks(args, kwargs, 3)
    ours, ours_by_name = cut(args, 3, "args", equal=False), cut(kwargs, 3, "kwargs", equal=False)
    assert repr(ours) == repr(theirs) and repr(ours_by_name) == repr(theirs_by_name)
    assert repr(joined(ours)) == repr(args) and repr(joined(ours_by_name)) == repr(kwargs)
    assert joined([torch.tensor(1), torch.tensor(2)]).tolist() == [1, 2]
    assert cut(None, 2, "target", equal=True) == [None, None]


def test_rows_that_would_not_count_equally_are_refused():
    with pytest.raises(ScheduleError, match="target has 7 rows for 3 microbatches; each counts equally; scale_grads=F"):
        cut(torch.ones(7), 3, "target", equal=True)
    with pytest.raises(ScheduleError, match=r"kwargs\['x'\] has 2 rows for 3 microbatches; each has one at least"):
        cut({"x": torch.ones(2)}, 3, "kwargs", equal=False)
