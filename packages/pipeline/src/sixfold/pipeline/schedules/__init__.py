"""Schedules: pure functions from sizes to a compute-only program, one per file.

    ranks, microbatches --> Program (these files) --> passes.lower --> run

On each stage the F's, the input gradients and the ends of weight gradients each
come in ascending microbatch order, so that sums have the bits of the plain loop.
A new schedule is one more file here, one line below and its picture in the tests.
"""

from sixfold.pipeline.schedules.dualpipe_v import dualpipe_v
from sixfold.pipeline.schedules.eager_one_f_one_b import eager_one_f_one_b
from sixfold.pipeline.schedules.gpipe import gpipe
from sixfold.pipeline.schedules.hanayo import hanayo
from sixfold.pipeline.schedules.interleaved import interleaved
from sixfold.pipeline.schedules.looped_bfs import looped_bfs
from sixfold.pipeline.schedules.naive import naive
from sixfold.pipeline.schedules.one_f_one_b import one_f_one_b
from sixfold.pipeline.schedules.pipedream import pipedream
from sixfold.pipeline.schedules.pipedream_2bw import pipedream_2bw
from sixfold.pipeline.schedules.v_half import v_half
from sixfold.pipeline.schedules.v_min import v_min
from sixfold.pipeline.schedules.zb_h1 import zb_h1
from sixfold.pipeline.schedules.zb_h2 import zb_h2
from sixfold.pipeline.schedules.zb_v import zb_v

__all__ = [
    "dualpipe_v",
    "eager_one_f_one_b",
    "gpipe",
    "hanayo",
    "interleaved",
    "looped_bfs",
    "naive",
    "one_f_one_b",
    "pipedream",
    "pipedream_2bw",
    "v_half",
    "v_min",
    "zb_h1",
    "zb_h2",
    "zb_v",
]
