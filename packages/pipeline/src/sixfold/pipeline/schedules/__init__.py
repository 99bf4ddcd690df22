"""Schedules: pure functions from sizes to a compute-only program, one per file.

    ranks, microbatches --> Program (these files) --> passes.lower --> run

On each stage the F's, the input gradients and the ends of weight gradients each
come in ascending microbatch order, so that sums have the bits of the plain loop.
A new schedule is one more file here, one line below and its picture in the tests.
"""

from sixfold.pipeline.schedules.gpipe import gpipe
from sixfold.pipeline.schedules.interleaved import interleaved
from sixfold.pipeline.schedules.naive import naive
from sixfold.pipeline.schedules.one_f_one_b import one_f_one_b

__all__ = ["gpipe", "interleaved", "naive", "one_f_one_b"]
