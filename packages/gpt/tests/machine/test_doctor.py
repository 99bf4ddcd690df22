"""``sixfold doctor``: limits and folders that are wrong, lines and exit status, and the fit of a collective's times."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from sixfold.gpt.commands.cli import main
from sixfold.gpt.errors import TrainError
from sixfold.gpt.machine import doctor
from sixfold.gpt.machine.devices import device_of_machine
from sixfold.gpt.machine.doctor import examine_here
from sixfold.gpt.machine.local_checks import FAIL, OK, WARN, Finding, Options, Report, local_checks

MACHINE = {
    "device": "cpu", "name": "cpu", "ranks": 2, "per_node": 2, "memory_bytes": 4 * 10**9, "flops": 1e11,
    "flops_fp32": 5e10, "near_bytes_per_s": 1e9, "node_bytes_per_s": 1e9, "latency_s": 2e-4,
}  # fmt: skip


def test_this_machine_has_a_line_for_each_check(tmp_path):
    found = local_checks(str(tmp_path / "runs"))
    assert [one.what for one in found][:5] == ["versions", "open files", "processes", "locked memory", "/dev/shm"]
    folder = found[-1]
    assert folder.level == OK and "renamed" in folder.value and "GiB free" in folder.value
    assert not list((tmp_path / "runs").iterdir())
    assert "torch 2." in found[0].value


def test_a_small_limit_of_open_files_fails_with_its_remedy_and_without_torch(tmp_path):
    code = f"""
import resource, sys
from sixfold.gpt.machine.local_checks import local_checks
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
print(next(one for one in local_checks({str(tmp_path)!r}) if one.what == "open files"))
assert "torch" not in sys.modules
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.startswith("fail open files: 64 at most, a run wants 4096; ulimit -n 65536")


def test_a_folder_that_cannot_be_written_fails(tmp_path):
    (tmp_path / "file").write_text("")
    found = local_checks(str(tmp_path / "file" / "runs"))[-1]
    assert found.level == FAIL and "Not a directory" in found.value and "--dir" in found.remedy


def report_of(*levels: str) -> Report:
    return Report(findings=[Finding(level, "check", level, "mend it") for level in levels], machine=MACHINE)


@pytest.mark.parametrize(("levels", "status"), [((OK, WARN), 0), ((OK, FAIL), 1)])
def test_the_verb_prints_a_line_each_fails_with_them_and_writes_what_plan_reads(
    levels, status, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(doctor, "examine_here", lambda options, ranks: report_of(*levels))
    out = tmp_path / "machine.json"
    assert main(["doctor", "--out", str(out)]) == status
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "ok   check: ok; mend it" and len(lines) == 3
    assert json.loads(out.read_text())["failed"] == bool(status)
    assert device_of_machine(out).flops_of("fp32") == 5e10
    assert main(["doctor", "--out", str(out), "--json"]) == status
    assert json.loads(capsys.readouterr().out)["machine"] == MACHINE


def test_ranks_that_cannot_be_started_are_a_failure_beside_the_local_checks(tmp_path, monkeypatch):
    def broken(*args, **kwargs):
        raise TrainError("rank 1 was killed by SIGKILL")

    monkeypatch.setattr(doctor, "start_ranks", broken)
    found = examine_here(Options(folder=str(tmp_path)), 2)
    assert found.failed and found.machine is None
    assert "rank 1 was killed by SIGKILL" in str(found.findings[-1]) and found.findings[0].what == "versions"


def test_latency_and_rate_are_found_again_in_their_own_times():
    pytest.importorskip("torch")
    from sixfold.gpt.machine.rank_checks import fit_line

    sizes = (4e3, 6e4, 1e6, 8e6)
    latency, rate = fit_line([(nbytes, 1e-4 + nbytes / 2e9) for nbytes in sizes])
    assert (latency, rate) == (pytest.approx(1e-4), pytest.approx(2e9))
    noise = zip(sizes, (1.1, 0.9, 1.1, 0.95), strict=True)
    noisy = [(nbytes, (1e-4 + nbytes / 2e9) * factor) for nbytes, factor in noise]
    latency, rate = fit_line(noisy)
    assert latency == pytest.approx(1e-4, rel=0.2) and rate == pytest.approx(2e9, rel=0.2)
    latency, rate = fit_line([(1e3, 1e-6), (1e6, 1e-2), (2e6, 1e-2)])  # no line: nothing below 0
    assert latency >= 0 and rate > 0


def test_what_all_ranks_send_has_room_however_many_there_are():
    pytest.importorskip("torch")
    from sixfold.gpt.machine.rank_checks import sizes_of

    assert len(sizes_of("cuda", 8)) == 4 and sizes_of("cuda", 8)[-1] == 2**27
    for ranks in (2, 64, 4096):
        for kind, most in (("cpu", 2**28), ("cuda", 2**32)):
            sizes = sizes_of(kind, ranks)
            assert sizes == sorted(set(sizes)) and sizes[-1] * ranks <= most
            assert all(nbytes % 4 == 0 for nbytes in sizes)
