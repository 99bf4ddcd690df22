"""What ranks of ``sixfold doctor`` find out together, and how they name a rank that is not there."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from run_helpers import world_of

import ranktest
from sixfold.gpt.errors import TrainError
from sixfold.gpt.machine import doctor, rank_checks
from sixfold.gpt.machine.devices import device_of_machine
from sixfold.gpt.machine.doctor import examine_here
from sixfold.gpt.machine.local_checks import FAIL, Options
from sixfold.gpt.machine.rank_checks import Job, examine, roll_call, shared_folder

QUICK = 0.01


def lines_of(report):
    return [] if report is None else [str(one) for one in report.findings]


def healthy(rank: int, ranks: int, folder: str):
    """A whole examination, without the ends of processes."""
    rank_checks._MEASURE_S = QUICK
    rank_checks._SIZES = {"cpu": (2**12, 2**16)}
    rank_checks.leave = lambda world: None
    report = examine(world_of(rank, ranks), Options(folder=folder, device="cpu", timeout_s=20.0), local=True)
    return None if report is None else (lines_of(report), report.as_json())


def apart(rank: int, ranks: int, folder: str):
    """Each rank has a folder of its own, as on machines that share none."""
    job = Job(world=world_of(rank, ranks), options=Options(folder=folder, timeout_s=2.0), control=dist.group.WORLD)
    mine = Path(folder) / str(rank)
    mine.mkdir()
    shared_folder(job, mine)
    return [str(one) for one in job.findings]


def silent(rank: int, ranks: int, folder: str):
    """Rank 1 does not take part."""
    if rank == 1:
        return []
    return lines_of(examine(world_of(rank, ranks), Options(folder=folder, device="cpu", timeout_s=0.4)))


def leaderless(rank: int, ranks: int, folder: str):
    """Rank 0 does not take part: rank 1 says so."""
    rank_checks._TOLD_S = 0.2
    if rank == 0:
        return ""
    with pytest.raises(TrainError) as error:
        examine(world_of(rank, ranks), Options(folder=folder, device="cpu", timeout_s=0.3))
    return str(error.value)


def missing(rank: int, ranks: int):
    """Who did not answer a roll call."""
    if rank == 0:
        with pytest.raises(TrainError) as error:
            roll_call(ranktest.store(), "1/products", 0, ranks, 0.3)
        return str(error.value)
    return ""


@pytest.mark.slow
def test_two_healthy_ranks_find_nothing_to_mend_and_write_what_plan_reads(tmp_path):
    lines, found = ranktest.run_ranks(healthy, 2, str(tmp_path), timeout=60)[0]
    whats = [line[5:].partition(":")[0] for line in lines]
    assert [what for what in whats if "limits" not in what][:1] == ["versions"]
    for what in ("ranks", "clocks", f"shared folder {tmp_path}", "products in bf16", "products in fp32"):
        assert what in whats
    assert sum("collectives on one machine" in what for what in whats) == 3
    assert not [line for line in lines if line.startswith("fail")]
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(found))
    device = device_of_machine(path)
    assert device.kind == "cpu" and device.per_node == 2 and device.flops > 1e6 and device.near_bytes_per_s > 1e3


def test_a_folder_that_is_not_shared_fails_by_the_ranks_that_do_not_see_it(tmp_path):
    [line] = ranktest.run_ranks(apart, 2, str(tmp_path), timeout=60)[0]
    assert (
        line.startswith("fail shared folder") and "rank 1" in line and "does not see a file that rank 0 wrote" in line
    )


@pytest.mark.slow
def test_a_rank_without_an_answer_is_named_within_the_deadline(tmp_path):
    began = time.monotonic()
    lines = ranktest.run_ranks(silent, 2, str(tmp_path), timeout=60)[0]
    assert lines[-1].startswith("fail ranks (places): rank 1 did not answer within 0.4 s")
    assert ranktest.run_ranks(missing, 3, timeout=60)[0] == "rank 1, 2 did not answer within 0.3 s (at products)"
    assert "rank 0 did not answer" in ranktest.run_ranks(leaderless, 2, str(tmp_path), timeout=60)[1]
    assert time.monotonic() - began < 60


def test_a_stopped_rank_ends_the_examination_with_its_name(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "_AFTER_REPORT_S", 0.5)
    monkeypatch.setattr(doctor, "_rank_here", _stopping)
    found = examine_here(Options(folder=str(tmp_path), device="cpu", timeout_s=3.0), 2)
    assert found.failed and "rank 1 did not answer within 3 s" in str(found.findings[-1])
    assert found.findings[-1].level == FAIL


def _stopping(options, path):
    """The body of a rank; rank 1 is stopped for good once the others have met it."""
    if os.environ["SIXFOLD_RANK"] == "1":
        rank_checks.Job.meet = lambda job, what: os.kill(os.getpid(), signal.SIGSTOP)
    return doctor._rank_here(options, path)
