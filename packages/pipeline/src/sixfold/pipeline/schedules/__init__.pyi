# Written by tests/golden/make_drawings.py.

from sixfold.pipeline.schedules.dualpipe_v import dualpipe_v as dualpipe_v
from sixfold.pipeline.schedules.eager_one_f_one_b import eager_one_f_one_b as eager_one_f_one_b
from sixfold.pipeline.schedules.gpipe import gpipe as gpipe
from sixfold.pipeline.schedules.hanayo import hanayo as hanayo
from sixfold.pipeline.schedules.interleaved import interleaved as interleaved
from sixfold.pipeline.schedules.looped_bfs import looped_bfs as looped_bfs
from sixfold.pipeline.schedules.naive import naive as naive
from sixfold.pipeline.schedules.one_f_one_b import one_f_one_b as one_f_one_b
from sixfold.pipeline.schedules.pipedream import pipedream as pipedream
from sixfold.pipeline.schedules.pipedream_2bw import pipedream_2bw as pipedream_2bw
from sixfold.pipeline.schedules.registry import Schedule as Schedule
from sixfold.pipeline.schedules.v_half import v_half as v_half
from sixfold.pipeline.schedules.v_min import v_min as v_min
from sixfold.pipeline.schedules.zb_h1 import zb_h1 as zb_h1
from sixfold.pipeline.schedules.zb_h2 import zb_h2 as zb_h2
from sixfold.pipeline.schedules.zb_interleaved import zb_interleaved as zb_interleaved
from sixfold.pipeline.schedules.zb_v import zb_v as zb_v

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
    "zb_interleaved",
    "zb_v",
]

def registered() -> tuple[Schedule, ...]: ...
def find(name: str) -> Schedule | None: ...
def by_name(name: str) -> Schedule: ...
