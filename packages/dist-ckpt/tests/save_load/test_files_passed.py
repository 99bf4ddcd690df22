"""How many files of the package a save and a load pass through, and how often they change the file.

A change of file is a call whose file is another than that of the call before it in the same thread; a generator that
goes on counts as a call. docs/design/dist-ckpt.md has the figures.
"""

import sys
import threading
from collections import defaultdict
from itertools import pairwise

import pytest
import torch

from sixfold import dist_ckpt
from sixfold.dist_ckpt import ShardedTensor

#: Files, changes of file.
MOST = {"save": (27, 660), "load": (31, 1120), "save of records": (21, 171), "load of records": (25, 261)}


def passed(action):
    calls = defaultdict(list)

    def seen(frame, event, _):
        _, own, name = frame.f_code.co_filename.rpartition("/sixfold/dist_ckpt/")
        if event == "call" and own:
            calls[threading.get_ident()].append(name)

    before = sys.getprofile()
    threading.setprofile(seen)
    sys.setprofile(seen)
    try:
        action()
    finally:
        sys.setprofile(before)
        threading.setprofile(before)
    files = {name for names in calls.values() for name in names}
    return len(files), sum(one != other for names in calls.values() for one, other in pairwise(names))


@pytest.mark.parametrize("what", MOST)
def test_a_save_and_a_load_pass_through_few_files(what, tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "sixfold.dist_ckpt.background.saver", raising=False)  # which a save would ask
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optim": optimizer.state_dict(), "step": 3}
    if what.endswith("of records"):
        state = {key: ShardedTensor.from_rank_offsets(key, value) for key, value in state["model"].items()}
    dist_ckpt.save(state, tmp_path / "a", group=None)  # the first one of a process makes what later ones keep
    dist_ckpt.load(state, tmp_path / "a", group=None)
    call = {
        "save": lambda: dist_ckpt.save(state, tmp_path / "b", group=None),
        "load": lambda: dist_ckpt.load(state, tmp_path / "a", group=None),
    }
    files, changes = passed(call[what.partition(" ")[0]])
    assert files <= MOST[what][0], f"{files} files"
    assert changes <= MOST[what][1], f"{changes} changes of file"
