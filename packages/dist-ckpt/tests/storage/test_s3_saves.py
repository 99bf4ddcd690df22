"""Saves to an object store: a real S3 server that throttles, breaks and sees what is asked of it."""

import os
import signal

import pytest
import torch
from dist_ckpt_helpers import one
from s3_server import Fault

from ranktest import run_ranks
from sixfold import dist_ckpt
from sixfold.dist_ckpt import StorageError
from sixfold.dist_ckpt.plans import plan
from sixfold.dist_ckpt.storage import url as urls
from sixfold.dist_ckpt.stores import UrlStore

IMPATIENT = {"config_kwargs": {"retries": {"max_attempts": 0}, "read_timeout": 1.5}, "skip_instance_cache": True}
TENSORS = 2
ELEMENTS = 11 << 18  # 11 MiB: an upload of three parts


@pytest.fixture
def place(s3, monkeypatch):
    monkeypatch.setattr(urls, "BLOCK_BYTES", 5 << 20)  # the least that S3 takes
    monkeypatch.setattr(urls, "_FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(plan, "_LEAST_FILE_BYTES", 8 << 20)
    s3fs = pytest.importorskip("s3fs", reason="needs s3fs (extra test)")
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    url = f"s3://{s3.bucket()}/run/c"
    s3.set()
    return url


def big(value):
    w = torch.arange(float(ELEMENTS)) + value
    return {f"w{i}": one(f"w{i}", w + i) for i in range(TENSORS)} | {"step": value}


def small(value):
    return {"w": one("w", torch.full((1000,), value)), "step": value}


def value_of(url):
    loaded = dist_ckpt.load(small(0.0), url)
    assert bool((loaded["w"] == loaded["step"]).all())
    return loaded["step"]


def requests(s3):
    return {kind: tally["requests"] for kind, tally in s3.counts().items() if kind != "total"}


@pytest.mark.slow
def test_large_tensors_go_up_in_parts_side_by_side_and_come_back(s3, place):
    s3.set(latency_ms=30)
    dist_ckpt.save(big(1.0), place)
    counts = s3.counts()
    assert counts["start_multipart"]["requests"] == counts["complete_multipart"]["requests"] == TENSORS
    assert counts["part"]["requests"] >= 2 * TENSORS
    assert counts["part"]["most_in_flight"] == TENSORS
    assert requests(s3)["list"] <= 5
    s3.set()
    loaded = dist_ckpt.load_plain_tensors(place)
    assert all(torch.equal(loaded[key], record.data) for key, record in big(1.0).items() if key != "step")


PARTS = [
    Fault(what="error", kind="part", times=2),
    Fault(what="reset", kind="part", times=1),
    Fault(what="lost", kind="complete_multipart", times=1),
]
SMALL = [
    Fault(what="error", kind="put", key="*metadata.json", times=3),
    Fault(what="lost", kind="put", key="*integrity.json", times=1),
    Fault(what="stall", kind="put", key="*common.pt", times=1),
    Fault(what="error", kind="list", times=2, status=500, code="InternalError"),
]


@pytest.mark.parametrize("faults", [PARTS, SMALL], ids=["parts", "small files"])
@pytest.mark.slow
def test_a_store_that_asks_to_slow_down_or_breaks_now_and_then_is_asked_again(s3, place, faults):
    saved = {"w0": big(2.0)["w0"], "step": 2.0} if faults is PARTS else small(2.0)
    s3.set(faults=faults)
    dist_ckpt.save(saved, UrlStore(place, 30.0, IMPATIENT))
    assert s3.report()["injected"] == [fault.times for fault in faults]
    s3.set()
    if faults is PARTS:
        assert torch.equal(dist_ckpt.load_plain_tensors(place)["w0"], saved["w0"].data)
    else:
        assert value_of(place) == 2.0


@pytest.mark.slow
def test_a_store_that_stays_away_is_one_error_after_the_deadline_and_the_old_checkpoint_stays(s3, place):
    dist_ckpt.save(small(1.0), place)
    s3.set(faults=[Fault(what="error", kind="put", key="*.distcp")])
    with pytest.raises(StorageError, match=rf"{place}: .*\(uploading __0_0.* failed \d+ times in .* s; timeout_s=1\)"):
        dist_ckpt.save(small(2.0), UrlStore(place, 1.0, IMPATIENT), timeout_s=1.0)
    s3.set()
    assert value_of(place) == 1.0


@pytest.mark.parametrize("dies_at", ["common.pt", "metadata.json"])
@pytest.mark.slow
def test_a_network_that_ends_in_mid_commit_leaves_the_old_and_the_next_cleans_up(s3, place, dies_at):
    dist_ckpt.save(small(1.0), place)
    s3.set(faults=[Fault(what="down", kind="put", key=f"*/{dies_at}")])
    with pytest.raises(StorageError):
        dist_ckpt.save(small(2.0), UrlStore(place, 0.2, IMPATIENT))
    s3.set()
    assert value_of(place) == 1.0
    dist_ckpt.save(small(3.0), place)
    assert value_of(place) == 3.0
    assert sum(name.endswith(".distcp") for name in UrlStore(place).list_files()) == 1


@pytest.mark.slow
def test_a_bucket_that_is_not_there_is_named_and_not_made(s3, place):
    with pytest.raises(StorageError, match=r"s3://no-such-bucket-here/c"):
        dist_ckpt.save(small(1.0), UrlStore("s3://no-such-bucket-here/c", 1.0, IMPATIENT))


def save_and_die(rank, ranks, url):
    """SIGKILL in the middle of a commit."""
    plain = UrlStore.write

    def write(self, save, name, data):
        if name == "integrity.json":
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(self, save, name, data)

    UrlStore.write = write
    dist_ckpt.save(small(2.0), url, group=None)


@pytest.mark.slow
def test_a_rank_that_is_killed_in_mid_commit_leaves_the_older_checkpoint(s3, place):
    dist_ckpt.save(small(1.0), place)
    assert run_ranks(save_and_die, 1, place, allow_exit=(0,)) == [None]
    assert value_of(place) == 1.0
    dist_ckpt.save(small(3.0), place)
    assert value_of(place) == 3.0
    assert sum(name.endswith(".distcp") for name in UrlStore(place).list_files()) == 1
